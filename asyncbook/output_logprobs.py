"""Logprobs of a delivery, columnar, and as objects for readers who want them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncbook.ipc.logprobs import MISSING_ID, LogprobColumns

# (token id, logprob, rank) of one output: the sampled id, then the top ids, best first, the sampled one not again.
TokenLogprobs = list[tuple[int, float, int]]


@dataclass(frozen=True, slots=True, eq=False)
class OutputLogprobs:
    """Logprobs of n requests and N ids, as they stand in the `StepOutputs`.

    `num_logprobs` int32 [n]: the request's own k, -1 where it asked for none. `values_offsets` int64 [n + 1]: request i
    has the values `values_offsets[i]` to `values_offsets[i + 1]` of `token_ids` (int32) and `logprobs` (float32, as
    they came: -inf and NaN among them), `1 + k` for each of its ids: first the sampled id, then the top k, best first,
    where the sampled id may come again. `ranks` int32 [N]: each sampled id's place in the vocabulary, from 1.
    `cumulative` float64 [n]: sum of the sampled ids' logprobs since the request's admission to its row, these included;
    NaN where it asked for none. `has_nan` bool [n]: a logprob came as NaN.

    What was asked for and did not come with the step is there as id -1 with logprob NaN, and with rank 0 where the
    sampled id's is missing; `cumulative` is NaN from there on.
    """

    offsets: np.ndarray
    num_logprobs: np.ndarray
    values_offsets: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    cumulative: np.ndarray
    has_nan: np.ndarray

    @classmethod
    def of_columns(cls, offsets: np.ndarray, columns: LogprobColumns) -> OutputLogprobs:
        """From a delivery; `offsets` int32 [n + 1] into its N ids."""
        widths = columns.widths
        values_offsets = np.zeros(offsets.size, np.int64)
        np.cumsum(np.diff(offsets) * widths.astype(np.int64), out=values_offsets[1:])
        return cls(
            offsets,
            widths - 1,
            values_offsets,
            columns.token_ids,
            columns.logprobs,
            columns.ranks,
            columns.cumulative,
            columns.has_nan != 0,
        )

    @property
    def num_bytes(self) -> int:
        """Of the arrays that grow with the ids."""
        return self.ranks.nbytes + self.token_ids.nbytes + self.logprobs.nbytes

    def select(self, indices: np.ndarray) -> OutputLogprobs:
        """Those of some of the requests, in this order."""

        def pieces(array: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            starts, ends = offsets[:-1][indices], offsets[1:][indices]
            taken = [array[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
            new_offsets = np.concatenate([[0], np.cumsum(ends - starts)]).astype(offsets.dtype)
            return np.concatenate([array[:0], *taken]), new_offsets

        ranks, offsets = pieces(self.ranks, self.offsets)
        token_ids, values_offsets = pieces(self.token_ids, self.values_offsets)
        logprobs, _ = pieces(self.logprobs, self.values_offsets)
        return OutputLogprobs(
            offsets,
            self.num_logprobs[indices],
            values_offsets,
            token_ids,
            logprobs,
            ranks,
            self.cumulative[indices],
            self.has_nan[indices],
        )

    def arrays_of(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Request i's `token_ids` and `logprobs` [ids, 1 + k], and `ranks` [ids]."""
        first, last = self.values_offsets[i], self.values_offsets[i + 1]
        num_ids = int(self.offsets[i + 1] - self.offsets[i])
        shape = num_ids, 1 + int(self.num_logprobs[i])
        ranks = self.ranks[self.offsets[i] : self.offsets[i + 1]]
        return self.token_ids[first:last].reshape(shape), self.logprobs[first:last].reshape(shape), ranks

    def of(self, i: int) -> list[TokenLogprobs] | None:
        """Request i's by id, None where it asked for none. A sampled id that is among the top k comes once, in front,
        and what is missing does not come."""
        if self.num_logprobs[i] < 0:
            return None
        token_ids, logprobs, ranks = self.arrays_of(i)
        columns = zip(token_ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
        return [_of_one(ids, values, rank) for ids, values, rank in columns]

    def cumulative_of(self, i: int) -> float | None:
        """Request i's cumulative logprob, None where it asked for none."""
        return None if self.num_logprobs[i] < 0 else float(self.cumulative[i])


def _of_one(token_ids: list[int], logprobs: list[float], rank: int) -> TokenLogprobs:
    sampled = token_ids[0]
    if sampled == MISSING_ID:
        return []
    top = zip(token_ids[1:], logprobs[1:], range(1, len(token_ids)), strict=True)
    others = [one for one in top if one[0] not in (sampled, MISSING_ID)]
    return [(sampled, logprobs[0], rank), *others]
