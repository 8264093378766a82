"""The bookkeeper: a ledger whose decisions are published, and whose outputs go to a reader. The same object works in
the runner's process (embedded) and in the sidecar; only where messages come from and where outputs go differs."""

from __future__ import annotations

from time import monotonic_ns
from typing import Protocol

import numpy as np

from asyncbook.ipc import wire
from asyncbook.ipc.columns import OutputColumns
from asyncbook.ipc.histogram import bucket_of
from asyncbook.ipc.layout import Counter, Histogram, Layout, Stamp, Word
from asyncbook.ipc.publish import OwnWord
from asyncbook.worker.ledger import Ledger, Outcome, Tables

_COUNTER_OUTPUTS_DROPPED = int(Counter.OUTPUTS_DROPPED_REQUESTS)
_STEP = Outcome.STEP  # an enum's member is looked up slowly, and this is looked up every step
_STAMP_STEP, _STAMP_SEQ = int(Stamp.STEP), int(Stamp.APPLIED_SEQ)
_STAMP_START_NS, _STAMP_END_NS = int(Stamp.APPLY_START_NS), int(Stamp.APPLY_END_NS)


class Reader(Protocol):
    """Where outputs go."""

    def has_room(self) -> bool:
        """Whether `deliver` may be called. Until then outputs are kept, and come in a bigger piece."""

    def deliver(self, step: int, columns: OutputColumns) -> None:
        """Takes what is new as of `step`."""


class Bookkeeper:
    """The only writer of a segment."""

    def __init__(self, layout: Layout, memory: memoryview, vocab_size: int, reader: Reader) -> None:
        self.ledger = Ledger(Tables(layout, memory), vocab_size)
        self._published_step = OwnWord(layout.words.view(memory), Word.PUBLISHED_STEP)
        self._stamps = list(layout.stamps.view(memory))
        self._counters = layout.counters.view(memory)
        self._apply_histogram = layout.histograms.view(memory)[Histogram.APPLY]
        self._reader = reader

    def apply(self, message: wire.AnyCommand) -> Outcome:
        """Applies one message; a step is published. Raises `BadMessage`, with nothing changed."""
        start_ns = monotonic_ns()
        outcome = self.ledger.apply(message)
        if outcome is _STEP:
            self._publish(start_ns)
        return outcome

    def apply_step(
        self, seq: int, step: int, slot: int, sampled: np.ndarray, width: int, drafts: np.ndarray, draft_width: int
    ) -> None:
        """`apply` for a step whose ids are in memory; see `Ledger.apply_step`."""
        start_ns = monotonic_ns()
        if self.ledger.apply_step(seq, step, slot, sampled, width, drafts, draft_width) is _STEP:
            self._publish(start_ns)

    def _publish(self, start_ns: int) -> None:
        step = self.ledger.step
        end_ns = monotonic_ns()
        stamp = self._stamps[step % len(self._stamps)]
        stamp[_STAMP_STEP] = step
        stamp[_STAMP_SEQ] = self.ledger.applied_seq
        stamp[_STAMP_START_NS] = start_ns
        stamp[_STAMP_END_NS] = end_ns
        self._apply_histogram[bucket_of(end_ns - start_ns)] += 1
        # Frame, table, stamp and counters are written; with this store, and not before, a reader looks at them.
        self._published_step.store_release(step)

    def flush(self) -> bool:
        """Hands what is to be delivered to the reader. False where the reader takes no more for now."""
        outbox = self.ledger.outbox
        if outbox.is_empty:
            return True
        if not self._reader.has_room():
            self._counters[_COUNTER_OUTPUTS_DROPPED] = outbox.num_dropped_requests
            return False
        self._reader.deliver(self.ledger.step, outbox.take())
        return True
