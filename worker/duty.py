"""The duty cycle of the sidecar: take what is next, apply it, wake who sleeps for it, flush; else wait.

What is next is decided by sequence number alone: messages come on the commands socket, steps there or in the sample
ring, and both carry the place that the runner gave them.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING

from asyncbook.ipc import wire
from asyncbook.ipc.channel import SidecarChannel
from asyncbook.ipc.errors import BadMessage
from asyncbook.ipc.layout import Counter, Field, Histogram, Layout, RunnerWord, Word
from asyncbook.ipc.outputs_log import OutputsLogWriter
from asyncbook.ipc.publish import OwnWord, fence
from asyncbook.ipc.publish import Word as SharedWord
from asyncbook.ipc.ring import SampleRingReader
from asyncbook.worker.arrival import Arrivals
from asyncbook.worker.bookkeeper import Bookkeeper
from asyncbook.worker.delivery import LogDelivery
from asyncbook.worker.idle import Idle, IdlePolicy
from asyncbook.worker.ledger import Outcome
from asyncbook.worker.life import State
from asyncbook.worker.subscribers import Subscribers
from asyncbook.worker.warm import Warmth

if TYPE_CHECKING:
    from asyncbook.worker.text import TextRows

logger = logging.getLogger(__name__)

NAP_MS = 1
MAX_LOGGED_KINDS = 100
_NUMBERS = re.compile(r"-?[0-9]+")


class DutyCycle:
    """One thread, one loop. Ends with the `Stop` message, or when the runner is gone."""

    def __init__(
        self,
        layout: Layout,
        memory: memoryview,
        vocab_size: int,
        channel: SidecarChannel,
        idle_policy: IdlePolicy,
        *,
        is_restart: bool = False,
        text_rows: TextRows | None = None,
        runner_reads_outputs: bool = True,
        subscribers_token: bytes = b"",
    ) -> None:
        self._channel = channel
        self._idle_policy = idle_policy
        self._log = OutputsLogWriter(layout, memory)
        if not runner_reads_outputs:
            self._log.forget_reader()
        self._bookkeeper = Bookkeeper(layout, memory, vocab_size, LogDelivery(self._log), self._log, text_rows)
        self._ledger = self._bookkeeper.ledger
        self._subscribers = Subscribers(
            layout.subscribers.view(memory), self._ledger.work[Field.REQUEST_NO], channel, self._log, subscribers_token,
            is_restart=is_restart,
        )  # fmt: skip
        self._warmth = Warmth(self._ledger)
        self._ring = SampleRingReader(layout, memory)
        self._arrivals = Arrivals(layout.histograms.view(memory)[Histogram.WAIT_FOR_TOKENS])
        self._counters = layout.counters.view(memory)
        words = layout.words.view(memory)
        self._applied_seq = OwnWord(words, Word.APPLIED_SEQ)
        self._flushed_step = OwnWord(words, Word.FLUSHED_STEP)
        self._waits_for_room = OwnWord(words, Word.WAITS_FOR_ROOM)
        self._is_sleeping = OwnWord(words, Word.IS_SLEEPING)
        self._is_sleeping.store_release(0)  # a predecessor may have ended in its sleep
        runner_words = layout.runner_words.view(memory)
        self._wake_at_step = SharedWord(runner_words, RunnerWord.WAKE_AT_STEP)
        self._wake_at_outputs = SharedWord(runner_words, RunnerWord.WAKE_AT_OUTPUTS)
        self._waits_for_restore = is_restart
        self._early: wire.AnyCommand | None = None  # came on the socket before a step that is in the ring
        self._woken_at_step = 0
        self._woken_at_outputs = 0
        self._has_all_delivered = False  # a predecessor may have left something
        self._announced_number = 0
        self._logged_kinds: set[str] = set()

    def run(self) -> bool:
        """Until `Stop`, or the runner's end: then False. Raises `BadMessage` where the stream from the runner has a
        gap."""
        while True:
            if self._ring_is_next():
                has_worked = self._apply_from_ring()
            else:
                message = self._next_message()
                has_worked = message is not None
                if message is not None and self._apply(message) is Outcome.STOP:
                    self._subscribers.wake_all()
                    return True
            if has_worked:
                self._idle_policy.worked()
            elif not self._wait():
                return False

    # What is next

    def _ring_is_next(self) -> bool:
        """Whether the step that is next in order was submitted through the ring."""
        step = self._ledger.step + 1
        if self._waits_for_restore:
            return False
        return self._ring.is_submitted(step) and self._ring.message_seq(step) == self._ledger.applied_seq + 1

    def _next_message(self) -> wire.AnyCommand | None:
        """The message that is next in order, if it is here."""
        message = self._early or self._receive()
        if message is None or message.seq <= self._ledger.applied_seq + 1:
            self._early = None
            return message
        # It came from behind a step that is in the ring. Without one there, something is missing.
        self._early = message
        if not self._ring.is_submitted(self._ledger.step + 1):
            raise BadMessage(f"message {message.seq} came after message {self._ledger.applied_seq}: one is missing")
        return None

    def _receive(self) -> wire.AnyCommand | None:
        data = self._channel.receive_command()
        if not data:  # nothing, or a doorbell, which says no more than that there is something in the ring
            return None
        try:
            return wire.decode_command(data)
        except BadMessage as error:
            self._count_bad(str(error))
            return None

    def _count_bad(self, reason: str) -> None:
        self._counters[Counter.BAD_MESSAGES] += 1
        kind = _NUMBERS.sub("#", reason.split(":")[0])
        if kind not in self._logged_kinds and len(self._logged_kinds) < MAX_LOGGED_KINDS:
            self._logged_kinds.add(kind)
            logger.warning("skipped a bad message (further ones of this kind are only counted): %s", reason)

    # Waiting

    def _wait(self) -> bool:
        """Before the next look. False when the runner is gone."""
        what = self._idle_policy.idle()
        if self._arrivals.is_waiting:
            return self._wait_for_ids(what)
        if what is not Idle.SPIN and self._ring.is_submitted(self._ledger.step + 1):
            what = Idle.SPIN  # came since the look
        if what is Idle.SPIN:
            self._warmth.keep()
            os.sched_yield()
            return True
        self._log.overflow.give_back()
        if what is Idle.NAP:
            return self._wait_for_command(NAP_MS)
        # Said, then looked once more: see `fill_slot` in ipc/staging.py for the other half.
        self._is_sleeping.store_release(1)
        fence()
        runner_lives = True
        if not self._ring.is_submitted(self._ledger.step + 1):
            runner_lives = self._wait_for_command(None)
        self._is_sleeping.store_release(0)
        return runner_lives

    def _wait_for_ids(self, what: Idle) -> bool:
        """They come from a device, which rings no bell. What comes on the socket meanwhile is behind them in order."""
        if what is Idle.SPIN:
            self._warmth.keep()
            os.sched_yield()
            return True
        return self._channel.nap(self._arrivals.nap_s())

    def _wait_for_command(self, timeout_ms: int | None) -> bool:
        if not self._has_all_delivered:
            self._flush()
        runner_lives = self._channel.wait_command(timeout_ms)
        self._subscribers.serve_now()
        return runner_lives

    # Applying

    def _apply_from_ring(self) -> bool:
        """False where the step's ids have not arrived yet."""
        step = self._ledger.step + 1
        if not self._ring.has_arrived(step):
            self._arrivals.missing()
            return False
        self._arrivals.arrived()
        seq, batch_slot, sampled, width, drafts, draft_width, entries, logprobs_width = self._ring.read(step)
        self._bookkeeper.apply_step(
            seq, step, batch_slot, sampled, width, drafts, draft_width, entries, logprobs_width
        )  # fmt: skip
        self._after_step()
        return True

    def _apply(self, message: wire.AnyCommand) -> Outcome:
        is_restore = type(message) is wire.Restore
        try:
            if is_restore is not self._waits_for_restore:
                raise BadMessage("what was before a restart comes first after one, and at no other time")
            if type(message) is wire.Admit and message.seq == self._ledger.applied_seq + 1:
                self._subscribers.announce(message)
            outcome = self._bookkeeper.apply(message)
        except BadMessage as error:
            # A sidecar that cannot take over says so and ends: the runner waits for it.
            if self._waits_for_restore or message.seq > self._ledger.applied_seq + 1:
                raise
            # Refused with nothing changed. Were it the runner's own, its next message would show the gap.
            self._count_bad(str(error))
            return Outcome.REPLAYED
        self._waits_for_restore = False
        if isinstance(message, wire.Step):
            self._after_step()
        else:
            self._note_requests(message, outcome)
            self._applied_seq.store_release(self._ledger.applied_seq)
            self._flush()
        return outcome

    def _note_requests(self, message: wire.AnyCommand, outcome: Outcome) -> None:
        """Whoever subscribes later must know the requests in the rows."""
        directory = self._subscribers.directory
        if outcome is not Outcome.APPLIED:
            return
        if type(message) is wire.Admit:
            directory.admit(message)
        elif type(message) is wire.Release and self._ledger.work[Field.STATE, message.row] == State.FREE:
            directory.release(message.row)
        elif type(message) is wire.Restore:
            self._subscribers.restore(message.rows)

    def _after_step(self) -> None:
        fence()
        self._wake_for_step(self._ledger.step)
        self._applied_seq.store_release(self._ledger.applied_seq)
        self._flush()

    def _flush(self) -> None:
        had_all_delivered = self._has_all_delivered
        self._has_all_delivered = self._bookkeeper.flush()
        if not self._has_all_delivered:
            # Said, then looked once more; the reader stores how far it has read, then looks for who waits. With a fence
            # between the two on both sides, at least one of them sees the other.
            self._waits_for_room.store_release(1)
            fence()
            self._has_all_delivered = self._bookkeeper.flush()
        if self._has_all_delivered and not had_all_delivered:
            self._waits_for_room.store_release(0)
        self._flushed_step.store_release(self._ledger.step)
        if self._log.number != self._announced_number:
            self._announced_number = self._log.number
            fence()
            self._wake_for_outputs(self._announced_number)
        self._subscribers.serve()

    # Waking the runner: one wake-up for one request to be woken, which the runner makes anew when it sleeps again. A
    # step or delivery is published, then the request is looked at; the runner stores its request, then looks for the
    # step or delivery. With a fence between the two on both sides, at least one of them sees the other: no wake-up is
    # lost.

    def _wake_for_step(self, step: int) -> None:
        wake_at_step = self._wake_at_step.load_acquire()
        if self._woken_at_step < wake_at_step <= step:
            self._woken_at_step = wake_at_step
            self._channel.send_event(wire.Wake(step))

    def _wake_for_outputs(self, number: int) -> None:
        wake_at_outputs = self._wake_at_outputs.load_acquire()
        if self._woken_at_outputs < wake_at_outputs <= number:
            self._woken_at_outputs = wake_at_outputs
            self._channel.send_event(wire.Wake(self._ledger.step))
