"""Checkpoints: what a ledger knows beside the table, kept in the segment for the process that takes it over.

The sidecar may end at any instruction. What it leaves is the memory: the table, the frames, the outputs logs, and here
the ledger's columns and counters as of a message. The next process starts from there and applies the runner's later
messages again. Why that gives what an undisturbed ledger would have given:

* There are two slots, used in turn. One is written while the other is whole, and the store of its number, which comes
  last, makes it the one to start from. A step's checkpoint is whole before the step is published.
* The table is not copied. Whatever was written into it after the checkpoint is written again, with the same values,
  when the same messages are applied again; until then nobody reads it, because it lies behind the committed length of
  the checkpoint, or in a row that was free in it, or was released since.
* Sums of logprobs are added up again, from the entries of what was delivered and in their order, so every bit is the
  same. A row whose entries were zeroed after the checkpoint gets a wrong one, and has nothing left to deliver with it.
* What a released row still had to deliver is not read from the table a second time: it was in an outputs log before the
  row was cleared, or was dropped, and that was noted. No step lies between the checkpoint and anything that was
  delivered after it, so records behind the checkpoint's position hold ids that the checkpoint knows, and ends that will
  happen again and are to be skipped. Until they have, there is no other checkpoint: it would not know of them.
"""

from __future__ import annotations

import numpy as np

from asyncbook.ipc.layout import (
    MAX_MESSAGES_BETWEEN_CHECKPOINTS,
    NUM_CHECKPOINTS,
    CheckpointWord,
    Counter,
    Field,
    Layout,
    Word,
)
from asyncbook.ipc.log_ring import Record
from asyncbook.ipc.outputs_log import OutputsLogWriter
from asyncbook.ipc.publish import OwnWord
from asyncbook.worker import kernels, rules
from asyncbook.worker.ledger import Ledger
from asyncbook.worker.life import State

MAX_MESSAGES_BETWEEN = MAX_MESSAGES_BETWEEN_CHECKPOINTS


class Checkpoints:
    """Writes checkpoints of a ledger, and takes one over."""

    def __init__(self, layout: Layout, memory: memoryview, ledger: Ledger, log: OutputsLogWriter) -> None:
        self._ledger, self._log = ledger, log
        words = layout.words.view(memory)
        self._number_word, self._seq_word = OwnWord(words, Word.CHECKPOINT), OwnWord(words, Word.CHECKPOINT_SEQ)
        self._headers = [layout.checkpoint_header(slot).view(memory) for slot in range(NUM_CHECKPOINTS)]
        self._counters = [layout.checkpoint_counters(slot).view(memory) for slot in range(NUM_CHECKPOINTS)]
        self._work = [layout.checkpoint_work(slot).view(memory) for slot in range(NUM_CHECKPOINTS)]
        self._row_counters = [layout.checkpoint_row_counters(slot).view(memory) for slot in range(NUM_CHECKPOINTS)]
        self._number = self._number_word.load_acquire()  # of the newest one
        self.seq = 0  # of the last message that is in it

    @property
    def is_due(self) -> bool:
        """Whether so many messages came without a step that the runner should be rid of them."""
        return self._ledger.applied_seq - self.seq >= MAX_MESSAGES_BETWEEN

    @property
    def makes_room(self) -> bool:
        """Whether outputs wait for no more than another checkpoint."""
        return self._log.outputs.is_held and not self._ledger.outbox.ends_to_skip

    def write(self) -> None:
        """The ledger as it is now. The frame of its last step is whole, and what departed from rows is in a log."""
        ledger, log = self._ledger, self._log
        number = self._number + 1
        slot = number % NUM_CHECKPOINTS
        kernels.write_checkpoint(
            ledger.work, ledger.tables.counters, ledger.tables.row_counters,
            self._work[slot], self._counters[slot], self._row_counters[slot],
        )  # fmt: skip
        seq = ledger.applied_seq
        header = seq, ledger.step, log.outputs.written, log.overflow.written, log.number, log.broadcast.written
        self._headers[slot][: len(CheckpointWord)] = header
        # All of the slot is written; with this store it is the one to start from, and the other one may be overwritten.
        self._number_word.store_release(number)
        self._seq_word.store_release(seq)
        self._number, self.seq = number, seq
        log.checkpointed(number)

    def take_over(self) -> None:
        """Makes a new ledger what the newest checkpoint says, and what the outputs logs say beyond it. Without a
        checkpoint the ledger starts empty."""
        ledger, log = self._ledger, self._log
        header = [0] * len(CheckpointWord)
        if self._number == 0:
            ledger.tables.counters[:] = 0
            ledger.tables.row_counters[:] = 0
        else:
            slot = self._number % NUM_CHECKPOINTS
            header = self._headers[slot][: len(CheckpointWord)].tolist()
            self._restore(slot)
        self.seq, ledger.step, outputs_from, overflow_from, number, broadcast_from = header
        ledger.applied_seq = self.seq
        self._seq_word.store_release(self.seq)
        # Slots and frames may be half written: all of each is written anew.
        ledger.work[Field.IS_DIRTY] = NUM_CHECKPOINTS
        ledger.history_lengths[:] = kernels.ALL_ROWS
        rows_by_request = self._rows_by_request()
        records, dropped = log.take_over(self._number, outputs_from, overflow_from, number, broadcast_from)
        for record in records:
            self._count_delivered(record, rows_by_request)
        for request_no in dropped:
            self._count_dropped(request_no, rows_by_request)
        num_dropped = int(ledger.tables.counters[Counter.OUTPUTS_DROPPED_REQUESTS]) + len(dropped)
        ledger.outbox.num_dropped_requests = ledger.tables.counters[Counter.OUTPUTS_DROPPED_REQUESTS] = num_dropped
        if ledger.logprobs is not None:
            ledger.logprobs.derive_cumulative()  # of what is delivered, which is known by now

    def _restore(self, slot: int) -> None:
        ledger = self._ledger
        tables, work, lists, lengths = ledger.tables, ledger.work, ledger.lists, ledger.lengths
        work[:] = self._work[slot]
        tables.counters[:] = self._counters[slot]
        tables.row_counters[:] = self._row_counters[slot]
        work[Field.IS_TOUCHED] = 0
        for which, field in ((rules.DRAFTED, Field.NUM_GIVEN_DRAFTS), (rules.PENDING, Field.IS_PENDING)):
            rows = np.flatnonzero(work[field])
            lists[which, : rows.size] = rows
            lengths[which] = rows.size

    def _rows_by_request(self) -> dict[int, int]:
        """The rows whose requests have something to come, by request number."""
        work = self._ledger.work
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
                has_ended = work[Field.STATE, row] == State.FINISHED
                if not has_ended and work[Field.NUM_DELIVERED, row] == work[Field.NUM_OUTPUT_TOKENS, row]:
                    outbox.remove(row)
            if finish_reason:
                self._count_end(request_no, rows_by_request)

    def _count_dropped(self, request_no: int, rows_by_request: dict[int, int]) -> None:
        """Of this request nothing is to come, and its row may be another's by now."""
        row = rows_by_request.get(request_no)
        if row is not None:
            self._ledger.work[Field.NUM_DELIVERED, row] = self._ledger.work[Field.NUM_OUTPUT_TOKENS, row]
        self._count_end(request_no, rows_by_request)

    def _count_end(self, request_no: int, rows_by_request: dict[int, int]) -> None:
        """Where the checkpoint knows the request's end, that is delivered; else it will happen, and be skipped."""
        row = rows_by_request.pop(request_no, None)
        if row is not None:
            self._ledger.outbox.remove(row)
            if self._ledger.work[Field.STATE, row] == State.FINISHED:
                return
        self._ledger.outbox.ends_to_skip[request_no] += 1
