"""What a step delivered, columnar."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from asyncbook.ipc.layout import FinishReason


class RequestDelta(NamedTuple):
    """One request's share of a `StepOutputs`."""

    request_id: str
    token_ids: np.ndarray
    finish_reason: FinishReason
    stop_reason: int | None


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
    logprobs: Any = None
    texts: Any = None

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[RequestDelta]:
        """Row by row, for readers that want objects; the columns are quicker."""
        ends = self.offsets.tolist()
        for i, request_id in enumerate(self.request_ids):
            stop_reason = int(self.stop_reasons[i])
            yield RequestDelta(
                request_id,
                self.token_ids[ends[i] : ends[i + 1]],
                FinishReason(int(self.finish_reasons[i])),
                None if stop_reason == -1 else stop_reason,
            )


class RequestNames:
    """Which request a delivery speaks of. Known from admission until its end is delivered."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}
        self._last_request_no = 0

    @property
    def next_no(self) -> int:
        """The number that `add` will give."""
        return self._last_request_no + 1

    def add(self, request_id: str) -> None:
        self._last_request_no += 1
        self._ids[self._last_request_no] = request_id

    def step_outputs(
        self,
        step: int,
        request_nos: np.ndarray,
        offsets: np.ndarray,
        token_ids: np.ndarray,
        finish_reasons: np.ndarray,
        stop_reasons: np.ndarray,
    ) -> StepOutputs:
        """A delivery with the requests' ids in the place of their numbers."""
        numbers = request_nos.tolist()
        request_ids = [self._ids[request_no] for request_no in numbers]
        for i in np.flatnonzero(finish_reasons).tolist():
            del self._ids[numbers[i]]
        return StepOutputs(step, request_ids, offsets, token_ids, finish_reasons, stop_reasons)
