"""What a step does to vLLM's arrays, compiled: one pass over the batch each. See the callers for what it means.

The kernels check before they write: where one returns a row, it has written nothing.
"""

# Compiled: numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs
# mypy: disable-error-code="call-arg,var-annotated"

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import types

from asyncbook.ipc.jit import bare, generic_kernel
from asyncbook.worker.scatter_kernels import matrix_at

PADDING = -1
MAX_STOP_IDS = 8  # columns of stop ids a request; one with more goes the slow way


@generic_kernel
def take_sampled(
    sampled, is_int64, n, width, is_discarded, vocab_size, token_ids, is_token_ids, max_model_len, num_tokens,
    flat, ends,
):  # fmt: skip
    """Appends row i of `sampled` [n, width] to row i of the tables [R, max_model_len], and to `flat` int64.

    All arrays come as addresses of C-contiguous memory: a look at each would cost more than the work. `sampled` is
    int64 or int32, `token_ids` and `num_tokens` [R] int32, `is_discarded` [R] and `is_token_ids` bool. Of several ids
    a row, padding and those not below `vocab_size` are no ids; a single one is taken as it is. A discarded row has
    none. `ends` int64 [n]: where each row's ids end in `flat`. Returns how many rows are discarded, or -1 minus the
    first row that has no room.
    """
    wide, narrow = matrix_at(sampled, n, width, np.int64), matrix_at(sampled, n, width, np.int32)
    discarded = matrix_at(is_discarded, 1, n, np.uint8)[0]
    ids, masks = matrix_at(token_ids, n, max_model_len, np.int32), matrix_at(is_token_ids, n, max_model_len, np.uint8)
    lengths, taken = matrix_at(num_tokens, 1, n, np.int32)[0], matrix_at(flat, 1, n * width, np.int64)[0]
    stops = matrix_at(ends, 1, n, np.int64)[0]
    num_discarded = 0
    end = 0
    for i in range(n):
        if discarded[i]:
            num_discarded += 1
        else:
            start = end
            for j in range(width):
                token_id = wide[i, j] if is_int64 else np.int64(narrow[i, j])
                if width == 1 or (token_id != PADDING and token_id < vocab_size):
                    taken[end] = token_id
                    end += 1
            if lengths[i] + end - start > max_model_len:
                return -1 - i
        stops[i] = end
    start = 0
    for i in range(n):
        position = lengths[i]
        for k in range(start, stops[i]):
            ids[i, position] = taken[k]
            masks[i, position] = 1
            position += 1
        lengths[i] = position
        start = stops[i]
    return num_discarded


@generic_kernel
def take_placeholders(n, is_discarded, token_ids, is_token_ids, max_model_len, num_tokens):
    """Appends -1 to each of the first n rows that is not discarded: its id is still on the device. Arguments and result
    as in `take_sampled`."""
    discarded = matrix_at(is_discarded, 1, n, np.uint8)[0]
    ids, masks = matrix_at(token_ids, n, max_model_len, np.int32), matrix_at(is_token_ids, n, max_model_len, np.uint8)
    lengths = matrix_at(num_tokens, 1, n, np.int32)[0]
    num_discarded = 0
    for i in range(n):
        if discarded[i]:
            num_discarded += 1
        elif lengths[i] >= max_model_len:
            return -1 - i
    for i in range(n):
        if not discarded[i]:
            ids[i, lengths[i]] = PADDING
            masks[i, lengths[i]] = 1
            lengths[i] += 1
    return num_discarded


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


@cache
def runner_kernels() -> tuple[Callable[..., int], Callable[..., int]]:
    """`take_sampled` and `take_placeholders` as machine code for ints. The caller answers for every address."""
    return bare(take_sampled, *(types.int64,) * 12), bare(take_placeholders, *(types.int64,) * 6)


def compile_all() -> None:
    """Makes the kernels ready for the types that vLLM has, so that nothing is compiled in the middle of a step."""
    runner_kernels()
    column = np.zeros(1, np.int32)
    stops, is_plain = np.zeros((1, MAX_STOP_IDS), np.int32), np.zeros(1, np.uint8)
    find_plain(column, column, column, 1, column, column, column, stops, is_plain)
