"""The logprobs of a book's rows: a step stores them, a delivery takes them, a release clears them."""

from __future__ import annotations

import numpy as np

from asyncbook.ipc.columns import block_size
from asyncbook.ipc.layout import Field, Layout
from asyncbook.ipc.logprobs import LogprobColumns, section_size, section_start
from asyncbook.ipc.segment import give_back
from asyncbook.worker import logprob_kernels as kernels

NO_ENTRIES = np.zeros(0, np.int32)  # of a step that came without logprobs
ALL = 2**62  # more room than there can be

_WIDTH, _NUM_DELIVERED = int(Field.LOGPROBS_WIDTH), int(Field.NUM_DELIVERED)
_NUM_OUTPUT_TOKENS = int(Field.NUM_OUTPUT_TOKENS)


class LogprobTable:
    """The table of entries, and how far each row's sum has come. `work` is the ledger's; see `logprob_kernels`.

    The sums are not in the segment: whoever takes a book over derives them from the table (`derive_cumulative`).
    """

    def __init__(self, layout: Layout, memory: memoryview, work: np.ndarray, counters: np.ndarray) -> None:
        self._work, self._counters = work, counters
        self._region, self._memory = layout.logprobs, memory
        self.table = layout.logprobs.view(memory)
        self._values = self.table.view(np.float32)
        self.cumulative = np.zeros(layout.max_num_reqs, np.float64)

    def store(
        self, batch: np.ndarray, sampled: np.ndarray, num_ids: int, entries: np.ndarray, entries_width: int
    ) -> None:
        """What came with a step, for the ids that it has appended. `entries` as `stage_logprobs` makes them."""
        kernels.store_logprobs(
            self._work, self.table, self._counters, batch, sampled, num_ids, entries, entries_width
        )  # fmt: skip

    def take(self, rows: np.ndarray, num_rows: int, block: np.ndarray) -> tuple[int, int]:
        """Writes the section for as much as `block` has room for of what the rows are about to deliver. The ids must
        then be taken into the block's first values: (as many as these, size of the section behind them)."""
        n, num_ids, num_values = kernels.fit_logprobs(self._work, rows, num_rows, block.size)
        ids_size = block_size(n, num_ids)
        if num_values < 0:
            return ids_size, 0
        size = section_size(n, num_ids, num_values)
        start = section_start(ids_size)
        self._write(rows, n, num_ids, block[start : start + size])
        return ids_size, size

    def _write(self, rows: np.ndarray, n: int, num_ids: int, section: np.ndarray) -> None:
        wide = section[: 2 * n].view(np.float64)
        kernels.take_logprobs(
            self._work, self.table, self._values, self.cumulative, rows, n, num_ids, section, wide
        )  # fmt: skip

    def size_of_all(self, rows: np.ndarray, num_rows: int) -> int:
        """Values of a block that takes all that the rows have to deliver."""
        n, num_ids, num_values = kernels.fit_logprobs(self._work, rows, num_rows, ALL)
        # `fit_logprobs` counts one value between block and section, whether it is needed or not.
        return block_size(n, num_ids) + 1 + section_size(n, num_ids, max(num_values, 0))

    def take_row(self, row: int) -> LogprobColumns:
        """What one row is about to deliver."""
        num_ids = int(self._work[_NUM_OUTPUT_TOKENS, row] - self._work[_NUM_DELIVERED, row])
        width = int(self._work[_WIDTH, row])
        if width == 0:
            return LogprobColumns.none(1, num_ids)
        section = np.empty(section_size(1, num_ids, num_ids * width), np.int32)
        self._write(np.array([row], np.int32), 1, num_ids, section)
        return LogprobColumns(1, num_ids, section)

    def clear(self, row: int, give_back_bytes: int) -> None:
        """Zeroes a row that is released. Its pages go back where there are at least so many bytes of them."""
        width = int(self._work[_WIDTH, row])
        size = int(self._work[_NUM_OUTPUT_TOKENS, row]) * (1 + 2 * width) if width else 0
        self.table[row, :size] = 0
        self.cumulative[row] = 0.0
        if 4 * size >= give_back_bytes:
            give_back(self._memory, self._region.offset + row * 4 * self.table.shape[1], 4 * size)

    def derive_cumulative(self) -> None:
        """The sums of what has been delivered, for a ledger that took over."""
        kernels.derive_cumulative(self._work, self._values, self.cumulative)
