"""The kernels that a book calls: one fused pass a step, and the passes that clear a row and gather outputs.

Arrays, with R = max_num_reqs, L = max_model_len, P = R padded to a cache line:
`work` int32 [len(Field), P], `token_ids` int32 and `is_token_ids` bool [R, L and padding], `stop_ids` int32 [R, S],
`counters` int64 [>= num_counters], `row_counters` int64 [R, >= 4 + num_spec_tokens],
`lists` int32 [NUM_LISTS, R] with `lengths` int64 [NUM_LISTS] (rows touched since the last frame, rows given drafts by
the last step, rows with something to deliver), `frame_int32` int32 [NUM_INT32_COLUMNS, P], `frame_uint8` uint8 [P],
`history` int32 [num_frames, R] with `history_lengths` int64 [num_frames]: the rows that changed in the last steps.
"""

from __future__ import annotations

import numpy as np
from numba import types

from asyncbook.ipc import layout, wire
from asyncbook.ipc.columns import NUM_COLUMNS
from asyncbook.ipc.jit import kernel, rule
from asyncbook.worker import rules
from asyncbook.worker.rules import (
    DRAFTED,
    FINISH_REASON,
    GENERATION,
    IS_PENDING,
    IS_TOUCHED,
    LAST_TOKEN_ID,
    NO_SPEC,
    NUM_GIVEN_DRAFTS,
    NUM_TOKENS,
    NUM_VERIFIED_DRAFTS,
    OUTPUTS,
    PENDING,
    PROMPT,
    STOP_REASON,
    TAKES_DRAFTS,
    TOUCHED,
    UNCHANGED,
)

NUM_DELIVERED = int(rules.Field.NUM_DELIVERED)
BATCH_ROW, BATCH_GENERATION = wire.BatchField.ROW, wire.BatchField.GENERATION
BATCH_SCHEDULED, BATCH_DRAFTS = wire.BatchField.NUM_SCHEDULED_TOKENS, wire.BatchField.NUM_DRAFT_TOKENS
NUM_INT32_COLUMNS = layout.NUM_INT32_COLUMNS
ALL_ROWS = -1  # a history length: any row may have changed
SPARSE_SHARE = 4  # copying row by row pays while fewer than one row in this many changed

_INT32 = types.int32[::1]
_INT32_2D = types.int32[:, ::1]
_INT64 = types.int64[::1]
_INT64_2D = types.int64[:, ::1]
_UINT8 = types.uint8[::1]
_BOOL = types.boolean[::1]
_BOOL_2D = types.boolean[:, ::1]
_INT = types.int64
_BOOK = (_INT32_2D, _INT32_2D, _BOOL_2D)  # work, token_ids, is_token_ids


@rule
def retire_drafts(work, token_ids, is_token_ids, lists, lengths):
    """What the last step proposed lies in the table no longer; how much it was is kept for the rows of this step."""
    for index in range(lengths[DRAFTED]):
        row = lists[DRAFTED, index]
        work[NUM_VERIFIED_DRAFTS, row] = work[NUM_GIVEN_DRAFTS, row]
        if rules.drop_drafts(work, token_ids, is_token_ids, row):
            rules.add_to_list(work, lists, lengths, IS_TOUCHED, TOUCHED, row)


@rule
def give_drafts(work, token_ids, is_token_ids, counters, lists, lengths, batch, takes_drafts, drafts, draft_width,
                vocab_size, max_model_len):  # fmt: skip
    """Rule 6 for the whole batch, and the list of rows that hold drafts from now on."""
    for index in range(lengths[DRAFTED]):
        work[NUM_VERIFIED_DRAFTS, lists[DRAFTED, index]] = 0
    lengths[DRAFTED] = 0
    if draft_width == 0:
        return
    for i in range(batch.shape[1]):
        if takes_drafts[i]:
            rules.write_drafts(
                work, token_ids, is_token_ids, counters, lists, lengths,
                drafts[i * draft_width : (i + 1) * draft_width], batch[BATCH_ROW, i], vocab_size, max_model_len,
            )  # fmt: skip


@rule
def copy_row(work, frame_int32, frame_uint8, row):
    for column in range(NUM_INT32_COLUMNS):
        frame_int32[column, row] = work[column, row]
    frame_uint8[row] = np.uint8(work[FINISH_REASON, row])


@rule
def copy_frame(work, lists, lengths, frame_int32, frame_uint8, history, history_lengths, slot):
    """Writes the frame whole. Its slot holds the frame of num_frames steps ago, so where few rows changed since, only
    those are copied: cost follows the rows that changed, not the size of the book."""
    num_rows = history.shape[1]
    num_frames = history.shape[0]
    num_touched = lengths[TOUCHED]
    changed = num_touched
    for other in range(num_frames):
        if other != slot:
            changed = -1 if history_lengths[other] == ALL_ROWS or changed < 0 else changed + history_lengths[other]
    if changed < 0 or history_lengths[slot] == ALL_ROWS or changed * SPARSE_SHARE >= num_rows:
        for column in range(NUM_INT32_COLUMNS):
            for row in range(num_rows):
                frame_int32[column, row] = work[column, row]
        for row in range(num_rows):
            frame_uint8[row] = np.uint8(work[FINISH_REASON, row])
    else:
        for other in range(num_frames):
            if other != slot:
                for index in range(history_lengths[other]):
                    copy_row(work, frame_int32, frame_uint8, history[other, index])
        for index in range(num_touched):
            copy_row(work, frame_int32, frame_uint8, lists[TOUCHED, index])
    for index in range(num_touched):
        row = lists[TOUCHED, index]
        history[slot, index] = row
        work[IS_TOUCHED, row] = 0
    history_lengths[slot] = num_touched
    lengths[TOUCHED] = 0


@kernel(
    (*_BOOK, _INT32_2D, _INT64, _INT64_2D, _INT32_2D, _INT64, _INT32_2D, _BOOL, _INT32, _INT, _INT32, _INT, _INT32_2D,
     _UINT8, _INT32_2D, _INT64, _INT, _INT, _INT),
)  # fmt: skip
def apply_step(work, token_ids, is_token_ids, stop_ids, counters, row_counters, lists, lengths, batch, takes_drafts,
               sampled, width, drafts, draft_width, frame_int32, frame_uint8, history, history_lengths, slot,
               vocab_size, max_model_len):  # fmt: skip
    """One whole step: every row of the batch by the rules, then the frame. `batch` int32 [4, n] as in `BatchField`,
    `sampled` and `drafts` int32, `width` and `draft_width` ids a row, row after row (a draft width of 0: none were
    given); `takes_drafts` bool [>= n] is scratch."""
    retire_drafts(work, token_ids, is_token_ids, lists, lengths)
    for i in range(batch.shape[1]):
        row = np.uintp(batch[BATCH_ROW, i])  # unsigned: an index that cannot count from the end needs no check for it
        num_outputs_before = work[OUTPUTS, row]
        change = rules.step_row(
            work, token_ids, is_token_ids, stop_ids, counters, row_counters,
            sampled[i * width : (i + 1) * width], row,
            batch[BATCH_GENERATION, i], batch[BATCH_SCHEDULED, i], batch[BATCH_DRAFTS, i], vocab_size,
            max_model_len,
        )  # fmt: skip
        takes_drafts[i] = change == TAKES_DRAFTS
        if change != UNCHANGED:
            rules.add_to_list(work, lists, lengths, IS_TOUCHED, TOUCHED, row)
            if work[OUTPUTS, row] > num_outputs_before or work[FINISH_REASON, row] != 0:
                rules.add_to_list(work, lists, lengths, IS_PENDING, PENDING, row)
    give_drafts(
        work, token_ids, is_token_ids, counters, lists, lengths, batch, takes_drafts, drafts, draft_width,
        vocab_size, max_model_len,
    )  # fmt: skip
    copy_frame(work, lists, lengths, frame_int32, frame_uint8, history, history_lengths, slot)


@kernel((*_BOOK, _INT64, _INT32_2D, _INT64, _INT, _INT, _INT))
def end_row(work, token_ids, is_token_ids, counters, lists, lengths, row, finish_reason, stop_reason):
    """Finishes a request outside of a step; its end is delivered like any other."""
    rules.finish(work, token_ids, is_token_ids, counters, row, finish_reason, stop_reason)
    rules.add_to_list(work, lists, lengths, IS_TOUCHED, TOUCHED, row)
    rules.add_to_list(work, lists, lengths, IS_PENDING, PENDING, row)


@kernel((*_BOOK, _INT64_2D, _INT32_2D, _INT64, _INT))
def clear_row(work, token_ids, is_token_ids, row_counters, lists, lengths, row):
    """Zeroes a row: its columns but `generation` (and the two list marks), and what was in use of both tables."""
    for position in range(work[NUM_TOKENS, row]):
        token_ids[row, position] = 0
        is_token_ids[row, position] = False
    for column in range(work.shape[0]):
        if column not in (GENERATION, IS_TOUCHED, IS_PENDING):
            work[column, row] = 0
    for index in range(row_counters.shape[1]):
        row_counters[row, index] = 0
    rules.add_to_list(work, lists, lengths, IS_TOUCHED, TOUCHED, row)


@kernel((_INT32_2D, _INT32_2D, _INT32_2D, _INT64, _INT32, _INT32))
def take_pending(work, token_ids, lists, lengths, request_nos, block):
    """Writes what is to be delivered into `block` (see `ipc/columns.py`), in the order in which the rows got it, and
    returns the number of its token ids. From here on it counts as delivered, unless the block is too small for that
    many: then nothing has changed."""
    n = lengths[PENDING]
    first_id = (NUM_COLUMNS + 1) * n + 1
    room = block.shape[0] - first_id
    end = 0
    block[NUM_COLUMNS * n] = 0
    for index in range(n):
        row = np.uintp(lists[PENDING, index])
        prompt = work[PROMPT, row]
        num_written = work[NO_SPEC, row] - prompt  # outputs in the table; one more may be in a column only
        first, last = work[NUM_DELIVERED, row], work[OUTPUTS, row]
        if end + last - first <= room:
            for output in range(first, last):
                token_id = token_ids[row, prompt + output] if output < num_written else work[LAST_TOKEN_ID, row]
                block[first_id + end + output - first] = token_id
        end += last - first
        block[index] = request_nos[row]
        block[n + index] = work[FINISH_REASON, row]
        block[2 * n + index] = work[STOP_REASON, row]
        block[NUM_COLUMNS * n + 1 + index] = end
    if end <= room:
        for index in range(n):
            row = np.uintp(lists[PENDING, index])
            work[NUM_DELIVERED, row] = work[OUTPUTS, row]
            work[IS_PENDING, row] = 0
        lengths[PENDING] = 0
    return end
