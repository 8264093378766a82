"""The bookkeeper: a ledger whose decisions are published, and whose outputs go to a reader. The same object works in
the runner's process (embedded) and in the sidecar; only where messages come from and where outputs go differs."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncbook.ipc import wire
from asyncbook.ipc.layout import Counter, Histogram, Layout, Stamp, Word
from asyncbook.ipc.publish import Words, fence
from asyncbook.ipc.histogram import bucket_of
from asyncbook.worker.ledger import Ledger, Outcome, Tables
from asyncbook.worker.outbox import OutputColumns

# Takes the columns of a step, or says no: then they are kept, and come again in a bigger piece.
Deliver = Callable[[int, OutputColumns], bool]


class Bookkeeper:
    """The only writer of a segment."""

    def __init__(self, layout: Layout, memory: memoryview, vocab_size: int, deliver: Deliver) -> None:
        self.ledger = Ledger(Tables(layout, memory), vocab_size)
        self.words = Words(layout.words.view(memory))
        self._stamps = layout.stamps.view(memory)
        self._counters = layout.counters.view(memory)
        self._apply_histogram = layout.histograms.view(memory)[Histogram.APPLY]
        self._deliver = deliver
        self._num_outputs_sent = 0

    def apply(self, message: wire.AnyCommand) -> Outcome:
        """Applies one message and publishes it. Raises `BadMessage`, with nothing changed."""
        start_ns = time.monotonic_ns()
        outcome = self.ledger.apply(message)
        if outcome is Outcome.STEP:
            self._publish(start_ns)
        self.words.store_release(Word.APPLIED_SEQ, self.ledger.applied_seq)
        return outcome

    def _publish(self, start_ns: int) -> None:
        step = self.ledger.step
        stamp = self._stamps[step % self._stamps.shape[0]]
        end_ns = time.monotonic_ns()
        stamp[Stamp.STEP] = step
        stamp[Stamp.APPLIED_SEQ] = self.ledger.applied_seq
        stamp[Stamp.APPLY_START_NS] = start_ns
        stamp[Stamp.APPLY_END_NS] = end_ns
        self._apply_histogram[bucket_of(end_ns - start_ns)] += 1
        # Frame, table, stamp and counters are written; with this store, and not before, a reader may look at them.
        self.words.store_release(Word.PUBLISHED_STEP, step)
        # Before the caller looks whether somebody sleeps until this step: see RunnerWord.WAKE_AT_STEP.
        fence()

    def flush(self) -> bool:
        """Hands what is to be delivered to the reader. False where the reader takes no more for now."""
        outbox = self.ledger.outbox
        taken = True
        if not outbox.is_empty:
            taken = self._deliver(self.ledger.step, outbox.columns())
            if taken:
                outbox.mark_delivered()
                self._num_outputs_sent += 1
            self._counters[Counter.OUTPUTS_DROPPED_REQUESTS] = outbox.num_dropped_requests
        self.words.store_release(Word.OUTPUTS_SENT, self._num_outputs_sent)
        self.words.store_release(Word.FLUSHED_STEP, self.ledger.step)
        return taken
