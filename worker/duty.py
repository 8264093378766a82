"""The duty cycle of the sidecar: take what is next, apply it, wake who sleeps for it, flush; else wait.

What is next is decided by sequence number alone: messages come on the commands socket, steps there or in the sample
ring, and both carry the place that the runner gave them.
"""

from __future__ import annotations

import logging
import os
import time

from asyncbook.ipc import wire
from asyncbook.ipc.channel import SidecarChannel
from asyncbook.ipc.columns import OutputColumns
from asyncbook.ipc.errors import BadMessage
from asyncbook.ipc.layout import Counter, Histogram, Layout, RunnerWord, Word
from asyncbook.ipc.publish import OwnWord, fence
from asyncbook.ipc.publish import Word as SharedWord
from asyncbook.ipc.ring import SampleRingReader
from asyncbook.worker.arrival import Arrivals
from asyncbook.worker.bookkeeper import Bookkeeper
from asyncbook.worker.idle import Idle, IdlePolicy
from asyncbook.worker.ledger import Outcome
from asyncbook.worker.warm import Warmth

logger = logging.getLogger(__name__)

NAP_MS = 1
MAX_LOGGED_KINDS = 100


class DutyCycle:
    """One thread, one loop. Ends with the `Stop` message, or when the runner is gone."""

    def __init__(
        self, layout: Layout, memory: memoryview, vocab_size: int, channel: SidecarChannel, idle_policy: IdlePolicy
    ) -> None:
        self._channel = channel
        self._idle_policy = idle_policy
        self._bookkeeper = Bookkeeper(layout, memory, vocab_size, self)
        self._ledger = self._bookkeeper.ledger
        self._warmth = Warmth(self._ledger)
        self._ring = SampleRingReader(layout, memory)
        self._arrivals = Arrivals(layout.histograms.view(memory)[Histogram.WAIT_FOR_TOKENS])
        self._counters = layout.counters.view(memory)
        words = layout.words.view(memory)
        self._applied_seq = OwnWord(words, Word.APPLIED_SEQ)
        self._flushed_step = OwnWord(words, Word.FLUSHED_STEP)
        self._outputs_sent = OwnWord(words, Word.OUTPUTS_SENT)
        self._is_sleeping = OwnWord(words, Word.IS_SLEEPING)
        self._wake_at_step = SharedWord(layout.runner_words.view(memory), RunnerWord.WAKE_AT_STEP)
        self._early: wire.AnyCommand | None = None  # came on the socket before a step that is in the ring
        self._woken_at_step = 0
        self._outputs_seq = 0
        self._unsent: wire.Outputs | None = None
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
                    return True
            if has_worked:
                self._idle_policy.worked()
            elif not self._wait():
                return False

    # What is next

    def _ring_is_next(self) -> bool:
        """Whether the step that is next in order was submitted through the ring."""
        step = self._ledger.step + 1
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
        kind = reason.split(":")[0]
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
        else:
            time.sleep(self._arrivals.nap_s())
        return self._wait_for_command(0) if self._arrivals.is_time_to_look_up() else True

    def _wait_for_command(self, timeout_ms: int | None) -> bool:
        if self._unsent is not None and self.has_room():
            self._flush()
        return self._channel.wait_command(timeout_ms, or_room_for_outputs=self._unsent is not None)

    # Applying

    def _apply_from_ring(self) -> bool:
        """False where the step's ids have not arrived yet."""
        step = self._ledger.step + 1
        if not self._ring.has_arrived(step):
            self._arrivals.missing()
            return False
        self._arrivals.arrived()
        seq, batch_slot, sampled, width, drafts, draft_width = self._ring.read(step)
        self._bookkeeper.apply_step(seq, step, batch_slot, sampled, width, drafts, draft_width)
        self._after_step()
        return True

    def _apply(self, message: wire.AnyCommand) -> Outcome:
        try:
            outcome = self._bookkeeper.apply(message)
        except BadMessage as error:
            if message.seq != self._ledger.applied_seq + 1:
                raise
            # Refused with nothing changed. Were it the runner's own, its next message would show the gap.
            self._count_bad(str(error))
            return Outcome.REPLAYED
        if isinstance(message, wire.Step):
            self._after_step()
        else:
            self._applied_seq.store_release(self._ledger.applied_seq)
            self._flush()
        return outcome

    def _after_step(self) -> None:
        self._wake_runner(self._ledger.step)
        self._applied_seq.store_release(self._ledger.applied_seq)
        self._flush()

    def _flush(self) -> None:
        self._bookkeeper.flush()
        self._outputs_sent.store_release(self._outputs_seq - (self._unsent is not None))
        self._flushed_step.store_release(self._ledger.step)

    def _wake_runner(self, step: int) -> None:
        """One wake-up for one request to be woken: the runner stores another step when it sleeps again.

        The step is published, then the request is looked at; the runner stores its request, then looks at the step.
        With a fence between the two on both sides, at least one of them sees the other: no wake-up is lost.
        """
        fence()
        wake_at_step = self._wake_at_step.load_acquire()
        if self._woken_at_step < wake_at_step <= step:
            self._woken_at_step = wake_at_step
            self._channel.send_event(wire.Wake(step))

    # The reader of the outputs: the runner's socket, and one message that it did not take yet

    def has_room(self) -> bool:
        """Whether the message before has gone out, at the latest now."""
        if self._unsent is not None and self._channel.send_outputs(self._unsent):
            self._unsent = None
        return self._unsent is None

    def deliver(self, step: int, columns: OutputColumns) -> None:
        """Sends outputs, or keeps them as the one message to send next."""
        self._outputs_seq += 1
        outputs = wire.Outputs(self._outputs_seq, step, columns.n, wire.as_bytes(columns.block))
        if not self._channel.send_outputs(outputs):
            self._unsent = outputs
