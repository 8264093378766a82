"""What a step delivered, columnar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import numpy as np

from asyncbook.ipc.columns import Texts
from asyncbook.ipc.layout import FinishReason
from asyncbook.output_logprobs import OutputLogprobs, TokenLogprobs

BYTES_A_REQUEST = 16  # of a delivery, beside its arrays


class RequestDelta(NamedTuple):
    """One request's share of a `StepOutputs`. `logprobs`: for each id, those that the request asked for; None without.
    `cumulative_logprob`: of all ids so far, these included; None without."""

    request_id: str
    token_ids: np.ndarray
    finish_reason: FinishReason
    stop_reason: int | str | None
    text: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


class TextColumn(Sequence[str]):
    """New text of n requests: one UTF-8 buffer and where each request's begins; item i is decoded when it is read."""

    __slots__ = ("data", "offsets")

    def __init__(self, texts: Texts) -> None:
        self.data: np.ndarray = texts.data  # uint8 [offsets[n]]
        self.offsets: np.ndarray = texts.offsets  # integers [n + 1]

    def __len__(self) -> int:
        return self.offsets.size - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"text {index} of {len(self)}")
        index %= len(self)
        return self.data[self.offsets[index] : self.offsets[index + 1]].tobytes().decode()

    def select(self, indices: np.ndarray) -> TextColumn:
        """The text of some of the requests, in this order."""
        starts, ends = self.offsets[:-1][indices], self.offsets[1:][indices]
        pieces = [self.data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        offsets = np.concatenate([[0], np.cumsum(ends - starts)])
        return TextColumn(Texts(np.concatenate([np.empty(0, np.uint8), *pieces]), offsets))

    def __repr__(self) -> str:
        return f"TextColumn({list(self)!r})"


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """New tokens and ends of n requests, as of `step`.

    Request i is `request_ids[i]`; its ids are `token_ids[offsets[i] : offsets[i + 1]]`. `offsets` int32 [n + 1],
    `token_ids` int32 [offsets[n]], `finish_reasons` uint8 [n] of `FinishReason`, `stop_reasons` int32 [n], the id that
    stopped it or -1. `logprobs` and `texts` are None in a book without them. With a tokenizer `texts[i]` is request i's
    new text, and `stop_reasons` holds objects: the id, the stop string, or -1. `request_nos` [n] tell requests of one
    id apart.
    """

    step: int
    request_ids: list[str]
    offsets: np.ndarray
    token_ids: np.ndarray
    finish_reasons: np.ndarray
    stop_reasons: np.ndarray
    logprobs: OutputLogprobs | None = None
    texts: TextColumn | None = None
    request_nos: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32), repr=False)

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def num_bytes(self) -> int:
        """About what it holds in memory."""
        arrays = [self.offsets, self.token_ids, self.finish_reasons, self.stop_reasons, self.request_nos]
        others = [] if self.texts is None else [self.texts.data, self.texts.offsets]
        num_logprob_bytes = 0 if self.logprobs is None else self.logprobs.num_bytes
        return sum(array.nbytes for array in (*arrays, *others)) + num_logprob_bytes + BYTES_A_REQUEST * len(self)

    def select(self, indices: np.ndarray) -> StepOutputs:
        """Some of the requests, in this order."""
        starts, ends = self.offsets[:-1][indices], self.offsets[1:][indices]
        pieces = [self.token_ids[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        return StepOutputs(
            self.step,
            [self.request_ids[i] for i in indices.tolist()],
            np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32),
            np.concatenate([np.empty(0, np.int32), *pieces]),
            self.finish_reasons[indices],
            self.stop_reasons[indices],
            None if self.logprobs is None else self.logprobs.select(indices),
            None if self.texts is None else self.texts.select(indices),
            self.request_nos[indices],
        )

    def __iter__(self) -> Iterator[RequestDelta]:
        """Row by row, for readers that want objects; the columns are quicker."""
        ends = self.offsets.tolist()
        for i, request_id in enumerate(self.request_ids):
            stop_reason, logprobs = self.stop_reasons[i], self.logprobs
            if not isinstance(stop_reason, str):
                stop_reason = None if stop_reason == -1 else int(stop_reason)
            yield RequestDelta(
                request_id,
                self.token_ids[ends[i] : ends[i + 1]],
                FinishReason(int(self.finish_reasons[i])),
                stop_reason,
                None if self.texts is None else self.texts[i],
                None if logprobs is None else logprobs.of(i),
                None if logprobs is None else logprobs.cumulative_of(i),
            )
