"""Outputs of single requests: taken out of what a book delivers, for whoever asked for just that request."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable
from dataclasses import dataclass

import numpy as np

from asyncbook.ipc.errors import OutputsLost
from asyncbook.ipc.layout import FinishReason
from asyncbook.output_logprobs import TokenLogprobs
from asyncbook.outputs import StepOutputs

MAX_UNCLAIMED_BYTES = 1 << 26
_LOST = f"more than {MAX_UNCLAIMED_BYTES} bytes of outputs belonged to no stream and were not read: the oldest are gone"


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
        self.has_ended = False  # the last piece was taken

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


class PieceIterator(AsyncIterator[RequestOutput]):
    """The pieces of one stream. Closed or dropped, it is given up, also one that was never read from."""

    def __init__(self, pieces: AsyncGenerator[RequestOutput, None], give_up: Callable[[], None]) -> None:
        self._pieces = pieces
        self._finalizer = weakref.finalize(self, give_up)
        self._finalizer.atexit = False

    async def __anext__(self) -> RequestOutput:
        try:
            return await anext(self._pieces)
        except BaseException:  # its end, a cancelled reader, or what ended the source
            self._finalizer()
            raise

    async def aclose(self) -> None:
        """Gives it up. Idempotent."""
        await self._pieces.aclose()
        self._finalizer()


class Streams:
    """The open streams of a source, and the deliveries that belong to none of them. `keys_of`: what the requests of a
    delivery are told apart by.

    Who reads streams and nothing else leaves the other requests' deliveries here. At most `MAX_UNCLAIMED_BYTES` are
    kept; beyond that the oldest go, and whoever would have got them is told."""

    def __init__(self, keys_of: Callable[[StepOutputs], list[Hashable]]) -> None:
        self._keys_of = keys_of
        self._streams: dict[Hashable, RequestStream] = {}
        self._unclaimed: deque[StepOutputs] = deque()
        self.unclaimed_bytes = 0
        self._has_lost = False
        self._lost: set[Hashable] = set()  # live requests of which something went

    def open(self, key: Hashable) -> RequestStream:
        """A stream, with what was delivered and not read yet. Raises `KeyError` where the request has one, and
        `OutputsLost` where some of it went."""
        if key in self._streams:
            raise KeyError(key)
        if key in self._lost:
            raise OutputsLost(f"{_LOST} of request {key!r} as well; open its stream before its first output")
        stream = self._streams[key] = RequestStream()
        waiting, self._unclaimed, self.unclaimed_bytes = self._unclaimed, deque(), 0
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
            self.unclaimed_bytes += rest.num_bytes
            while self.unclaimed_bytes > MAX_UNCLAIMED_BYTES:
                self._lose(self._unclaimed.popleft())
        return rest is not step_outputs

    def _lose(self, step_outputs: StepOutputs) -> None:
        self._has_lost = True
        self.unclaimed_bytes -= step_outputs.num_bytes
        keys = self._keys_of(step_outputs)
        self._lost.update(keys)
        self._lost.difference_update(keys[i] for i in np.flatnonzero(step_outputs.finish_reasons).tolist())

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
        """The oldest delivery that belongs to no stream. Raises `OutputsLost`, once, where older ones went."""
        if self._has_lost:
            self._has_lost = False
            raise OutputsLost(f"{_LOST}; the next call gives what is left")
        if not self._unclaimed:
            return None
        step_outputs = self._unclaimed.popleft()
        self.unclaimed_bytes -= step_outputs.num_bytes
        return step_outputs
