"""The outputs, on their way from the bookkeeper to their reader: two logs of records in the shared segment.

A log is a ring of records (`log_ring.py`) with one writer and one reader. `*_WRITTEN` is release-stored after the
record, so who reads it sees the record whole; `*_READ` is release-stored after the record was copied, so nothing is
overwritten unread.

There are two because not everything can wait. What a row still holds waits there while the outputs log is full: the
reader gets a bigger piece later. What a row loses, because its request was aborted or the row released, goes to the
overflow log then, which is sparse and large. Records are numbered over both, and the reader takes the lower number.

The memory belongs to the runner. A record that was written is there whatever becomes of the bookkeeper's process, and
the next one finds out from the log itself what its predecessor had delivered since the last checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from asyncbook.ipc.broadcast import BroadcastWriter
from asyncbook.ipc.columns import OutputColumns
from asyncbook.ipc.errors import OutputsLost
from asyncbook.ipc.layout import PADDING_RECORD, DropWord, Layout, RecordWord, Region, RunnerWord, Word
from asyncbook.ipc.log_ring import INT32_PER_LINE, NUM_HEADER_WORDS, LogRing, Record, header_of, lines_of, record_lines
from asyncbook.ipc.publish import OwnWord, fence
from asyncbook.ipc.publish import Word as SharedWord
from asyncbook.ipc.segment import give_back


class LogWriter:
    """The bookkeeper's side of one log."""

    def __init__(
        self, region: Region, memory: memoryview, written: OwnWord, read: SharedWord, has_logprobs: bool
    ) -> None:
        self._region, self._memory = region, memory
        self._ring = LogRing(region, memory, has_logprobs)
        self._written_word, self._read_word = written, read
        self.written = written.load_acquire()
        self._given_back_at = 0
        self._has_reader = True
        self._kept_from = self.written  # what is written from here on is not in a checkpoint, and must not be lost

    @property
    def _read(self) -> int:
        """Lines that the reader is done with."""
        return self._read_word.load_acquire() if self._has_reader else self.written

    def forget_reader(self) -> None:
        """Nobody reads what is written from here on, but whoever takes over from a checkpoint."""
        self._has_reader = False

    @property
    def was_ever_read(self) -> bool:
        """Whether the reader has taken anything."""
        return self._read_word.load_acquire() > 0

    def room(self, min_lines: int) -> int:
        """int32 values that a block written now may have; 0 where there are not `min_lines` lines in a row."""
        ring = self._ring
        end = min(self._read, self._kept_from) + ring.num_lines
        to_turn = ring.num_lines - self.written % ring.num_lines
        if to_turn < min_lines and end - self.written >= to_turn + min_lines:
            header = ring.headers[self.written % ring.num_lines]
            header[RecordWord.NUM_LINES] = to_turn
            header[RecordWord.NUM_REQUESTS] = PADDING_RECORD
            self.written += to_turn
            to_turn = ring.num_lines
        lines = min(end - self.written, to_turn)
        return (lines - 1) * INT32_PER_LINE if lines >= min_lines else 0

    def block(self, size: int) -> np.ndarray:
        """int32 [size], at most what `room` said: where the next record's columns go."""
        return self._ring.block(self.written, size)

    def publish(self, number: int, step: int, columns: OutputColumns) -> np.ndarray:
        """The record of columns that are in `block` already, and the section of their logprobs behind them; their text
        is put there. Returns its lines."""
        if columns.texts is not None:
            columns.texts.write(self._ring.block(self.written, columns.record_size)[columns.text_start :])
        num_lines = lines_of(columns.record_size)
        lines = self._ring.lines(self.written, num_lines)
        lines[0, :NUM_HEADER_WORDS] = header_of(number, step, columns)
        self.written += num_lines
        # Header and columns are written; with this store, and not before, the reader looks at them.
        self._written_word.store_release(self.written)
        return lines

    def keep_from(self, position: int) -> None:
        """What was written before may be overwritten once it is read: a checkpoint knows of it."""
        self._kept_from = position

    @property
    def is_held(self) -> bool:
        """Whether the reader is done with more than may be overwritten: a checkpoint would make room."""
        return self._kept_from < self._read

    def records_since(self, position: int) -> Iterator[Record]:
        """What the predecessor wrote after its last checkpoint."""
        return map(self._ring.record, self._ring.positions(position, self.written))

    def lines_since(self, position: int) -> Iterator[tuple[int, np.ndarray]]:
        """The same as (number, lines)."""
        for start in self._ring.positions(position, self.written):
            number, num_lines, *_ = self._ring.header(start)
            yield number, self._ring.lines(start, num_lines)

    def give_back(self) -> None:
        """Returns the memory of a log that is wholly read and in a checkpoint."""
        if self.written == self._given_back_at:
            return
        if min(self._read, self._kept_from) == self.written:
            self._given_back_at = self.written
            give_back(self._memory, self._region.offset, self._region.end - self._region.offset)


class OutputsLogWriter:
    """The bookkeeper's side of both logs."""

    def __init__(self, layout: Layout, memory: memoryview) -> None:
        words = layout.words.view(memory)
        runner_words = layout.runner_words.view(memory)
        self.outputs = LogWriter(
            layout.outputs_log,
            memory,
            OwnWord(words, Word.OUTPUTS_WRITTEN),
            SharedWord(runner_words, RunnerWord.OUTPUTS_READ),
            layout.has_logprobs,
        )
        self.overflow = LogWriter(
            layout.overflow_log,
            memory,
            OwnWord(words, Word.OVERFLOW_WRITTEN),
            SharedWord(runner_words, RunnerWord.OVERFLOW_READ),
            layout.has_logprobs,
        )
        self.broadcast = BroadcastWriter(layout, memory)
        self.min_lines = layout.max_record_lines
        self.number = 0  # of the last record
        self._cut_off_step = OwnWord(words, Word.CUT_OFF_STEP)
        if self.cut_off_step:
            self.forget_reader()
        self._drops = layout.drops.view(memory)
        self._num_drops = 0
        self._checkpoint = 0

    def publish(self, log: LogWriter, step: int, columns: OutputColumns) -> None:
        """A record of columns that are in the log's `block` already, for the runner and for subscribers."""
        self.number += 1
        lines = log.publish(self.number, step, columns)
        if self.broadcast.is_on:
            self.broadcast.write_record(lines)

    @property
    def cut_off_step(self) -> int:
        """From this step on nothing is kept for the runner; 0: all is."""
        return self._cut_off_step.load_acquire()

    @property
    def was_ever_read(self) -> bool:
        """Whether the runner has taken anything."""
        return self.outputs.was_ever_read or self.overflow.was_ever_read

    def cut_off(self, step: int) -> None:
        """Nothing is kept for the runner any more. What it finds in the logs later may be overwritten: it looks here
        after it has copied something, and finds this, which is stored before any of that happens."""
        self._cut_off_step.store_release(max(step, 1))
        fence()
        self.forget_reader()

    def forget_reader(self) -> None:
        """Nobody reads what is written from here on, but whoever takes over from a checkpoint."""
        self.outputs.forget_reader()
        self.overflow.forget_reader()

    def checkpointed(self, checkpoint: int) -> None:
        """The checkpoint of this number knows of everything that was written or dropped so far."""
        self.outputs.keep_from(self.outputs.written)
        self.overflow.keep_from(self.overflow.written)
        self._checkpoint, self._num_drops = checkpoint, 0

    def drop(self, request_no: int, step: int, columns: OutputColumns) -> None:
        """There is no room for what a request had to deliver, and it cannot wait: subscribers get it, the runner does
        not. The row may be cleared now, so no successor may look for it there."""
        if self.broadcast.is_on:
            self.broadcast.write_record(record_lines(0, step, columns))
        note = self._drops[self._num_drops]
        note[DropWord.REQUEST_NO] = request_no
        note[DropWord.CHECKPOINT] = self._checkpoint + 1
        self._num_drops += 1

    def take_over(
        self, checkpoint: int, outputs: int, overflow: int, number: int, broadcast: int
    ) -> tuple[list[Record], list[int]]:
        """What the predecessor delivered and dropped behind its last checkpoint, which was of this number, and written
        with the logs at these positions: (records in order, request numbers)."""
        records = [*self.outputs.records_since(outputs), *self.overflow.records_since(overflow)]
        records.sort(key=lambda record: record.number)
        self.number = records[-1].number if records else number
        if self.broadcast.is_on:
            self._broadcast_rest(outputs, overflow, self.broadcast.last_number_since(broadcast, number))
        self.outputs.keep_from(outputs)
        self.overflow.keep_from(overflow)
        self._checkpoint = checkpoint
        notes = itertools.takewhile(lambda note: note[DropWord.CHECKPOINT] == checkpoint + 1, self._drops.tolist())
        dropped = [note[DropWord.REQUEST_NO] for note in notes]
        self._num_drops = len(dropped)
        return records, dropped

    def _broadcast_rest(self, outputs: int, overflow: int, number: int) -> None:
        """What the predecessor had delivered to the runner and not yet to the subscribers, who have got this number."""
        delivered = [*self.outputs.lines_since(outputs), *self.overflow.lines_since(overflow)]
        for _, lines in sorted((each for each in delivered if each[0] > number), key=lambda each: each[0]):
            self.broadcast.write_record(lines)


class OutputsLogReader:
    """The reader's side. `runner_part` is writable memory of the RUNNER part, `memory` the whole segment, read-only."""

    def __init__(self, layout: Layout, memory: memoryview, runner_part: memoryview) -> None:
        words = layout.words.view(memory)
        runner_words = layout.runner_words.view(runner_part, layout.runner_offset)
        regions = (layout.outputs_log, layout.overflow_log)
        self._rings = [LogRing(region, memory, layout.has_logprobs) for region in regions]
        self._written = [SharedWord(words, Word.OUTPUTS_WRITTEN), SharedWord(words, Word.OVERFLOW_WRITTEN)]
        self._read = [
            OwnWord(runner_words, RunnerWord.OUTPUTS_READ),
            OwnWord(runner_words, RunnerWord.OVERFLOW_READ),
        ]
        self._cut_off_step = SharedWord(words, Word.CUT_OFF_STEP)
        self._positions = [0, 0]
        self.number = 0  # of the last record that was taken

    @property
    def cut_off_step(self) -> int:
        """From this step on nothing was kept; 0: all was."""
        return self._cut_off_step.load_acquire()

    def take(self) -> Record | None:
        """The next record, its columns copied, or None where there is none yet. Raises `OutputsLost` where nothing is
        kept any more."""
        while True:
            heads = self._heads()
            self._check_kept()  # else there need not be an end to what is not there any more
            if not heads:
                return None
            number, which, position = min(heads)
            if number == self.number + 1:
                break
            # The one before it came into the other log between the looks at the two: it is there now.
        ring = self._rings[which]
        _, num_lines, *_ = ring.header(position)
        record = ring.record(position, is_copied=True)
        self._check_kept()
        self.number = record.number
        self._positions[which] = position + num_lines
        # The columns are copied: from this store on the writer may overwrite them.
        self._read[which].store_release(position + num_lines)
        return record

    def _check_kept(self) -> None:
        fence()  # what was copied was loaded before this; the word below is loaded after it
        step = self.cut_off_step
        if step:
            raise OutputsLost(
                f"this book's own outputs are gone: nobody had read any of them when there was no more room at step "
                f"{step}, and subscribers had not to wait; read from the beginning, or not at all "
                f"(BookConfig(runner_reads_outputs=False))"
            )

    def has_next(self) -> bool:
        """Whether there is a record to take."""
        return bool(self._heads())

    def _heads(self) -> list[tuple[int, int, int]]:
        """(number, log, position) of the first record of each log that has one."""
        heads = []
        for which in (0, 1):
            position, written = self._positions[which], self._written[which].load_acquire()
            while position < written:
                number, num_lines, _, n, *_ = self._rings[which].header(position)
                if n != PADDING_RECORD:
                    heads.append((number, which, position))
                    break
                position += max(num_lines, 1)  # 0 where the log was given up meanwhile
        return heads
