"""What a step does to vLLM's arrays, compiled: one pass over the batch each. See the callers for what it means.

The kernels check before they write: where one returns a row, it has written nothing.
"""

# Compiled: numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs
# mypy: disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from asyncbook.ipc.jit import bare, generic_kernel, rule
from asyncbook.ipc.prefetch import prefetch
from asyncbook.worker.scatter_kernels import matrix_at

PADDING = -1
MAX_STOP_IDS = 8  # columns of stop ids a request; one with more goes the slow way
# CPython's list, in words: how many entries there are, where they are.
LIST_WORDS = 5
LIST_SIZE, LIST_ITEMS = 2, 3
# What `take_sampled` is told once, the words of its argument `known`. Addresses are of C-contiguous memory, R rows.
IS_DISCARDED = 0  # address, bool [R]
TOKEN_IDS = 1  # address, int32 [R, max_model_len]
IS_TOKEN_IDS = 2  # address, bool [R, max_model_len]
NUM_TOKENS = 3  # address, int32 [R]
MAX_MODEL_LEN = 4
VOCAB_SIZE = 5
FLAT = 6  # address, int32
ENDS = 7  # address, int64 [R]
NUM_KNOWN = 8


def lists_are_as_known() -> bool:
    """Whether lists are laid out as `fetch_ends` takes them to be. It would do no harm otherwise, nor be of use."""
    if sys.implementation.name != "cpython" or list.__basicsize__ != 8 * LIST_WORDS:
        return False
    probe = [object(), object()]
    words = (ctypes.c_int64 * LIST_WORDS).from_address(id(probe))
    if words[LIST_SIZE] != len(probe):
        return False
    items = (ctypes.c_int64 * len(probe)).from_address(words[LIST_ITEMS])
    return list(items) == list(map(id, probe))


@rule
def fetch_rows(n, token_ids, is_token_ids, max_model_len, lengths, lists):
    """Asks for the lines that a step writes in each row of the tables, and for the rows' lists, all at once.

    `lists`: the address of a list of n lists, 0: none."""
    for i in range(n):
        place = i * max_model_len + lengths[i]
        prefetch(token_ids + 4 * place)
        prefetch(is_token_ids + place)
    if lists != 0:
        fetch_heads(n, lists)


@rule
def fetch_heads(n, lists):
    """Asks for the heads of the lists."""
    rows = matrix_at(matrix_at(lists, 1, LIST_WORDS, np.int64)[0, LIST_ITEMS], 1, n, np.int64)[0]
    for i in range(n):
        prefetch(rows[i])


@rule
def fetch_ends(n, lists):
    """Asks for the end of each of the lists, where a step appends. Their heads are looked at."""
    rows = matrix_at(matrix_at(lists, 1, LIST_WORDS, np.int64)[0, LIST_ITEMS], 1, n, np.int64)[0]
    for i in range(n):
        words = matrix_at(rows[i], 1, LIST_WORDS, np.int64)[0]
        prefetch(words[LIST_ITEMS] + 8 * words[LIST_SIZE])


@generic_kernel
def take_sampled(sampled, start, n, width, known, lists):
    """Appends row i of `sampled` [n, width] to row i of the tables, and to `flat` from its entry `start` on.

    `sampled`: the address of int32; `known`: of the words above, int64; a look at each array would cost more than the
    work. Of several ids a row, padding and those not below the vocabulary's size are no ids; a single one is taken as
    it is. A discarded row has none. `ends` [n] is where each row's ids end, counted from `start`. `lists`: the address
    of a list of n lists that the caller appends to next, which are fetched, no more; 0: none. Returns how many rows are
    discarded, or -1 minus the first row that has no room.
    """
    words = matrix_at(known, 1, NUM_KNOWN, np.int64)[0]
    token_ids, is_token_ids = words[TOKEN_IDS], words[IS_TOKEN_IDS]
    max_model_len = words[MAX_MODEL_LEN]
    vocab_size = words[VOCAB_SIZE]
    lengths = matrix_at(words[NUM_TOKENS], 1, n, np.int32)[0]
    fetch_rows(n, token_ids, is_token_ids, max_model_len, lengths, lists)
    new = matrix_at(sampled, n, width, np.int32)
    discarded = matrix_at(words[IS_DISCARDED], 1, n, np.uint8)[0]
    ids, masks = matrix_at(token_ids, n, max_model_len, np.int32), matrix_at(is_token_ids, n, max_model_len, np.uint8)
    taken = matrix_at(words[FLAT] + 4 * start, 1, n * width, np.int32)[0]
    stops = matrix_at(words[ENDS], 1, n, np.int64)[0]
    num_discarded = 0
    end = 0
    for i in range(n):
        if discarded[i]:
            num_discarded += 1
        else:
            before = end
            for j in range(width):
                token_id = new[i, j]
                if width == 1 or (token_id != PADDING and token_id < vocab_size):
                    taken[end] = token_id
                    end += 1
            if lengths[i] + end - before > max_model_len:
                return -1 - i
        stops[i] = end
    if lists != 0:
        fetch_ends(n, lists)
    k = 0
    for i in range(n):
        position = lengths[i]
        while k < stops[i]:
            ids[i, position] = taken[k]
            masks[i, position] = 1
            position += 1
            k += 1
        lengths[i] = position
    return num_discarded


@generic_kernel
def take_placeholders(n, known, lists):
    """Appends -1 to each of the first n rows that is not discarded: its id is still on the device. Arguments and result
    as in `take_sampled`."""
    words = matrix_at(known, 1, NUM_KNOWN, np.int64)[0]
    token_ids, is_token_ids = words[TOKEN_IDS], words[IS_TOKEN_IDS]
    max_model_len = words[MAX_MODEL_LEN]
    lengths = matrix_at(words[NUM_TOKENS], 1, n, np.int32)[0]
    fetch_rows(n, token_ids, is_token_ids, max_model_len, lengths, lists)
    discarded = matrix_at(words[IS_DISCARDED], 1, n, np.uint8)[0]
    ids, masks = matrix_at(token_ids, n, max_model_len, np.int32), matrix_at(is_token_ids, n, max_model_len, np.uint8)
    num_discarded = 0
    for i in range(n):
        if discarded[i]:
            num_discarded += 1
        elif lengths[i] >= max_model_len:
            return -1 - i
    if lists != 0:
        fetch_ends(n, lists)
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


@generic_kernel
def fetch_lists(n, lists):
    """Asks for a list of n lists and for their ends, which the caller appends to next. `lists`: its address."""
    fetch_heads(n, lists)
    fetch_ends(n, lists)


@cache
def runner_kernels() -> tuple[Callable[..., int], Callable[..., int]]:
    """`take_sampled` and `take_placeholders` as machine code for ints. The caller answers for every address."""
    return bare(take_sampled, *(types.int64,) * 6), bare(take_placeholders, *(types.int64,) * 3)


@cache
def list_fetcher() -> Callable[[list[list[int]]], Any]:
    """A function that fetches lists which are appended to next; one that does nothing where lists are unknown."""
    fetch = bare(fetch_lists, types.int64, types.int64)
    return (lambda lists: fetch(len(lists), id(lists))) if lists_are_as_known() else (lambda lists: None)


def compile_all() -> None:
    """Makes the kernels ready for the types that vLLM has, so that nothing is compiled in the middle of a step."""
    runner_kernels()
    list_fetcher()
    column = np.zeros(1, np.int32)
    stops, is_plain = np.zeros((1, MAX_STOP_IDS), np.int32), np.zeros(1, np.uint8)
    find_plain(column, column, column, 1, column, column, column, stops, is_plain)
