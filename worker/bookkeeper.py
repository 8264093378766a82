"""The bookkeeper: a ledger whose decisions are published, and whose outputs go to a reader. The same object works in
the runner's process (embedded) and in the sidecar; only where messages come from and where outputs go differs."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncbook.ipc import wire
from asyncbook.ipc.columns import OutputColumns
from asyncbook.ipc.histogram import bucket_of
from asyncbook.ipc.layout import Counter, Histogram, Layout, Stamp, Word
from asyncbook.ipc.publish import OwnWord
from asyncbook.worker.ledger import Ledger, Outcome, Tables

# Takes what a step delivers, or says no: then it is kept, and comes again in a bigger piece.
Deliver = Callable[[int, OutputColumns], bool]

_STAMP_FIELDS = slice(0, len(Stamp))


class Bookkeeper:
    """The only writer of a segment."""

    def __init__(self, layout: Layout, memory: memoryview, vocab_size: int, deliver: Deliver) -> None:
        self.ledger = Ledger(Tables(layout, memory), vocab_size)
        self._published_step = OwnWord(layout.words.view(memory), Word.PUBLISHED_STEP)
        self._stamps = layout.stamps.view(memory)
        self._counters = layout.counters.view(memory)
        self._apply_histogram = layout.histograms.view(memory)[Histogram.APPLY]
        self._deliver = deliver

    def apply(self, message: wire.AnyCommand) -> Outcome:
        """Applies one message; a step is published. Raises `BadMessage`, with nothing changed."""
        start_ns = time.monotonic_ns()
        outcome = self.ledger.apply(message)
        if outcome is Outcome.STEP:
            step = self.ledger.step
            end_ns = time.monotonic_ns()
            self._stamps[step % len(self._stamps), _STAMP_FIELDS] = (step, message.seq, start_ns, end_ns)
            self._apply_histogram[bucket_of(end_ns - start_ns)] += 1
            # Frame, table, stamp and counters are written; with this store, and not before, a reader looks at them.
            self._published_step.store_release(step)
        return outcome

    def flush(self) -> bool:
        """Hands what is to be delivered to the reader. False where the reader takes no more for now."""
        outbox = self.ledger.outbox
        if outbox.is_empty:
            return True
        if not self._deliver(self.ledger.step, outbox.columns()):
            self._counters[Counter.OUTPUTS_DROPPED_REQUESTS] = outbox.num_dropped_requests
            return False
        outbox.mark_delivered()
        return True
