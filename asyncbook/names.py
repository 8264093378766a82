"""Which request a number stands for."""

from __future__ import annotations

import numpy as np

from asyncbook.ipc.columns import FIRST_STOP_STRING, OutputColumns
from asyncbook.ipc.layout import FinishReason
from asyncbook.output_logprobs import OutputLogprobs
from asyncbook.outputs import StepOutputs, TextColumn


class Names:
    """Requests by number: their ids, and their stop strings."""

    def __init__(self, *, has_texts: bool) -> None:
        self._has_texts = has_texts
        self._stop: dict[int, list[str]] = {}  # of the requests that have stop strings
        self._names = np.empty(64, object)

    def put(self, request_no: int, request_id: str, stop: list[str]) -> None:
        """The number stands for this request from now on."""
        if request_no >= self._names.size:
            more = max(self._names.size, request_no + 1 - self._names.size)
            self._names = np.concatenate([self._names, np.empty(more, object)])
        self._names[request_no] = request_id
        if stop:
            self._stop[request_no] = stop
        else:
            self._stop.pop(request_no, None)

    def forget(self, request_no: int) -> None:
        """Nothing more is to come of the request."""
        self._names[request_no] = None
        self._stop.pop(request_no, None)

    def step_outputs(self, step: int, columns: OutputColumns) -> StepOutputs:
        """A delivery with the requests' ids in the place of their numbers; those that have ended are forgotten."""
        request_nos = columns.request_nos
        request_ids: list[str] = self._names[request_nos].tolist()
        finish_reasons = columns.finish_reasons.astype(np.uint8)
        stop_reasons = self._stop_reasons(columns) if self._has_texts else columns.stop_reasons
        if finish_reasons.any():
            for request_no in request_nos[finish_reasons != 0].tolist():
                self.forget(request_no)
        return StepOutputs(
            step,
            request_ids,
            columns.offsets,
            columns.token_ids,
            finish_reasons,
            stop_reasons,
            None if columns.logprobs is None else OutputLogprobs.of_columns(columns.offsets, columns.logprobs),
            texts=None if columns.texts is None else TextColumn(columns.texts),
            request_nos=request_nos,
        )

    def _stop_reasons(self, columns: OutputColumns) -> np.ndarray:
        """Objects: the id, the stop string, or -1."""
        stop_reasons = columns.stop_reasons.astype(object)
        by_string = (columns.finish_reasons == FinishReason.STOP) & (columns.stop_reasons <= FIRST_STOP_STRING)
        for i in np.flatnonzero(by_string).tolist():
            stop_reasons[i] = self._stop[int(columns.request_nos[i])][FIRST_STOP_STRING - stop_reasons[i]]
        return stop_reasons


class RequestNames(Names):
    """Those of a book's own process, which gives the numbers. One is in use from admission until the request's end is
    delivered."""

    def __init__(self, *, has_texts: bool = False) -> None:
        super().__init__(has_texts=has_texts)
        self._num_nos = 64
        self._free_nos = list(range(self._num_nos - 1, -1, -1))

    @property
    def next_no(self) -> int:
        """The number that `add` will give."""
        if not self._free_nos:
            self._free_nos = list(range(2 * self._num_nos - 1, self._num_nos - 1, -1))
            self._num_nos *= 2
        return self._free_nos[-1]

    def add(self, request_id: str, stop: list[str]) -> int:
        """A request, and its stop strings. Returns its number."""
        request_no = self._free_nos.pop()
        self.put(request_no, request_id, stop)
        return request_no

    def forget(self, request_no: int) -> None:
        super().forget(request_no)
        self._free_nos.append(request_no)

    def release(self, request_no: int, request_id: str) -> None:
        """Nobody reads of the request, whose row is free. A number that was given back is not given back twice."""
        if self._names[request_no] == request_id:
            self.forget(request_no)
