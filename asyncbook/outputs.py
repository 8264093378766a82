"""What a step delivered, columnar."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from asyncbook.ipc.columns import OutputColumns
from asyncbook.ipc.layout import FinishReason
from asyncbook.output_logprobs import OutputLogprobs, TokenLogprobs


class RequestDelta(NamedTuple):
    """One request's share of a `StepOutputs`. `logprobs`: for each id, those that the request asked for; None without.
    `cumulative_logprob`: of all ids so far, these included; None without."""

    request_id: str
    token_ids: np.ndarray
    finish_reason: FinishReason
    stop_reason: int | None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """New tokens and ends of n requests, as of `step`.

    Request i is `request_ids[i]`; its ids are `token_ids[offsets[i] : offsets[i + 1]]`. `offsets` int32 [n + 1],
    `token_ids` int32 [offsets[n]], `finish_reasons` uint8 [n] of `FinishReason`, `stop_reasons` int32 [n], the id that
    stopped it or -1. `logprobs` and `texts` are None in a book without them.
    """

    step: int
    request_ids: list[str]
    offsets: np.ndarray
    token_ids: np.ndarray
    finish_reasons: np.ndarray
    stop_reasons: np.ndarray
    logprobs: OutputLogprobs | None = None
    texts: Any = None

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[RequestDelta]:
        """Row by row, for readers that want objects; the columns are quicker."""
        ends = self.offsets.tolist()
        for i, request_id in enumerate(self.request_ids):
            stop_reason = int(self.stop_reasons[i])
            logprobs = self.logprobs
            yield RequestDelta(
                request_id,
                self.token_ids[ends[i] : ends[i + 1]],
                FinishReason(int(self.finish_reasons[i])),
                None if stop_reason == -1 else stop_reason,
                None if logprobs is None else logprobs.of(i),
                None if logprobs is None else logprobs.cumulative_of(i),
            )


class RequestNames:
    """Which request a delivery speaks of. A number is in use from admission until the request's end is delivered."""

    def __init__(self) -> None:
        self._names = np.empty(64, object)
        self._free_nos = list(range(63, -1, -1))

    @property
    def next_no(self) -> int:
        """The number that `add` will give."""
        if not self._free_nos:
            size = self._names.size
            self._names = np.concatenate([self._names, np.empty(size, object)])
            self._free_nos = list(range(2 * size - 1, size - 1, -1))
        return self._free_nos[-1]

    def add(self, request_id: str) -> None:
        self._names[self._free_nos.pop()] = request_id

    def step_outputs(self, step: int, columns: OutputColumns) -> StepOutputs:
        """A delivery with the requests' ids in the place of their numbers."""
        request_nos = columns.request_nos
        request_ids = self._names[request_nos].tolist()
        finish_reasons = columns.finish_reasons.astype(np.uint8)
        if finish_reasons.any():
            for request_no in request_nos[finish_reasons != 0].tolist():
                self._names[request_no] = None
                self._free_nos.append(request_no)
        return StepOutputs(
            step,
            request_ids,
            columns.offsets,
            columns.token_ids,
            finish_reasons,
            columns.stop_reasons,
            None if columns.logprobs is None else OutputLogprobs.of_columns(columns.offsets, columns.logprobs),
        )
