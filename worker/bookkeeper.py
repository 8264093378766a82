"""The bookkeeper: a ledger whose decisions are published, and whose outputs go to a reader. The same object works in
the runner's process (embedded) and in the sidecar; only where messages come from and where outputs go differs."""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

import numpy as np

from asyncbook.ipc import wire
from asyncbook.ipc.histogram import bucket_of
from asyncbook.ipc.layout import Counter, Histogram, Layout, Stamp, SubmissionWord, Word
from asyncbook.ipc.outputs_log import OutputsLogWriter
from asyncbook.ipc.publish import OwnWord
from asyncbook.worker.checkpoint import Checkpoints
from asyncbook.worker.ledger import Ledger, Outcome, Tables
from asyncbook.worker.logprobs import NO_ENTRIES
from asyncbook.worker.outbox import Outbox

if TYPE_CHECKING:
    from asyncbook.worker.text import TextRows

_COUNTER_OUTPUTS_DROPPED = int(Counter.OUTPUTS_DROPPED_REQUESTS)
_STEP = Outcome.STEP  # an enum's member is looked up slowly, and this is looked up every step
_STAMP_STEP, _STAMP_SEQ = int(Stamp.STEP), int(Stamp.APPLIED_SEQ)
_STAMP_START_NS, _STAMP_END_NS = int(Stamp.APPLY_START_NS), int(Stamp.APPLY_END_NS)
_SUBMITTED_STEP, _FIRST_NS = int(SubmissionWord.STEP), int(SubmissionWord.FIRST_NS)


class Reader(Protocol):
    """Where outputs go."""

    def take_from(self, outbox: Outbox, step: int) -> bool:
        """Takes what is new as of `step`, as far as there is room; whether that was all. The rest comes in a bigger
        piece."""


class Bookkeeper:
    """The only writer of a segment. With a log, everything that it knows survives its process: see `checkpoint.py`."""

    def __init__(
        self,
        layout: Layout,
        memory: memoryview,
        vocab_size: int,
        reader: Reader,
        log: OutputsLogWriter | None = None,
        text_rows: TextRows | None = None,
    ) -> None:
        self.ledger = Ledger(Tables(layout, memory), vocab_size, text_rows)
        self._published_step = OwnWord(layout.words.view(memory), Word.PUBLISHED_STEP)
        self._counters = layout.counters.view(memory)
        # Single words: a memoryview gives and takes them for a fraction of what an array asks.
        self._stamps = [stamp.data for stamp in layout.stamps.view(memory)]
        histograms = layout.histograms.view(memory)
        self._apply_histogram, self._queue_histogram, self._lag_histogram = (
            histograms[which].data for which in (Histogram.APPLY, Histogram.QUEUE, Histogram.LAG)
        )
        self._submissions = layout.submissions.view(memory).data
        self._num_ring_slots = layout.num_ring_slots
        self._reader = reader
        self._checkpoints = None if log is None else Checkpoints(layout, memory, self.ledger, log)
        if self._checkpoints is not None:
            self.ledger.before_clearing = self._flush
            self._checkpoints.take_over()
            # Its frame was whole before its checkpoint was: the predecessor only did not come to say so.
            self._published_step.store_release(self.ledger.step)

    def apply(self, message: wire.AnyCommand) -> Outcome:
        """Applies one message; a step is published. Raises `BadMessage`, with nothing changed."""
        start_ns = monotonic_ns()
        outcome = self.ledger.apply(message)
        if outcome is _STEP:
            self._publish(start_ns)
        elif self._checkpoints is not None and self._checkpoints.is_due:
            self._flush()  # what departed from a row is nowhere else
            self._checkpoints.write()
        return outcome

    def apply_step(
        self, seq: int, step: int, slot: int, sampled: np.ndarray, width: int, drafts: np.ndarray, draft_width: int,
        entries: np.ndarray = NO_ENTRIES, logprobs_width: int = 0,
    ) -> None:  # fmt: skip
        """`apply` for a step whose ids are in memory; see `Ledger.apply_step`."""
        start_ns = monotonic_ns()
        outcome = self.ledger.apply_step(
            seq, step, slot, sampled, width, drafts, draft_width, entries, logprobs_width
        )  # fmt: skip
        if outcome is _STEP:
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
        submissions = self._submissions
        submit_ns = submissions[_FIRST_NS + step % self._num_ring_slots]
        self._queue_histogram[bucket_of(start_ns - submit_ns)] += 1
        self._lag_histogram[bucket_of(submissions[_SUBMITTED_STEP] + 1 - step)] += 1
        if self._checkpoints is not None:
            self._checkpoints.write()
        # Frame, table, stamp and counters are written; with this store, and not before, a reader looks at them.
        self._published_step.store_release(step)

    def flush(self) -> bool:
        """Hands what is to be delivered to the reader. False where the reader takes no more for now."""
        is_all = self._flush()
        while not is_all and self._checkpoints is not None and self._checkpoints.makes_room:
            self._checkpoints.write()
            is_all = self._flush()
        return is_all

    def _flush(self) -> bool:
        """`flush` as far as is possible in the middle of a message, too, when there can be no checkpoint."""
        outbox = self.ledger.outbox
        if outbox.is_empty:
            return True
        is_all = self._reader.take_from(outbox, self.ledger.step)
        self._counters[_COUNTER_OUTPUTS_DROPPED] = outbox.num_dropped_requests
        return is_all
