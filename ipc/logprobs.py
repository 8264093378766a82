"""Logprobs as they cross, lie and leave.

An **entry** is what is kept for one output of a request that wants logprobs of `width` ids, the sampled one and the top
`k = width - 1`: int32 values `rank`, `token_ids` [width], and float32 `logprobs` [width] in the same 4 bytes each, bit
for bit as they came. `token_ids[0]` is the sampled id, `rank` its place in the vocabulary, from 1; the others are the
top k, best first, where the sampled id may come again. A **missing** place has the id -1 and the logprob NaN, and the
rank is 0 where the sampled id's is missing: the step came without logprobs for it, with too few, or with those of
another id.

A **section** is the logprobs of a delivery of n requests and N ids (`ipc/columns.py`), of which V values are kept. It
lies behind the delivery's block, at an even place, and is left out where no request wants any:

    float64 cumulative [n]   int32 widths [n]   has_nan [n]   ranks [N]   token_ids [V]   float32 logprobs [V]

Request i has `widths[i]` values for each of its ids, 0 where it wants none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MISSING_ID = -1
NO_RANK = 0
NUM_SECTION_COLUMNS = 4  # int32 values a request, the two halves of a float64 among them


def section_start(block_size: int) -> int:
    """Where the section behind a block of so many int32 values starts: its float64 are aligned."""
    return block_size + block_size % 2


def section_size(n: int, num_ids: int, num_values: int) -> int:
    """int32 values of a section."""
    return NUM_SECTION_COLUMNS * n + num_ids + 2 * num_values


class LogprobColumns:
    """The logprobs of a delivery: views of a section, which is int32 and 8-byte aligned."""

    __slots__ = ("n", "num_ids", "section")

    def __init__(self, n: int, num_ids: int, section: np.ndarray) -> None:
        self.n = n
        self.num_ids = num_ids
        self.section = section

    @classmethod
    def of(
        cls, cumulative: np.ndarray, widths: np.ndarray, has_nan: np.ndarray, ranks: np.ndarray, token_ids: np.ndarray,
        logprobs: np.ndarray,
    ) -> LogprobColumns:  # fmt: skip
        """From columns of their own."""
        n, num_ids = widths.size, ranks.size
        columns = cls(n, num_ids, np.empty(section_size(n, num_ids, token_ids.size), np.int32))
        columns.cumulative[:] = cumulative
        columns.widths[:] = widths
        columns.has_nan[:] = has_nan
        columns.ranks[:] = ranks
        columns.token_ids[:] = token_ids
        columns.logprobs.view(np.int32)[:] = logprobs.view(np.int32)
        return columns

    @classmethod
    def behind(cls, block: np.ndarray, n: int, ids_size: int, num_ids: int, size: int) -> LogprobColumns:
        """The section of `size` values behind the columns of a delivery in `block`; none where it has no size."""
        if size == 0:
            return cls.none(n, num_ids)
        start = section_start(ids_size)
        return cls(n, num_ids, block[start : start + size])

    @classmethod
    def none(cls, n: int, num_ids: int) -> LogprobColumns:
        """Of requests that want none."""
        columns = cls(n, num_ids, np.zeros(section_size(n, num_ids, 0), np.int32))
        columns.cumulative[:] = np.nan
        return columns

    @classmethod
    def joined(cls, parts: Sequence[LogprobColumns]) -> LogprobColumns:
        """One after the other."""
        return cls.of(
            np.concatenate([part.cumulative for part in parts]),
            np.concatenate([part.widths for part in parts]),
            np.concatenate([part.has_nan for part in parts]),
            np.concatenate([part.ranks for part in parts]),
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs.view(np.int32) for part in parts]),
        )

    @property
    def size(self) -> int:
        """int32 values of the section in a record: 0 where no request wants any."""
        return self.section.size if self.widths.any() else 0

    def _column(self, index: int) -> np.ndarray:
        return self.section[index * self.n : (index + 1) * self.n]

    def _values(self) -> np.ndarray:
        return self.section[NUM_SECTION_COLUMNS * self.n + self.num_ids :]

    @property
    def cumulative(self) -> np.ndarray:
        """float64 [n]: sum of the sampled ids' logprobs up to the last id of the delivery; NaN for a request that wants
        none."""
        return self.section[: 2 * self.n].view(np.float64)

    @property
    def widths(self) -> np.ndarray:
        """int32 [n]."""
        return self._column(2)

    @property
    def has_nan(self) -> np.ndarray:
        """int32 [n]: 1 where one of the logprobs came as NaN."""
        return self._column(3)

    @property
    def ranks(self) -> np.ndarray:
        """int32 [N]."""
        start = NUM_SECTION_COLUMNS * self.n
        return self.section[start : start + self.num_ids]

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [V]."""
        values = self._values()
        return values[: values.size // 2]

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [V]."""
        values = self._values()
        return values[values.size // 2 :].view(np.float32)
