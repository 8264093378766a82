"""Outputs as columns in one block, between whoever gathers them and whoever reads them: one array to make, one to send.

int32   request_nos [n]   finish_reasons [n]   stop_reasons [n]   offsets [n + 1]   token_ids [offsets[n]]

A stop reason is the id that ended the request, or -1; a stop string is told by its place j in the request's list, as
`FIRST_STOP_STRING - j`. Logprobs follow in a section of their own (`ipc/logprobs.py`). In a book with a tokenizer the
text follows in a block of its own:

int32   offsets [n + 1]   UTF-8 [offsets[n]], as many int32 as it takes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncbook.ipc.logprobs import LogprobColumns, section_start

NUM_COLUMNS = 3  # of n values each, in front of the offsets
FIRST_STOP_STRING = -2


def block_size(n: int, num_token_ids: int) -> int:
    """Values in a block of n requests."""
    return (NUM_COLUMNS + 1) * n + 1 + num_token_ids


class Texts(NamedTuple):
    """Text of n rows: row i's is the UTF-8 `data[offsets[i] : offsets[i + 1]]`. uint8, and an integer array [n + 1]."""

    data: np.ndarray
    offsets: np.ndarray

    def text(self, i: int) -> str:
        """Row i's."""
        return self.data[self.offsets[i] : self.offsets[i + 1]].tobytes().decode()

    def texts(self) -> list[str]:
        """All rows'."""
        data, ends = self.data.tobytes(), self.offsets.tolist()
        return [data[ends[i] : ends[i + 1]].decode() for i in range(len(ends) - 1)]

    @property
    def block_size(self) -> int:
        """int32 values that `write` needs."""
        return text_block_size(self.offsets.size - 1, int(self.offsets[-1]))

    def write(self, block: np.ndarray) -> None:
        """Into int32 [block_size]."""
        n, num_bytes = self.offsets.size - 1, int(self.offsets[-1])
        block[: n + 1] = self.offsets
        block[n + 1 :].view(np.uint8)[:num_bytes] = self.data

    @classmethod
    def read(cls, n: int, block: np.ndarray) -> Texts:
        """What `write` wrote for n rows, without a copy."""
        offsets = block[: n + 1]
        return cls(block[n + 1 :].view(np.uint8)[: offsets[n]], offsets)

    @classmethod
    def joined(cls, parts: Sequence[Texts]) -> Texts:
        """One after the other."""
        sizes = np.concatenate([np.diff(part.offsets) for part in parts])
        return cls(np.concatenate([part.data for part in parts]), np.concatenate([[0], np.cumsum(sizes)]))


def text_block_size(n: int, num_bytes: int) -> int:
    """Values in a block with the text of n rows."""
    return n + 1 + -(-num_bytes // 4)


class OutputColumns:
    """n requests with something new. All columns are int32 views of `block`; `texts` are None without a tokenizer,
    `logprobs` in a book without."""

    __slots__ = ("block", "logprobs", "n", "texts")

    def __init__(
        self, n: int, block: np.ndarray, texts: Texts | None = None, logprobs: LogprobColumns | None = None
    ) -> None:
        self.n = n
        self.block = block
        self.texts = texts
        self.logprobs = logprobs

    @classmethod
    def of(
        cls,
        request_nos: np.ndarray,
        finish_reasons: np.ndarray,
        stop_reasons: np.ndarray,
        num_new: np.ndarray,
        token_ids: np.ndarray,
        texts: Texts | None = None,
        logprobs: LogprobColumns | None = None,
    ) -> OutputColumns:
        """From columns of their own; `num_new` [n] says how many of the token ids belong to each request."""
        offsets = np.concatenate([[0], np.cumsum(num_new)])
        parts = [request_nos, finish_reasons, stop_reasons, offsets, token_ids]
        return cls(len(request_nos), np.concatenate(parts).astype(np.int32), texts, logprobs)

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
            None if parts[0].texts is None else Texts.joined([part.texts for part in parts if part.texts is not None]),
            LogprobColumns.joined(logprobs) if logprobs else None,
        )

    @property
    def text_size(self) -> int:
        """Values of the text's block, 0 without a tokenizer."""
        return 0 if self.texts is None else self.texts.block_size

    @property
    def logprobs_size(self) -> int:
        """Values of the section of the logprobs, 0 where no request of these wants any."""
        return 0 if self.logprobs is None else self.logprobs.size

    @property
    def text_start(self) -> int:
        """Where the text's block starts: behind the columns, and behind the section, if there is one."""
        size = self.logprobs_size
        return section_start(self.block.size) + size if size else self.block.size

    @property
    def record_size(self) -> int:
        """Values of it all, one behind the other."""
        return self.text_start + self.text_size

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
