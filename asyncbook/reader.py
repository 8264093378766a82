"""Reading what is delivered: all of it at once, as it comes, or one request at a time."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Hashable

from asyncbook.ipc.errors import BookClosed, InvalidRequest
from asyncbook.outputs import StepOutputs
from asyncbook.rows import HeldRow, Row, RowRegistry
from asyncbook.streams import PieceIterator, RequestOutput, RequestStream, Streams

MAX_POLL_BYTES = 1 << 24


class OutputsReader(ABC):
    """A source of deliveries, and whoever reads from it."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._is_closed = False

    # Where a source differs from another

    @abstractmethod
    def _take_outputs(self) -> StepOutputs | None:
        """The next delivery, None where there is none."""

    @abstractmethod
    def _await_flushed(self) -> None:
        """Until the outputs of all applied steps can be taken."""

    @abstractmethod
    async def _await_outputs(self) -> None:
        """Until there may be a delivery to take, a stream may have got one, or the source is closed."""

    @abstractmethod
    def _wake_readers(self) -> None:
        """Ends every `_await_outputs`."""

    def _check_alive(self) -> None:
        """Raises what ended the source, if something did."""
        if self._is_closed:
            raise BookClosed("the book is closed")

    # Reading

    def poll_outputs(self) -> list[StepOutputs]:
        """What was delivered since the last call, all outputs of the applied steps among it; where more waits than
        there is room for, the rest comes in the next calls. Does not wait for more. Requests that have a `stream` are
        not among it."""
        self._await_flushed()
        # No longer than it takes to read so much: where steps come as quickly as they are read there is always more.
        while self._streams.unclaimed_bytes < MAX_POLL_BYTES and self._sort_next():
            pass
        outputs = []
        while (step_outputs := self._streams.next_unclaimed()) is not None:
            outputs.append(step_outputs)
        if not outputs and not self._is_closed:
            self._check_alive()
        return outputs

    def _sort_next(self) -> bool:
        """The next delivery to whom it belongs; False where there is none."""
        step_outputs = self._take_outputs()
        if step_outputs is None:
            return False
        if self._streams.sort(step_outputs):
            self._wake_readers()
        return True

    async def outputs(self) -> AsyncIterator[StepOutputs]:
        """What is delivered, as it comes, until the book is closed. Requests that have a `stream` are not among it."""
        while True:
            step_outputs = self._streams.next_unclaimed()
            if step_outputs is not None:
                yield step_outputs
            elif not self._sort_next():
                if self._is_closed:
                    return
                await self._await_outputs()

    async def _pieces(self, stream: RequestStream) -> AsyncGenerator[RequestOutput, None]:
        """Of one stream, until its end or that of the source."""
        while True:
            while self._sort_next():
                pass
            piece = stream.take()
            if piece is not None:
                stream.has_ended = piece.is_finished
                yield piece
                if piece.is_finished:
                    return
            elif self._is_closed:
                return
            else:
                await self._await_outputs()


class BookOutputs(OutputsReader):
    """The part of a book that its outputs are read from."""

    _rows: RowRegistry

    def __init__(self) -> None:
        super().__init__(Streams(request_nos_of))

    @abstractmethod
    def abort(self, row: Row) -> None:
        """See `Book.abort`."""

    def stream(self, request_id: str, *, abort_on_cancel: bool = False) -> PieceIterator:
        """The outputs of one live request, from those not read yet on, until its end. A slow reader gets bigger pieces.

        With `abort_on_cancel`, a reader that goes before the end takes the request along. Raises `InvalidRequest` for a
        request that is not live, or has a stream.
        """
        admission = self._rows.held(self._rows.live_row(request_id))
        try:
            stream = self._streams.open(admission.request_no)
        except KeyError:
            raise InvalidRequest(f"request {request_id!r} has a stream already, expected one at most") from None

        def give_up() -> None:
            self._streams.close(admission.request_no, stream)
            if abort_on_cancel and not stream.has_ended and not self._is_closed:
                self._abort_admitted(admission)

        return PieceIterator(self._pieces(stream), give_up)

    def _abort_admitted(self, admission: HeldRow) -> None:
        """Aborts the request, unless it is gone and perhaps another one has its id. Its row may have been renamed."""
        with contextlib.suppress(InvalidRequest):
            row = self._rows.live_row(admission.request_id)
            if self._rows.held(row) is admission:
                self.abort(row)


def request_nos_of(step_outputs: StepOutputs) -> list[Hashable]:
    """What tells requests of one id apart, in the book that they are of."""
    return list(step_outputs.request_nos.tolist())


def request_ids_of(step_outputs: StepOutputs) -> list[Hashable]:
    """What tells requests apart elsewhere."""
    return list(step_outputs.request_ids)
