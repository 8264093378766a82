"""Outputs as columns in one block, between whoever gathers them and whoever reads them: one array to make, one to send.

int32   request_nos [n]   finish_reasons [n]   stop_reasons [n]   offsets [n + 1]   token_ids [offsets[n]]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncbook.ipc.logprobs import LogprobColumns

NUM_COLUMNS = 3  # of n values each, in front of the offsets


def block_size(n: int, num_token_ids: int) -> int:
    """Values in a block of n requests."""
    return (NUM_COLUMNS + 1) * n + 1 + num_token_ids


class OutputColumns:
    """n requests with something new. All columns are int32 views of `block`. `logprobs`: None in a book without."""

    __slots__ = ("block", "logprobs", "n")

    def __init__(self, n: int, block: np.ndarray, logprobs: LogprobColumns | None = None) -> None:
        self.n = n
        self.block = block
        self.logprobs = logprobs

    @classmethod
    def of(
        cls,
        request_nos: np.ndarray,
        finish_reasons: np.ndarray,
        stop_reasons: np.ndarray,
        num_new: np.ndarray,
        token_ids: np.ndarray,
        logprobs: LogprobColumns | None = None,
    ) -> OutputColumns:
        """From columns of their own; `num_new` [n] says how many of the token ids belong to each request."""
        offsets = np.concatenate([[0], np.cumsum(num_new)])
        parts = [request_nos, finish_reasons, stop_reasons, offsets, token_ids]
        return cls(len(request_nos), np.concatenate(parts).astype(np.int32), logprobs)

    @classmethod
    def joined(cls, parts: Sequence[OutputColumns]) -> OutputColumns:
        """One after the other, all with logprobs or none."""
        logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        return cls.of(
            np.concatenate([part.request_nos for part in parts]),
            np.concatenate([part.finish_reasons for part in parts]),
            np.concatenate([part.stop_reasons for part in parts]),
            np.concatenate([np.diff(part.offsets) for part in parts]),
            np.concatenate([part.token_ids for part in parts]),
            LogprobColumns.joined(logprobs) if logprobs else None,
        )

    @property
    def request_nos(self) -> np.ndarray:
        return self.block[: self.n]

    @property
    def finish_reasons(self) -> np.ndarray:
        return self.block[self.n : 2 * self.n]

    @property
    def stop_reasons(self) -> np.ndarray:
        return self.block[2 * self.n : 3 * self.n]

    @property
    def offsets(self) -> np.ndarray:
        return self.block[3 * self.n : 4 * self.n + 1]

    @property
    def token_ids(self) -> np.ndarray:
        return self.block[4 * self.n + 1 :]
