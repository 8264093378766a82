"""Keeps what the next step will touch in the caches of the sidecar's core, while the sidecar looks out for that step.

Each row of a step is written at another place of both tables: two cache misses a row, which are most of the time that a
step takes after a pause. Reading those places while there is nothing else to do brings them in before they are needed.
"""

from __future__ import annotations

from time import monotonic_ns

from numba import types

from asyncbook.ipc.jit import kernel
from asyncbook.ipc.layout import LINE_BYTES
from asyncbook.worker.ledger import Ledger
from asyncbook.worker.rules import NO_SPEC

INTERVAL_NS = 50_000  # not at every look: a look must stay short
MAX_ROWS = 1024  # a few microseconds; what comes in the middle of it waits for no longer than that
_LINE_INT32S = LINE_BYTES // 4


@kernel((types.int32[:, ::1], types.int32[:, ::1], types.boolean[:, ::1], types.int64))
def touch(work, token_ids, is_token_ids, num_rows):
    """Reads the columns of the first rows, and both tables where each of those that are in use will be written next.
    Returns a number that depends on all of it, so that the reads are not left out."""
    total = 0
    for field in range(work.shape[0]):
        for row in range(0, num_rows, _LINE_INT32S):
            total += work[field, row]
    for row in range(num_rows):
        position = work[NO_SPEC, row]
        if 0 < position < token_ids.shape[1]:
            total += token_ids[row, position] + is_token_ids[row, position]
    return total


class Warmth:
    """Of one ledger's memory."""

    def __init__(self, ledger: Ledger) -> None:
        tables = ledger.tables
        self._memory = ledger.work, tables.token_ids, tables.is_token_ids, min(tables.layout.max_num_reqs, MAX_ROWS)
        self._touched_ns = 0

    def keep(self) -> None:
        """To be called while there is nothing to do."""
        now_ns = monotonic_ns()
        if now_ns - self._touched_ns > INTERVAL_NS:
            touch(*self._memory)
            self._touched_ns = now_ns
