"""The part of a book that holds on to its sidecar: what that one's end means, waiting for it, and ending it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref

from asyncbook.backlog import Backlog
from asyncbook.book import Book
from asyncbook.config import BookConfig
from asyncbook.ipc import jit, wire
from asyncbook.ipc.channel import RunnerChannel
from asyncbook.ipc.errors import BadMessage, HandshakeFailed, PeerError, SidecarDied, SidecarTimeout
from asyncbook.ipc.layout import NO_WAKE, RunnerWord, Word
from asyncbook.ipc.publish import OwnWord, fence
from asyncbook.ipc.publish import Word as SharedWord
from asyncbook.ipc.segment import Segment
from asyncbook.journal import MAX_MESSAGES, Journal
from asyncbook.place import Place
from asyncbook.process import SidecarProcess
from asyncbook.supervisor import Link, Supervisor
from asyncbook.waiting import DescriptorWaiters

SPIN_NS = 20_000  # a wait looks for this long before it sleeps: most steps are applied by then
SEND_TIMEOUT_MS = 100
STOP_TIMEOUT_MS = 1000
ROOM_POLL_MS = 1
RECOVERY_AT_CLOSE_S = 5.0


class LinkedBook(Book):
    """What `SidecarBook` sends goes over this link, or into the journal while there is none."""

    def __init__(
        self, config: BookConfig, segment: Segment, place: Place, channel: RunnerChannel, process: SidecarProcess
    ) -> None:
        super().__init__(config, segment, place)
        runner_words = self._layout.runner_words.view(self._runner_part, self._layout.runner_offset)
        words = self._layout.words.view(segment.readable())
        self._wake_at_step = OwnWord(runner_words, RunnerWord.WAKE_AT_STEP)
        self._wake_at_step.store_release(NO_WAKE)
        self._num_restarts_word = OwnWord(runner_words, RunnerWord.NUM_RESTARTS)
        self._sidecar_pid_word = OwnWord(runner_words, RunnerWord.SIDECAR_PID)
        self._sidecar_pid_word.store_release(process.pid or 0)
        self._applied_seq = SharedWord(words, Word.APPLIED_SEQ)
        self._backlog = Backlog(self._layout, self._applied_seq)
        self._journal = Journal(SharedWord(words, Word.CHECKPOINT_SEQ).load_acquire)
        self._channel, self._process = channel, process
        self._awaited_steps: list[int] = []
        self._waiters = DescriptorWaiters()
        self._fault = ""
        self._refused_bytes: int | None = None  # of the message that did not fit last, until one would
        self._close_lock = threading.RLock()
        jit.compile_all()
        process.shake_hands(config.start_timeout_s)
        self._supervisor = Supervisor(config, segment.descriptor, place, Link(channel, process))
        # Runs at `close`, when the book is collected, or when the interpreter ends, whichever comes first.
        self._finalizer = weakref.finalize(self, self._supervisor.end)

    # The sidecar's end, and the next one

    def _check_alive(self) -> None:
        """Raises what ended the book. Where a sidecar has ended and another is on its way, a step further with that."""
        super()._check_alive()
        if self._ended_by is None and not self._supervisor.is_down and not self._process.is_alive():
            self._supervisor.wait_noticed()
        if self._ended_by is None and self._supervisor.is_down:
            self._recover()
        if self._ended_by is not None:
            raise self._ended_by

    def _recover(self) -> None:
        supervisor = self._supervisor
        if not self._process.is_ours():
            return  # a forked child: nothing of this is its own
        if supervisor.take_news():
            # Whoever waits in an event loop waited for what this call has taken.
            self._waiters.wake_all()
        self._let_go_of_retired()
        link = supervisor.replacement
        if supervisor.reason:
            self._drain_events()
            fault = f" ({self._fault})" if self._fault else ""
            steps = f"step {self._known_applied_step} is applied, step {self._submitted_step} was submitted"
            self._ended_by = SidecarDied(f"{supervisor.reason}{fault}; {steps}")
            return
        try:
            if link is not None and link.process.has_become_ready():
                self._adopt(link)
        except HandshakeFailed as error:
            self._ended_by = error
            self._waiters.wake_all()

    def _let_go_of_retired(self) -> None:
        for link in self._supervisor.take_retired():
            # A descriptor's number is used again as soon as it is closed.
            self._waiters.forget(link.channel.events_descriptor, link.process.pidfd)
            link.end(wait=False)

    def _adopt(self, link: Link) -> None:
        """Tells the next sidecar what it cannot know, and everything that its predecessor may not have done."""
        restore = self._journal.restore(self._slots.known_batches)
        for data in [wire.encode(restore), *self._journal.messages()]:
            while not link.channel.send_command(data):
                if not link.channel.wait_command_room(SEND_TIMEOUT_MS) and not link.process.is_alive():
                    return  # the journal has it all for the one after it
        if self._supervisor.adopt(link):
            self._channel, self._process = link
            self._num_restarts_word.store_release(self._supervisor.num_restarts)
            self._sidecar_pid_word.store_release(self._process.pid or 0)
            self._let_go_of_retired()
            self._waiters.wake_all()

    def _wait_for_news(self, timeout_ms: int | None) -> None:
        """Until the sidecar has something to say, or ends, or the next one gets on. Raises what ended the book."""
        num_restarts = self._supervisor.num_restarts
        self._check_alive()
        if num_restarts != self._supervisor.num_restarts:
            return  # the next sidecar is there, and may have done already what is waited for
        if not self._supervisor.is_down:
            self._channel.wait_event(timeout_ms, self._process.pidfd)
            return
        link, changed = self._supervisor.replacement, self._supervisor.changed_descriptor
        (self._channel if link is None else link.channel).wait_event(timeout_ms, changed)

    async def _news(self) -> None:
        """`_wait_for_news` for an event loop. A channel's descriptor tells of new events only once all that came before
        are received."""
        num_restarts = self._supervisor.num_restarts
        self._check_alive()
        if num_restarts != self._supervisor.num_restarts:
            return
        if not self._supervisor.is_down:
            await self._waiters.readable(self._channel.events_descriptor, self._process.pidfd)
            return
        link, changed = self._supervisor.replacement, self._supervisor.changed_descriptor
        await self._waiters.readable(changed, *([] if link is None else [link.channel.events_descriptor]))

    # Waiting

    def _drain_events(self) -> None:
        """Wake-ups only say "look again"; a fault is kept for the error that follows when the process ends."""
        while (data := self._channel.receive_event()) is not None:
            try:
                event = wire.decode_event(data)
            except BadMessage:
                continue
            if isinstance(event, wire.Fault):
                self._fault = event.reason

    def _ask_to_be_woken(self) -> None:
        """Tells the sidecar the next step that somebody waits for. Both sides put a fence between their store and their
        look, so either the sidecar sees this, or the caller's look after it sees the step."""
        self._wake_at_step.store_release(min(self._awaited_steps, default=NO_WAKE))
        fence()

    def wait_applied(self, step: int, timeout_s: float | None = None) -> None:
        self._check_submitted(step)
        if self._known_applied_step >= step or self.applied_step >= step:
            return
        self._check_ours()
        spin_until_ns = time.monotonic_ns() + SPIN_NS
        while time.monotonic_ns() < spin_until_ns:
            if self.applied_step >= step:
                return
            os.sched_yield()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._awaited_steps.append(step)
        self._ask_to_be_woken()
        try:
            while self.applied_step < step:
                self._wait_for_news(self._milliseconds_left(step, deadline))
                self._drain_events()
        finally:
            self._awaited_steps.remove(step)
            self._ask_to_be_woken()

    def _has_message_room(self) -> bool:
        """Whether a message like the one that was refused would fit now."""
        if self._refused_bytes is None:
            return True
        is_down = self._supervisor.is_down
        is_room = len(self._journal) < MAX_MESSAGES if is_down else self._channel.wait_command_room(0)
        if is_room and self._backlog.has_room(self._refused_bytes):
            self._refused_bytes = None
        return self._refused_bytes is None

    def wait_room(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        super().wait_room(timeout_s)
        while not self._has_message_room():  # nobody rings for that: it is looked at, every millisecond
            if deadline is not None and time.monotonic() > deadline:
                raise SidecarTimeout(f"the sidecar has not taken message {self._seq} in time")
            self._wait_for_news(ROOM_POLL_MS)
            self._drain_events()

    async def room(self) -> None:
        await super().room()
        while not self._has_message_room():
            self._check_alive()
            await asyncio.sleep(ROOM_POLL_MS / 1000)

    def _milliseconds_left(self, step: int, deadline: float | None) -> int | None:
        if deadline is None:
            return None
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise SidecarTimeout(
                f"step {step} is not applied in time, the last applied one is step {self.applied_step}"
            )
        return int(left_s * 1000) + 1

    async def applied(self, step: int) -> None:
        self._check_submitted(step)
        if self.applied_step >= step:
            return
        self._check_ours()
        self._awaited_steps.append(step)
        try:
            while True:
                self._ask_to_be_woken()
                # The descriptor tells of new events only once all that came before are received.
                self._drain_events()
                if self.applied_step >= step:
                    return
                await self._news()
        finally:
            self._awaited_steps.remove(step)
            if not self._is_closed:
                self._ask_to_be_woken()

    @property
    def applied_step(self) -> int:
        """The last step that is applied and published, 0 before the first."""
        if self._supervisor.is_down and self._ended_by is None and not self._is_closed:
            self._recover()  # whoever only looks, again and again, gets on as well
        return super().applied_step

    # The process

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    @property
    def sidecar_pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        with self._close_lock:  # a second thread that closes waits for the first
            if self._is_closed:
                return
            is_ours = self._process.is_ours()
            if is_ours:
                self._finish_recovery()
            self._is_closed = True  # from here on no call in another thread sends anything
            if is_ours:
                self._channel.end_waits()
            if is_ours and not self._supervisor.is_down and self._process.is_alive():
                self._stop_sidecar()
            self._place.withdraw()  # only now has everything been delivered: to subscribers this says that it was
            self._waiters.forget_all()
            if is_ours:
                self._channel.close()  # before the descriptors go that a call in another thread may look at
            self._finalizer()
            self._device.close()
            self._segment.close()

    def _finish_recovery(self) -> None:
        """Where the sidecar has ended and left something to do, its successor may do it."""
        deadline = time.monotonic() + RECOVERY_AT_CLOSE_S
        try:
            self._check_alive()
            while self._supervisor.is_down and self._applied_seq.load_acquire() < self._seq:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return
                self._wait_for_news(int(left_s * 1000) + 1)
        except PeerError:
            return

    def _stop_sidecar(self) -> None:
        """Lets it apply what was sent before, and waits for its end while its lifetime pipe is still open."""
        self._supervisor.stand_down()
        stop = wire.encode(wire.Stop(self._seq + 1))
        if self._channel.send_command(stop) or (
            self._channel.wait_command_room(STOP_TIMEOUT_MS) and self._channel.send_command(stop)
        ):
            self._process.wait_ended()
