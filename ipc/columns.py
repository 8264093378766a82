"""Outputs as columns in one block, between whoever gathers them and whoever reads them: one array to make, one to send.

int32   request_nos [n]   finish_reasons [n]   stop_reasons [n]   offsets [n + 1]   token_ids [offsets[n]]
"""

from __future__ import annotations

import numpy as np

from asyncbook.ipc.errors import BadMessage

NUM_COLUMNS = 3  # of n values each, in front of the offsets


def block_size(n: int, num_token_ids: int) -> int:
    """Values in a block of n requests."""
    return (NUM_COLUMNS + 1) * n + 1 + num_token_ids


class OutputColumns:
    """n requests with something new. All columns are int32 views of `block`."""

    __slots__ = ("block", "n")

    def __init__(self, n: int, block: np.ndarray) -> None:
        self.n = n
        self.block = block

    @classmethod
    def from_bytes(cls, n: int, data: memoryview) -> OutputColumns:
        """Raises `BadMessage` where the bytes do not hold n requests."""
        block = np.frombuffer(data, np.int32) if len(data) % 4 == 0 else np.empty(0, np.int32)
        if n < 0 or block.size < block_size(n, 0) or block.size != block_size(n, int(cls(n, block).offsets[n])):
            raise BadMessage(f"outputs of {len(data)} bytes do not hold {n} requests")
        return cls(n, block)

    @classmethod
    def of(
        cls,
        request_nos: np.ndarray,
        finish_reasons: np.ndarray,
        stop_reasons: np.ndarray,
        num_new: np.ndarray,
        token_ids: np.ndarray,
    ) -> OutputColumns:
        """From columns of their own; `num_new` [n] says how many of the token ids belong to each request."""
        offsets = np.concatenate([[0], np.cumsum(num_new)])
        parts = [request_nos, finish_reasons, stop_reasons, offsets, token_ids]
        return cls(len(request_nos), np.concatenate(parts).astype(np.int32))

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
