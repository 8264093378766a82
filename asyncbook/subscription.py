"""The outputs of another process's book. What they cost, they cost here: the runner's process does nothing for them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
import weakref
from pathlib import Path

import numpy as np

from asyncbook.closing import Closing
from asyncbook.ipc import address as book_address
from asyncbook.ipc import wire
from asyncbook.ipc.broadcast import BroadcastReader, NamesRecord
from asyncbook.ipc.channel import SubscriberChannel
from asyncbook.ipc.errors import BookClosed, HandshakeFailed, InvalidRequest, OutputsLost, RunnerDied, SidecarTimeout
from asyncbook.ipc.log_ring import Record
from asyncbook.ipc.runtime_dir import start_time
from asyncbook.ipc.segment import Segment
from asyncbook.names import Names
from asyncbook.outputs import StepOutputs
from asyncbook.place import config_at
from asyncbook.reader import OutputsReader, request_ids_of
from asyncbook.streams import PieceIterator, Streams
from asyncbook.waiting import DescriptorWaiters

ASK_AGAIN_MS = 250  # a wake-up may be lost with the sidecar that was asked for it
MIN_WAKE_MS = 1  # from wake-up to wake-up: where steps come quicker they are taken together, and cost less


class Subscription(OutputsReader, Closing):
    """Made by `asyncbook.subscribe`. Used from one thread. Any number of them disturb neither each other nor the book:
    nobody waits for a reader, and nothing is kept for one beyond the last 64 MiB of what was delivered. A reader that
    is further behind gets `OutputsLost`, and may subscribe again.

    `BookClosed` ends the subscription, or `RunnerDied`, after all that was delivered before was read. A sidecar that
    dies and is replaced goes unnoticed.
    """

    def __init__(self, address: str | os.PathLike[str], *, prefix: str = "", timeout_s: float = 10.0) -> None:
        super().__init__(Streams(request_ids_of))
        self._folder = Path(address)
        self._prefix = prefix
        self._address = book_address.read(address)
        if self._address.is_embedded:
            raise HandshakeFailed(
                f"the book at {address} is embedded in process {self._address.pid}: it has no sidecar that could "
                f"deliver its outputs to another process; make it with asyncbook.spawn"
            )
        self.config = config_at(self._address)
        self._names = Names(has_texts=self.config.tokenizer is not None)
        self._segment = book_address.open_segment(self._address)
        try:
            self._channel = SubscriberChannel(self._folder)
        except BaseException:
            self._segment.close()
            raise
        self._runner = os.pidfd_open(self._address.pid)
        # Runs at `close`, when the subscription is collected, or when the interpreter ends, whichever comes first.
        self._finalizer = weakref.finalize(self, _end, self._channel, self._segment, self._runner, os.getpid())
        self._waiters = DescriptorWaiters()
        self._woken_s = self._asked_s = 0.0
        self._asked_position = -1  # what the sidecar was asked to wake this process at, and has not yet
        self._ended_by: BookClosed | RunnerDied | OutputsLost | None = None
        self._next: StepOutputs | None = None  # read, and not polled yet
        try:
            self._log = self._subscribe(time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            self.close()
            raise

    def _subscribe(self, deadline: float, timeout_s: float) -> BroadcastReader:
        message, asked_s = self._request(0), 0.0
        while True:
            if time.monotonic() - asked_s > ASK_AGAIN_MS / 1000 and self._channel.send(message):
                asked_s = time.monotonic()
            reply = self._channel.receive()
            if isinstance(reply, wire.Subscribed):
                self._learn(reply.requests)
                return BroadcastReader(self._segment.layout, self._segment.readable(), reply.position, reply.epoch)
            if isinstance(reply, wire.NotSubscribed):
                raise HandshakeFailed(f"the sidecar of process {self._address.pid} takes no subscriber: {reply.reason}")
            if reply is None:
                self._check_book()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise SidecarTimeout(f"the sidecar of the book at {self._folder} gave no answer in {timeout_s} s")
                wait_ms = min(int(1000 * left_s) + 1, ASK_AGAIN_MS)
                self._channel.wait(wait_ms, to_send=asked_s == 0.0, descriptors=(self._runner,))

    def _request(self, epoch: int) -> wire.Subscribe:
        started = start_time(os.getpid())
        assert started is not None, "this process runs"
        return wire.Subscribe(self._address.token, os.getpid(), started, epoch)

    def _learn(self, requests: list[wire.Named]) -> None:
        for named in requests:
            self._names.put(named.request_no, named.request_id, named.stop)

    @property
    def address(self) -> str:
        """Where the book was found."""
        return str(self._folder)

    @property
    def lag_bytes(self) -> int:
        """What was delivered and not read yet; `OutputsLost` comes at 64 MiB."""
        return self._log.lag_bytes

    # What is delivered

    def _take_outputs(self) -> StepOutputs | None:
        step_outputs = self._next if self._has_next() else None
        self._next = None
        return step_outputs

    def _has_next(self) -> bool:
        """Whether there is something to poll; what is only names, or all for others, is read and done with."""
        if self._next is None:
            self._next = self._read_outputs()
        return self._next is not None

    def _read_outputs(self) -> StepOutputs | None:
        while not self._is_closed and self._ended_by is None:
            try:
                record = self._log.take()
            except OutputsLost as error:
                self._ended_by = error
                raise
            if record is None:
                return None
            if isinstance(record, NamesRecord):
                self._learn(wire.decode_names(record.data))
                continue
            step_outputs = self._share_of(record)
            if len(step_outputs):
                return step_outputs
        if isinstance(self._ended_by, OutputsLost):
            raise self._ended_by
        return None

    def _share_of(self, record: Record) -> StepOutputs:
        step_outputs = self._names.step_outputs(record.step, record.columns)
        request_ids = step_outputs.request_ids
        if not self._prefix and None not in request_ids:
            return step_outputs
        # None: the request is over. A sidecar that died while it dropped something for the runner leaves that twice.
        ours = [request_id is not None and request_id.startswith(self._prefix) for request_id in request_ids]
        return step_outputs if all(ours) else step_outputs.select(np.flatnonzero(ours))

    def stream(self, request_id: str) -> PieceIterator:
        """The outputs of one request, from those not read yet on, until its end; one that has not come yet is waited
        for. What belongs to no stream waits for `poll_outputs` meanwhile, the last 64 MiB of it. Raises
        `InvalidRequest` where it has a stream, or is not of this subscription's share."""
        if not request_id.startswith(self._prefix):
            raise InvalidRequest(f"request {request_id!r} is another's: this subscription is of {self._prefix!r}...")
        try:
            stream = self._streams.open(request_id)
        except KeyError:
            raise InvalidRequest(f"request {request_id!r} has a stream already, expected one at most") from None
        return PieceIterator(self._pieces(stream), lambda: self._streams.close(request_id, stream))

    # Waiting

    def wait_outputs(self, timeout_s: float | None = None) -> bool:
        """Whether there is something to poll, after at most this long. Raises `BookClosed` where there never will be,
        `RunnerDied` where the runner ended without closing the book, `OutputsLost` as `poll_outputs` does."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._is_closed:
            raise BookClosed("the subscription is closed")
        while not self._has_next():
            left_ms = ASK_AGAIN_MS if deadline is None else math.ceil(1000 * (deadline - time.monotonic()))
            if left_ms <= 0:
                return False
            self._receive()
            if self._rest_s() > 0:
                self._channel.wait(MIN_WAKE_MS)
                continue
            self._ask_to_be_woken()
            if not self._has_next():
                self._check_alive()
                self._channel.wait(min(left_ms, ASK_AGAIN_MS), descriptors=(self._runner,))
        return True

    def _rest_s(self) -> float:
        """How long not to ask to be woken again."""
        return self._woken_s + MIN_WAKE_MS / 1000 - time.monotonic()

    async def _await_outputs(self) -> None:
        self._receive()
        rest_s = self._rest_s()
        if rest_s > 0:
            await asyncio.sleep(rest_s)
            return
        self._ask_to_be_woken()
        if self._has_next():
            return
        try:
            self._check_alive()
        except BookClosed:  # everything was read: the end
            self._is_closed = True
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_AGAIN_MS / 1000):
                await self._waiters.readable(self._channel.descriptor, self._runner)

    def _ask_to_be_woken(self) -> None:
        """Says so, then the caller looks once more: what was written before the sidecar reads this, it answers. Asked
        once for each place, however many wait."""
        now_s, position = time.monotonic(), self._log.position
        if position != self._asked_position or now_s - self._asked_s > ASK_AGAIN_MS / 1000:
            self._asked_position, self._asked_s = position, now_s
            self._channel.send(wire.WakeAt(position))

    def _receive(self) -> None:
        while (reply := self._channel.receive()) is not None:
            self._asked_position = -1
            if isinstance(reply, wire.Unknown):  # another sidecar: it knows this process, and not this socket
                self._channel.send(self._request(self._log.epoch))
            elif isinstance(reply, wire.Woken):
                self._woken_s = time.monotonic()

    def _await_flushed(self) -> None:
        pass

    def _wake_readers(self) -> None:
        self._waiters.wake_all()

    def _check_alive(self) -> None:
        super()._check_alive()
        if self._ended_by is None:
            try:
                self._check_book()
            except (BookClosed, RunnerDied) as error:
                if self._has_next():
                    return  # what was delivered before comes first
                self._ended_by = error
        if self._ended_by is not None:
            raise self._ended_by

    def _check_book(self) -> None:
        """Raises where the book has ended."""
        if not self._address.owner_lives:
            raise RunnerDied(f"process {self._address.pid}, whose book this is, has ended")
        if not (self._folder / book_address.FILE_NAME).exists():
            raise BookClosed(f"process {self._address.pid} has closed the book")

    # Ends

    def close(self) -> None:
        """Idempotent. What was read stays readable."""
        self._is_closed = True
        self._waiters.forget_all()
        self._finalizer()


def _end(channel: SubscriberChannel, segment: Segment, runner: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # in a forked child nothing of it is its own
        channel.send(wire.Unsubscribe())
        channel.close()
        segment.close()
        os.close(runner)
