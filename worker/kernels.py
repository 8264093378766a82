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
from asyncbook.ipc.prefetch import prefetch
from asyncbook.worker import rules
from asyncbook.worker.rules import (
    DRAFTED,
    FINISH_REASON,
    GENERATION,
    IS_DIRTY,
    IS_PENDING,
    IS_TOUCHED,
    LAST_TOKEN_ID,
    NO_SPEC,
    NUM_GIVEN_DRAFTS,
    NUM_STOP_IDS,
    NUM_TOKENS,
    NUM_VERIFIED_DRAFTS,
    OUTPUTS,
    PENDING,
    PROMPT,
    REQUEST_NO,
    STOP_REASON,
    TAKEN,
    TAKES_DRAFTS,
    TOUCHED,
    UNCHANGED,
)

NUM_DELIVERED = int(layout.Field.NUM_DELIVERED)
NUM_CHECKPOINTS = layout.NUM_CHECKPOINTS
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
        work[NUM_GIVEN_DRAFTS, row] = 0
        work[IS_DIRTY, row] = NUM_CHECKPOINTS
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


@rule
def fetch_ends(work, token_ids, is_token_ids, stop_ids, batch):
    """Asks for what a step touches of each row in the tables, a line each far from all others, before the first is
    waited for."""
    ids, masks, stops = token_ids.ctypes.data, is_token_ids.ctypes.data, stop_ids.ctypes.data
    for i in range(batch.shape[1]):
        row = np.int64(batch[BATCH_ROW, i])
        place = row * token_ids.shape[1] + work[NO_SPEC, row]
        prefetch(ids + 4 * place)
        prefetch(masks + row * is_token_ids.shape[1] + work[NO_SPEC, row])
        if work[NUM_STOP_IDS, row] > 0:
            prefetch(stops + 4 * row * stop_ids.shape[1])


@kernel(
    (*_BOOK, _INT32_2D, _INT64, _INT64_2D, _INT32_2D, _INT64, _INT32_2D, _BOOL, _INT32, _INT, _INT32, _INT, _INT32,
     _INT32_2D, _UINT8, _INT32_2D, _INT64, _INT, _INT, _INT),
)  # fmt: skip
def apply_step(work, token_ids, is_token_ids, stop_ids, counters, row_counters, lists, lengths, batch, takes_drafts,
               sampled, width, drafts, draft_width, stop_strings_at, frame_int32, frame_uint8, history,
               history_lengths, slot, vocab_size, max_model_len):  # fmt: skip
    """One whole step: every row of the batch by the rules, then the frame. `batch` int32 [4, n] as in `BatchField`,
    `sampled` and `drafts` int32, `width` and `draft_width` ids a row, row after row (a draft width of 0: none were
    given); `takes_drafts` bool [>= n] is scratch; `stop_strings_at` int32 [>= n]: with which of its ids each row's stop
    string is complete, -1 for none."""
    fetch_ends(work, token_ids, is_token_ids, stop_ids, batch)
    retire_drafts(work, token_ids, is_token_ids, lists, lengths)
    for i in range(batch.shape[1]):
        row = np.uintp(batch[BATCH_ROW, i])  # unsigned: an index that cannot count from the end needs no check for it
        num_outputs_before = work[OUTPUTS, row]
        change = rules.step_row(
            work, token_ids, is_token_ids, stop_ids, counters, row_counters,
            sampled[i * width : (i + 1) * width], row,
            batch[BATCH_GENERATION, i], batch[BATCH_SCHEDULED, i], batch[BATCH_DRAFTS, i], stop_strings_at[i],
            vocab_size, max_model_len,
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


@kernel((_INT32_2D, _INT32_2D, _INT32_2D, _INT32, _INT, _INT32, _BOOL, _INT, _INT))
def count_kept_ids(work, stop_ids, batch, sampled, width, counts, ends_by_id, vocab_size, max_model_len):
    """How many of its ids each row of a step would keep if there were no stop strings, and whether the last of them is
    a stop id: `counts` int32 and `ends_by_id` bool, [>= n]. Changes nothing else."""
    for i in range(batch.shape[1]):
        row, d = np.uintp(batch[BATCH_ROW, i]), batch[BATCH_DRAFTS, i]
        scheduled = rules.num_scheduled(work, row, batch[BATCH_SCHEDULED, i], d)
        counts[i], ends_by_id[i] = 0, False
        if rules.fate_of_ids(work, row, batch[BATCH_GENERATION, i], scheduled, d) == TAKEN:
            sampled_row = sampled[i * width : (i + 1) * width]
            v = rules.count_verified(sampled_row)
            counts[i], ends_by_id[i] = rules.count_kept(work, stop_ids, sampled_row, v, row, vocab_size, max_model_len)


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


@kernel((_INT32_2D, _INT32_2D, _INT64))
def count_pending_ids(work, lists, lengths):
    """Ids that rows have to deliver."""
    total = 0
    for index in range(lengths[PENDING]):
        row = np.uintp(lists[PENDING, index])
        total += work[OUTPUTS, row] - work[NUM_DELIVERED, row]
    return total


@rule
def num_pending_that_fit(work, lists, num_pending, room):
    """How many pending rows, from the first on, a block of `room` values takes, and of how many ids. The last of them
    may come with a part of its ids, of which there is at least one."""
    end = 0
    for index in range(num_pending):
        row = np.uintp(lists[PENDING, index])
        end += work[OUTPUTS, row] - work[NUM_DELIVERED, row]
        left = room - ((NUM_COLUMNS + 1) * (index + 1) + 1) - end
        if left < 0:
            num_ids = work[OUTPUTS, row] - work[NUM_DELIVERED, row] + left
            return (index + 1, end + left) if num_ids > 0 else (index, end - num_ids + left)
    return num_pending, end


@kernel((_INT32_2D, _INT32_2D, _INT32_2D, _INT64, _INT32, _INT))
def take_pending(work, token_ids, lists, lengths, block, max_rows):
    """Writes what is to be delivered into `block` (see `ipc/columns.py`), as much as fits and of at most `max_rows`
    rows, in the order in which the rows got it, and returns (number of requests, number of ids). From here on it counts
    as delivered; a row of which only a part was taken stays pending, and its end is told with its last id."""
    num_pending = lengths[PENDING]
    n, num_ids = num_pending_that_fit(work, lists, min(num_pending, max_rows), block.shape[0])
    first_id = (NUM_COLUMNS + 1) * n + 1
    start = 0
    num_whole = n
    block[NUM_COLUMNS * n] = 0
    for index in range(n):
        row = np.uintp(lists[PENDING, index])
        prompt = work[PROMPT, row]
        num_written = work[NO_SPEC, row] - prompt  # outputs in the table; one more may be in a column only
        first = work[NUM_DELIVERED, row]
        last = min(work[OUTPUTS, row], first + num_ids - start)
        for output in range(first, last):
            token_id = token_ids[row, prompt + output] if output < num_written else work[LAST_TOKEN_ID, row]
            block[first_id + start + output - first] = token_id
        start += last - first
        is_whole = last == work[OUTPUTS, row]
        block[index] = work[REQUEST_NO, row]
        block[n + index] = work[FINISH_REASON, row] if is_whole else 0
        block[2 * n + index] = work[STOP_REASON, row] if is_whole else -1
        block[NUM_COLUMNS * n + 1 + index] = start
        work[NUM_DELIVERED, row] = last
        work[IS_DIRTY, row] = NUM_CHECKPOINTS
        if is_whole:
            work[IS_PENDING, row] = 0
        else:
            num_whole = index
    for index in range(num_whole, num_pending):
        lists[PENDING, index - num_whole] = lists[PENDING, index]
    lengths[PENDING] = num_pending - num_whole
    return n, num_ids


@rule
def copy_all_rows(work, row_counters, to_work, to_row_counters):
    for column in range(work.shape[0]):
        for row in range(work.shape[1]):
            to_work[column, row] = work[column, row]
    for row in range(row_counters.shape[0]):
        for index in range(row_counters.shape[1]):
            to_row_counters[row, index] = row_counters[row, index]


@rule
def copy_dirty_rows(work, row_counters, to_work, to_row_counters):
    for row in range(row_counters.shape[0]):
        if work[IS_DIRTY, row] > 0:
            for column in range(work.shape[0]):
                to_work[column, row] = work[column, row]
            for index in range(row_counters.shape[1]):
                to_row_counters[row, index] = row_counters[row, index]


@kernel((_INT32_2D, _INT64, _INT64_2D, _INT32_2D, _INT64, _INT64_2D))
def write_checkpoint(work, counters, row_counters, to_work, to_counters, to_row_counters):
    """Copies all that changed since this slot's last checkpoint. There are NUM_CHECKPOINTS slots, used in turn, so a
    row that changed once is copied that often. Where many rows changed, all are copied, which is then quicker."""
    num_dirty = 0
    for row in range(work.shape[1]):
        num_dirty += work[IS_DIRTY, row] > 0
    if num_dirty * SPARSE_SHARE >= row_counters.shape[0]:
        copy_all_rows(work, row_counters, to_work, to_row_counters)
    else:
        copy_dirty_rows(work, row_counters, to_work, to_row_counters)
    for row in range(work.shape[1]):
        work[IS_DIRTY, row] = max(work[IS_DIRTY, row] - 1, 0)
    for index in range(counters.shape[0]):
        to_counters[index] = counters[index]
