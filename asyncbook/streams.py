"""Outputs of single requests: taken out of what a book delivers, for whoever asked for just that request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from asyncbook.ipc.layout import FinishReason
from asyncbook.output_logprobs import TokenLogprobs
from asyncbook.outputs import StepOutputs


@dataclass(frozen=True, slots=True, eq=False)
class RequestOutput:
    """What is new of one request since the last piece. `text` is None in a book without a tokenizer; `stop_reason` is
    the id or the string that stopped it. `logprobs`: for each id, those that the request asked for;
    `cumulative_logprob`: of all ids so far; both None without. `step`: the last step that is in it."""

    request_id: str
    step: int
    token_ids: np.ndarray  # int32
    text: str | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None

    @property
    def is_finished(self) -> bool:
        """Whether this is the last piece."""
        return self.finish_reason is not FinishReason.NONE


class RequestStream:
    """Pieces of one request that nobody took yet."""

    def __init__(self) -> None:
        self._pieces: list[RequestOutput] = []

    def add(self, piece: RequestOutput) -> None:
        """The next piece."""
        self._pieces.append(piece)

    def take(self) -> RequestOutput | None:
        """All that there is as one piece, the bigger the longer nobody came; None where there is nothing."""
        if not self._pieces:
            return None
        pieces, self._pieces = self._pieces, []
        last = pieces[-1]
        if len(pieces) == 1:
            return last
        texts = [piece.text for piece in pieces if piece.text is not None]
        return RequestOutput(
            last.request_id,
            last.step,
            np.concatenate([piece.token_ids for piece in pieces]),
            "".join(texts) if last.text is not None else None,
            last.finish_reason,
            last.stop_reason,
            None if last.logprobs is None else [one for piece in pieces for one in piece.logprobs or []],
            last.cumulative_logprob,
        )


class Streams:
    """The open streams of a source, and the deliveries that belong to none of them. `keys_of`: what the requests of a
    delivery are told apart by."""

    def __init__(self, keys_of: Callable[[StepOutputs], list[Hashable]]) -> None:
        self._keys_of = keys_of
        self._streams: dict[Hashable, RequestStream] = {}
        self._unclaimed: deque[StepOutputs] = deque()

    def open(self, key: Hashable) -> RequestStream:
        """A stream, with what was delivered and not read yet. Raises `KeyError` where the request has one."""
        if key in self._streams:
            raise KeyError(key)
        stream = self._streams[key] = RequestStream()
        waiting, self._unclaimed = self._unclaimed, deque()
        for step_outputs in waiting:
            self.sort(step_outputs)
        return stream

    def close(self, key: Hashable, stream: RequestStream) -> None:
        """What comes later of the request goes to whoever reads everything."""
        if self._streams.get(key) is stream:
            del self._streams[key]

    def sort(self, step_outputs: StepOutputs) -> bool:
        """A delivery: to each stream its share, and the rest to whoever reads everything. Whether a stream got some."""
        rest = self._without_claimed(step_outputs) if self._streams else step_outputs
        if len(rest):
            self._unclaimed.append(rest)
        return rest is not step_outputs

    def _without_claimed(self, step_outputs: StepOutputs) -> StepOutputs:
        keys = self._keys_of(step_outputs)
        claimed = [i for i, key in enumerate(keys) if key in self._streams]
        if not claimed:
            return step_outputs
        others = np.setdiff1d(np.arange(len(step_outputs)), claimed).tolist()
        deltas = list(step_outputs)
        for i in claimed:
            delta = deltas[i]
            piece = RequestOutput(
                delta.request_id,
                step_outputs.step,
                delta.token_ids,
                delta.text,
                delta.finish_reason,
                delta.stop_reason,
                delta.logprobs,
                delta.cumulative_logprob,
            )
            stream = self._streams.get(keys[i])
            if stream is None:  # an id that came a second time within one delivery
                others.append(i)
                continue
            stream.add(piece)
            if piece.is_finished:  # the key will be another request's
                del self._streams[keys[i]]
        return step_outputs.select(np.array(others, np.int64))

    def next_unclaimed(self) -> StepOutputs | None:
        """The oldest delivery that belongs to no stream."""
        return self._unclaimed.popleft() if self._unclaimed else None
