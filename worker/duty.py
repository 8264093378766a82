"""The duty cycle of the sidecar: take a command, apply it, wake who sleeps for it, flush; sleep when there is none."""

from __future__ import annotations

import logging

from asyncbook.ipc import wire
from asyncbook.ipc.channel import SidecarChannel
from asyncbook.ipc.columns import OutputColumns
from asyncbook.ipc.errors import BadMessage
from asyncbook.ipc.layout import Counter, Layout, RunnerWord, Word
from asyncbook.ipc.publish import OwnWord, fence
from asyncbook.ipc.publish import Word as SharedWord
from asyncbook.worker.bookkeeper import Bookkeeper
from asyncbook.worker.idle import IdlePolicy
from asyncbook.worker.ledger import Outcome

logger = logging.getLogger(__name__)


class DutyCycle:
    """One thread, one loop. Ends with the `Stop` message, or when the runner is gone."""

    def __init__(
        self, layout: Layout, memory: memoryview, vocab_size: int, channel: SidecarChannel, idle: IdlePolicy
    ) -> None:
        self._channel = channel
        self._idle = idle
        self._bookkeeper = Bookkeeper(layout, memory, vocab_size, self)
        self._counters = layout.counters.view(memory)
        words = layout.words.view(memory)
        self._applied_seq = OwnWord(words, Word.APPLIED_SEQ)
        self._flushed_step = OwnWord(words, Word.FLUSHED_STEP)
        self._outputs_sent = OwnWord(words, Word.OUTPUTS_SENT)
        self._wake_at_step = SharedWord(layout.runner_words.view(memory), RunnerWord.WAKE_AT_STEP)
        self._woken_at_step = 0
        self._outputs_seq = 0
        self._unsent: wire.Outputs | None = None
        self._logged_kinds: set[str] = set()

    def run(self) -> None:
        """Until `Stop` or the runner's end. Raises `BadMessage` where the stream from the runner has a gap."""
        while True:
            data = self._channel.receive_command()
            if data is not None:
                self._idle.worked()
                if self._apply(data) is Outcome.STOP:
                    return
            elif self._idle.should_sleep():
                if self._unsent is not None and self.has_room():
                    self._flush()
                if self._channel.wait_command(or_room_for_outputs=self._unsent is not None):
                    return  # the runner's end of the lifetime pipe is closed

    def _apply(self, data: bytes) -> Outcome | None:
        try:
            message = wire.decode_command(data)
        except BadMessage as error:
            self._count_bad(str(error))
            return None
        outcome = self._bookkeeper.apply(message)
        if isinstance(message, wire.Step):
            self._wake_runner(message.step)
        self._applied_seq.store_release(message.seq)
        self._flush()
        return outcome

    def _flush(self) -> None:
        self._bookkeeper.flush()
        self._outputs_sent.store_release(self._outputs_seq - (self._unsent is not None))
        self._flushed_step.store_release(self._bookkeeper.ledger.step)

    def _count_bad(self, reason: str) -> None:
        self._counters[Counter.BAD_MESSAGES] += 1
        kind = reason.split(":")[0]
        if kind not in self._logged_kinds and len(self._logged_kinds) < 100:
            self._logged_kinds.add(kind)
            logger.warning("skipped a bad message (further ones of this kind are only counted): %s", reason)

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

    # The reader of the outputs: the runner's socket, and one message that it did not take yet.

    def has_room(self) -> bool:
        """Whether the message before has gone out, at the latest now."""
        if self._unsent is not None and self._channel.send_outputs(self._unsent):
            self._unsent = None
        return self._unsent is None

    def deliver(self, step: int, columns: OutputColumns) -> None:
        """Sends outputs, or keeps them as the one message to send next."""
        self._outputs_seq += 1
        outputs = wire.Outputs(
            self._outputs_seq,
            step,
            wire.as_bytes(columns.request_nos),
            wire.as_bytes(columns.offsets),
            wire.as_bytes(columns.token_ids),
            wire.as_bytes(columns.finish_reasons),
            wire.as_bytes(columns.stop_reasons),
        )
        if not self._channel.send_outputs(outputs):
            self._unsent = outputs
