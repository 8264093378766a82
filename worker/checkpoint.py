"""Checkpoints: what a ledger knows beside the table, kept in the segment for the process that takes it over.

The sidecar may end at any instruction. What it leaves is the memory: the table, the frames, the outputs logs, and here
the ledger's columns and counters as of a message. The next process starts from there and applies the runner's later
messages again. Why that gives what an undisturbed ledger would have given:

* There are two slots, used in turn. One is written while the other is whole, and the store of its sequence number,
  which comes last, makes it the one to start from. A step's checkpoint is whole before the step is published.
* The table is not copied. Whatever was written into it after the checkpoint is written again, with the same values,
  when the same messages are applied again; until then nobody reads it, because it lies behind the committed length of
  the checkpoint, or in a row that was free in it, or was released since.
* What a released row still had to deliver is not read from the table a second time: it was in an outputs log before the
  row was cleared. No step lies between the checkpoint and anything that was delivered after it, so records behind the
  checkpoint's position hold ids that the checkpoint knows, and ends that will happen again and are to be skipped.
"""

from __future__ import annotations

import numpy as np

from asyncbook.ipc.layout import INCOMPLETE, NUM_CHECKPOINTS, CheckpointWord, Field, Layout, Word
from asyncbook.ipc.outputs_log import OutputsLogWriter, Record
from asyncbook.ipc.publish import OwnWord
from asyncbook.worker import kernels, rules
from asyncbook.worker.ledger import Ledger
from asyncbook.worker.life import State

MAX_MESSAGES_BETWEEN = 512  # without a step among them; a step has a checkpoint of its own


class Checkpoints:
    """Writes checkpoints of a ledger, and takes one over."""

    def __init__(self, layout: Layout, memory: memoryview, ledger: Ledger, log: OutputsLogWriter) -> None:
        self._ledger, self._log = ledger, log
        self._seq_word = OwnWord(layout.words.view(memory), Word.CHECKPOINT_SEQ)
        self._headers = [layout.checkpoint_header(slot).view(memory) for slot in range(NUM_CHECKPOINTS)]
        self._counters = [layout.checkpoint_counters(slot).view(memory) for slot in range(NUM_CHECKPOINTS)]
        self._work = [layout.checkpoint_work(slot).view(memory) for slot in range(NUM_CHECKPOINTS)]
        self._row_counters = [layout.checkpoint_row_counters(slot).view(memory) for slot in range(NUM_CHECKPOINTS)]
        self._slot = 0
        self.seq = self._seq_word.load_acquire()  # of the newest one

    @property
    def is_due(self) -> bool:
        """Whether so many messages came without a step that the runner should be rid of them."""
        return self._ledger.applied_seq - self.seq >= MAX_MESSAGES_BETWEEN

    def write(self) -> None:
        """The ledger as it is now. The frame of its last step is whole."""
        slot, ledger, log = self._slot, self._ledger, self._log
        header = self._headers[slot]
        header[CheckpointWord.SEQ] = INCOMPLETE
        kernels.write_checkpoint(
            ledger.work, ledger.tables.counters, ledger.tables.row_counters,
            self._work[slot], self._counters[slot], self._row_counters[slot],
        )  # fmt: skip
        self.seq = ledger.applied_seq
        header[: len(CheckpointWord)] = self.seq, ledger.step, log.outputs.written, log.overflow.written, log.number
        # All of the slot is written; with this store it is the one to start from, and the other one may be overwritten.
        self._seq_word.store_release(self.seq)
        self._slot = (slot + 1) % NUM_CHECKPOINTS
        log.outputs.keep_from(log.outputs.written)
        log.overflow.keep_from(log.overflow.written)

    def take_over(self) -> None:
        """Makes a new ledger what the newest checkpoint says, and what the outputs logs say beyond it. Without a
        checkpoint the ledger starts empty."""
        outputs_from = overflow_from = number = 0
        rows_by_request: dict[int, int] = {}
        slot = self._newest()
        if slot is not None:
            _, step, outputs_from, overflow_from, number = self._headers[slot][: len(CheckpointWord)].tolist()
            rows_by_request = self._restore(slot, step)
        log = self._log
        log.number = number
        records = [*log.outputs.records_since(outputs_from), *log.overflow.records_since(overflow_from)]
        for record in sorted(records, key=lambda record: record.number):
            self._count_delivered(record, rows_by_request)
            log.number = record.number
        if self._ledger.logprobs is not None:
            self._ledger.logprobs.derive_cumulative()
        log.outputs.keep_from(outputs_from)
        log.overflow.keep_from(overflow_from)

    def _newest(self) -> int | None:
        if self.seq == 0:
            return None
        return next(slot for slot, header in enumerate(self._headers) if header[CheckpointWord.SEQ] == self.seq)

    def _restore(self, slot: int, step: int) -> dict[int, int]:
        """Returns the rows whose requests have something to come, by request number."""
        ledger = self._ledger
        tables, work, lists, lengths = ledger.tables, ledger.work, ledger.lists, ledger.lengths
        work[:] = self._work[slot]
        tables.counters[:] = self._counters[slot]
        tables.row_counters[:] = self._row_counters[slot]
        ledger.applied_seq, ledger.step = self.seq, step
        work[Field.IS_DIRTY] = NUM_CHECKPOINTS
        work[Field.IS_TOUCHED] = 0
        ledger.history_lengths[:] = kernels.ALL_ROWS  # the next frames are written whole
        for which, field in ((rules.DRAFTED, Field.NUM_GIVEN_DRAFTS), (rules.PENDING, Field.IS_PENDING)):
            rows = np.flatnonzero(work[field])
            lists[which, : rows.size] = rows
            lengths[which] = rows.size
        self._slot = (slot + 1) % NUM_CHECKPOINTS
        return {
            int(work[Field.REQUEST_NO, row]): int(row)
            for row in np.flatnonzero(work[Field.STATE] != State.FREE)
            if work[Field.STATE, row] != State.FINISHED or work[Field.IS_PENDING, row]
        }

    def _count_delivered(self, record: Record, rows_by_request: dict[int, int]) -> None:
        """A delivery after the checkpoint: ids that rows held by then, and ends."""
        work, outbox = self._ledger.work, self._ledger.outbox
        columns = record.columns
        num_bytes = np.zeros(columns.n, np.int64) if columns.texts is None else np.diff(columns.texts.offsets)
        entries = np.stack([columns.request_nos, columns.finish_reasons, np.diff(columns.offsets), num_bytes], axis=1)
        for request_no, finish_reason, num_ids, num_text_bytes in entries.tolist():
            row = rows_by_request.get(request_no)
            if row is not None:
                work[Field.NUM_DELIVERED, row] += num_ids
                work[Field.TEXT_DELIVERED, row] += num_text_bytes
                is_known_end = work[Field.STATE, row] == State.FINISHED
                if finish_reason or (
                    not is_known_end and work[Field.NUM_DELIVERED, row] == work[Field.NUM_OUTPUT_TOKENS, row]
                ):
                    outbox.remove(row)
                if not finish_reason:
                    continue
                del rows_by_request[request_no]
                if is_known_end:
                    continue
            outbox.ends_to_skip[request_no] += bool(finish_reason)
