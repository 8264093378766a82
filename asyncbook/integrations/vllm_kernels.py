"""What a step does to vLLM's arrays, compiled: one pass over the batch each. See the callers for what it means.

The kernels check before they write: where one returns a row, it has written nothing.
"""

# Compiled: numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from asyncbook.ipc.jit import generic_kernel

PADDING = -1
MAX_STOP_IDS = 8  # columns of stop ids a request; one with more goes the slow way


@generic_kernel
def take_sampled(sampled, is_discarded, vocab_size, token_ids, is_token_ids, num_tokens, flat, ends):
    """Appends row i of `sampled` [n, w] to row i of the tables [R, L], and to `flat` [n * w].

    Of several ids a row, padding and those not below `vocab_size` are no ids; a single one is taken as it is. A row
    with `is_discarded` [R] has none. `ends` [n]: where each row's ids end in `flat`. Returns -1; or the first row that
    has no room.
    """
    n, width = sampled.shape
    is_single = width == 1
    end = 0
    for i in range(n):
        if not is_discarded[i]:
            start = end
            for j in range(width):
                token_id = sampled[i, j]
                if is_single or (token_id != PADDING and token_id < vocab_size):
                    flat[end] = token_id
                    end += 1
            if num_tokens[i] + end - start > token_ids.shape[1]:
                return i
        ends[i] = end
    start = 0
    for i in range(n):
        position = num_tokens[i]
        for k in range(start, ends[i]):
            token_ids[i, position] = flat[k]
            is_token_ids[i, position] = True
            position += 1
        num_tokens[i] = position
        start = ends[i]
    return -1


@generic_kernel
def take_placeholders(n, is_discarded, token_ids, is_token_ids, num_tokens):
    """Appends -1 to each of the first n rows that is not discarded: its id is still on the device. Returns -1; or the
    first row that has no room."""
    for i in range(n):
        if not is_discarded[i] and num_tokens[i] >= token_ids.shape[1]:
            return i
    for i in range(n):
        if not is_discarded[i]:
            position = num_tokens[i]
            token_ids[i, position] = PADDING
            is_token_ids[i, position] = True
            num_tokens[i] = position + 1
    return -1


@generic_kernel
def find_plain(slots, counts, flat, block_size, num_tokens, limits, eos_token_ids, stop_token_ids, is_plain):
    """Which rows of a step only grow: nothing ends, no block fills up. Returns how many.

    `slots` [n]: where a row's request is in the columns, -1: nowhere. `counts` [n] ids a row, all of them one after
    the other in `flat`. Columns [S]: `num_tokens` (grows for the rows found), `limits` (as many tokens end it),
    `eos_token_ids` (-1: none); `stop_token_ids` [S, MAX_STOP_IDS], -1 pads. `is_plain` uint8 [n] is written.
    """
    found = 0
    start = 0
    for i in range(slots.shape[0]):
        slot, count = slots[i], counts[i]
        end = start + count
        is_found = slot >= 0 and count > 0
        if is_found:
            before, after = num_tokens[slot], num_tokens[slot] + count
            # The last token is not computed yet: what is cached of blocks may change with either of the two.
            is_found = (
                after < limits[slot]
                and before // block_size == after // block_size
                and (before - 1) // block_size == (after - 1) // block_size
            )
            for k in range(start, end):
                is_found &= flat[k] != eos_token_ids[slot]
                for which in range(stop_token_ids.shape[1]):
                    stop = stop_token_ids[slot, which]
                    if stop < 0:
                        break
                    is_found &= flat[k] != stop
            if is_found:
                num_tokens[slot] = after
                found += 1
        is_plain[i] = is_found
        start = end
    return found


def compile_all() -> None:
    """Makes the kernels ready for the types that vLLM has, so that nothing is compiled in the middle of a step."""
    table, mask, column = np.zeros((1, 4), np.int32), np.zeros((1, 4), np.bool_), np.zeros(1, np.int32)
    is_discarded, ends = np.zeros(1, np.bool_), np.zeros(1, np.int64)
    for dtype in (np.int32, np.int64):
        take_sampled(np.zeros((1, 1), dtype), is_discarded, 1, table, mask, column, np.zeros(1, np.int64), ends)
    take_placeholders(1, is_discarded, table, mask, column)
    stops, is_plain = np.zeros((1, MAX_STOP_IDS), np.int32), np.zeros(1, np.uint8)
    find_plain(column, column, column, 1, column, column, column, stops, is_plain)
