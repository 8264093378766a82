"""Kernels of the logprobs: those of a step into the table, those of a delivery out of it. `ipc/logprobs.py` has the
format.

`work` int32 [len(Field), P] as in `kernels.py`; `table` int32 [R, values]: entries of a row one after the other, each
of the size that its request asks for. Bits are copied as int32, so that whatever is in a float comes out as it went in.
"""

from __future__ import annotations

import numpy as np
from numba import types

from asyncbook.ipc import layout, wire
from asyncbook.ipc.columns import NUM_COLUMNS
from asyncbook.ipc.jit import kernel, rule
from asyncbook.ipc.logprobs import MISSING_ID, NO_RANK, NUM_SECTION_COLUMNS
from asyncbook.worker.kernels import NUM_DELIVERED
from asyncbook.worker.rules import OUTPUTS

LOGPROBS_WIDTH = int(layout.Field.LOGPROBS_WIDTH)
NUM_WITH_LOGPROBS = int(layout.Field.NUM_WITH_LOGPROBS)
NAN_LOGPROBS = int(layout.Counter.NAN_LOGPROBS)
MISSING_LOGPROBS = int(layout.Counter.MISSING_LOGPROBS)
BATCH_ROW, BATCH_WIDTH = wire.BatchField.ROW, wire.BatchField.LOGPROBS_WIDTH
MISSING_BITS = 0x7FC00000  # NaN
INFINITY_BITS, MAGNITUDE_BITS = 0x7F800000, 0x7FFFFFFF
VALUES_A_REQUEST = NUM_COLUMNS + 1 + NUM_SECTION_COLUMNS  # in block and section, its ids aside

_INT32 = types.int32[::1]
_INT32_2D = types.int32[:, ::1]
_FLOAT32_2D = types.float32[:, ::1]
_FLOAT64 = types.float64[::1]
_INT64 = types.int64[::1]
_INT = types.int64


@rule
def is_nan(bits):
    return (bits & MAGNITUDE_BITS) > INFINITY_BITS


@rule
def has_nan(table, row, start, width):
    """Whether a logprob of the entry at `start` came as NaN; a missing one did not come at all."""
    for j in range(1, width + 1):
        if is_nan(table[row, start + width + j]) and table[row, start + j] != MISSING_ID:
            return True
    return False


@rule
def store_entry(table, counters, row, output, width, given, at, num_given, token_id):
    """The entry of one output from that at `given[at]`, which has `num_given` logprobs; the rest is missing, and so is
    all of it where it is of another id than the one that was appended."""
    start = output * (1 + 2 * width)
    kept = min(num_given, width)
    if kept > 0 and given[at + 1] != token_id:
        kept = 0
    table[row, start] = given[at] if kept > 0 else NO_RANK
    for j in range(1, kept + 1):
        table[row, start + j] = given[at + j]
        table[row, start + width + j] = given[at + num_given + j]
    for j in range(kept + 1, width + 1):
        table[row, start + j] = MISSING_ID
        table[row, start + width + j] = MISSING_BITS
    counters[MISSING_LOGPROBS] += kept < width
    counters[NAN_LOGPROBS] += has_nan(table, row, start, width)


@kernel((_INT32_2D, _INT32_2D, _INT64, _INT32_2D, _INT32, _INT, _INT32, _INT))
def store_logprobs(work, table, counters, batch, sampled, num_ids, given, given_width):
    """Stores entries for what a step has appended; `sampled` int32, `num_ids` a row. `given`: entries for all `num_ids`
    of each row of the batch that wanted logprobs when it was made, in its order; `given_width` logprobs each at most,
    0: none came."""
    at = 0
    for i in range(batch.shape[1]):
        row = np.uintp(batch[BATCH_ROW, i])
        num_given = min(np.int64(batch[BATCH_WIDTH, i]), given_width)
        size = 1 + 2 * num_given if num_given > 0 else 0
        width = np.int64(work[LOGPROBS_WIDTH, row])
        if width > 0:
            first, last = np.int64(work[NUM_WITH_LOGPROBS, row]), np.int64(work[OUTPUTS, row])
            for output in range(first, last):
                index = output - first  # an id is kept only if all in front of it are
                store_entry(
                    table, counters, row, output, width, given, at + index * size, num_given,
                    sampled[i * num_ids + index],
                )  # fmt: skip
            work[NUM_WITH_LOGPROBS, row] = last
        at += num_ids * size


@kernel((_INT32_2D, _INT32, _INT, _INT))
def fit_logprobs(work, rows, num_rows, room):
    """How many of the rows, from the first on, fit into `room` int32 values with what they have to deliver, ids and
    logprobs: (requests, ids, values of logprobs; -1 of these where no request wants any). The last request may come
    with a part of its ids, of which there is at least one."""
    num_ids = np.int64(0)
    num_values = np.int64(0)
    wants_some = False
    left = room - 2  # the last offset, and what may lie between block and section
    for index in range(num_rows):
        row = np.uintp(rows[index])
        width = np.int64(work[LOGPROBS_WIDTH, row])
        available = np.int64(work[OUTPUTS, row]) - work[NUM_DELIVERED, row]
        left -= VALUES_A_REQUEST
        taken = min(available, left // (2 + 2 * width))
        if left < 0 or (taken == 0 and available > 0):
            return index, num_ids, num_values if wants_some else -1
        if width > 0:
            wants_some = True
        num_ids += taken
        num_values += taken * width
        left -= taken * (2 + 2 * width)
        if taken < available:
            return index + 1, num_ids, num_values if wants_some else -1
    return num_rows, num_ids, num_values if wants_some else -1


@kernel((_INT32_2D, _INT32_2D, _FLOAT32_2D, _FLOAT64, _INT32, _INT, _INT, _INT32, _FLOAT64))
def take_logprobs(work, table, table_values, cumulative, rows, n, num_ids, section, section_wide):
    """Writes the section of what n rows are about to deliver, `num_ids` ids in all. `table_values` float32 and
    `section_wide` float64 are the same memory as `table` and `section`. `cumulative` [R] goes along with what is
    delivered of each row."""
    ranks_at = NUM_SECTION_COLUMNS * n
    ids_at = ranks_at + num_ids
    values_at = ids_at + (section.shape[0] - ids_at) // 2
    taken = 0
    for index in range(n):
        row = np.uintp(rows[index])
        width = np.int64(work[LOGPROBS_WIDTH, row])
        first = np.int64(work[NUM_DELIVERED, row])
        last = min(np.int64(work[OUTPUTS, row]), first + num_ids - taken)
        nan = False
        for output in range(first, last):
            start = output * (1 + 2 * width)
            section[ranks_at + taken] = table[row, start] if width > 0 else NO_RANK
            taken += 1
            if width > 0:
                cumulative[row] += table_values[row, start + 1 + width]
                nan |= has_nan(table, row, start, width)
            for j in range(1, width + 1):
                section[ids_at] = table[row, start + j]
                section[values_at] = table[row, start + width + j]
                ids_at += 1
                values_at += 1
        section_wide[index] = cumulative[row] if width > 0 else np.nan
        section[2 * n + index] = width
        section[3 * n + index] = nan


@kernel((_INT32_2D, _FLOAT32_2D, _FLOAT64))
def derive_cumulative(work, table_values, cumulative):
    """What `take_logprobs` had added up, from the table: outputs that the row did not get in its own steps are zero."""
    for row in range(cumulative.shape[0]):
        width = np.int64(work[LOGPROBS_WIDTH, row])
        cumulative[row] = 0.0
        if width > 0:
            for output in range(work[NUM_DELIVERED, row]):
                cumulative[row] += table_values[row, output * (1 + 2 * width) + 1 + width]
