"""The outputs, on their way from the bookkeeper to their reader: two logs of records in the shared segment.

A record is a header of one line (`layout.RecordWord`), the columns of a delivery (`ipc/columns.py`) and, where it has
logprobs, their section behind these (`ipc/logprobs.py`). A log is a ring of lines with one writer and one reader.
Positions count lines and only grow; a record does not wrap, so the rest of the ring's end is filled with a padding
record where it is too small. `*_WRITTEN` is release-stored after the record, so who reads it sees the record whole;
`*_READ` is release-stored after the record was copied, so nothing is overwritten unread.

There are two because not everything can wait. What a row still holds waits there while the outputs log is full: the
reader gets a bigger piece later. What a row loses, because its request was aborted or the row released, goes to the
overflow log then, which is sparse and large. Records are numbered over both, and the reader takes the lower number.

The memory belongs to the runner. A record that was written is there whatever becomes of the bookkeeper's process, and
the next one finds out from the log itself what its predecessor had delivered since the last checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from asyncbook.ipc.columns import OutputColumns, Texts
from asyncbook.ipc.layout import LINE_BYTES, PADDING_RECORD, DropWord, Layout, RecordWord, Region, RunnerWord, Word
from asyncbook.ipc.logprobs import LogprobColumns, section_start
from asyncbook.ipc.publish import OwnWord
from asyncbook.ipc.publish import Word as SharedWord
from asyncbook.ipc.segment import give_back

INT32_PER_LINE = LINE_BYTES // 4
_NUM_HEADER_WORDS = len(RecordWord)


class Record(NamedTuple):
    """A delivery as it lies in a log."""

    number: int
    step: int
    columns: OutputColumns


def lines_of(size: int) -> int:
    """Lines of a record with so many int32 values behind its header."""
    return 1 + -(-size // INT32_PER_LINE)


class _Ring:
    """Lines of one log: int64 for headers, int32 for columns."""

    def __init__(self, region: Region, memory: memoryview, has_logprobs: bool) -> None:
        self._has_logprobs = has_logprobs
        self.headers = region.view(memory)
        self.num_lines = region.shape[0]
        self.values = self.headers.reshape(-1).view(np.int32)

    def header(self, position: int) -> list[int]:
        """The words of the header at a position."""
        words: list[int] = self.headers[position % self.num_lines, :_NUM_HEADER_WORDS].tolist()
        return words

    def block(self, position: int, size: int) -> np.ndarray:
        """int32 [size]: the columns of the record at a position."""
        start = (position % self.num_lines + 1) * INT32_PER_LINE
        return self.values[start : start + size]

    def record(self, position: int, *, copied: bool = False) -> Record:
        """The record at a position, in the log's own memory or copied from it."""
        number, _, step, n, size, logprobs_size, text_size = self.header(position)
        text_start = section_start(size) + logprobs_size if logprobs_size else size
        block = self.block(position, text_start + text_size)
        block = block.copy() if copied else block
        columns = OutputColumns(n, block[:size])
        if self._has_logprobs:
            columns.logprobs = LogprobColumns.behind(block, n, size, columns.token_ids.size, logprobs_size)
        if text_size:
            columns.texts = Texts.read(n, block[text_start:])
        return Record(number, step, columns)

    def records(self, start: int, end: int) -> Iterator[Record]:
        """Everything from one position to another."""
        while start < end:
            _, num_lines, _, n, *_ = self.header(start)
            if n != PADDING_RECORD:
                yield self.record(start)
            start += num_lines


class LogWriter:
    """The bookkeeper's side of one log."""

    def __init__(
        self, region: Region, memory: memoryview, written: OwnWord, read: SharedWord, has_logprobs: bool
    ) -> None:
        self._region, self._memory = region, memory
        self._ring = _Ring(region, memory, has_logprobs)
        self._written_word, self._read_word = written, read
        self.written = written.load_acquire()
        self._given_back_at = 0
        self._kept_from = self.written  # what is written from here on is not in a checkpoint, and must not be lost

    def room(self, min_lines: int) -> int:
        """int32 values that a block written now may have; 0 where there are not `min_lines` lines in a row."""
        ring = self._ring
        end = min(self._read_word.load_acquire(), self._kept_from) + ring.num_lines
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

    def publish(self, number: int, step: int, columns: OutputColumns) -> None:
        """The record of columns that are in `block` already, and the section of their logprobs behind them; their text
        is put there."""
        size, logprobs_size, text_size = columns.block.size, columns.logprobs_size, columns.text_size
        if columns.texts is not None:
            columns.texts.write(self._ring.block(self.written, columns.record_size)[columns.text_start :])
        num_lines = lines_of(columns.record_size)
        header = self._ring.headers[self.written % self._ring.num_lines]
        header[:_NUM_HEADER_WORDS] = number, num_lines, step, columns.n, size, logprobs_size, text_size
        self.written += num_lines
        # Header and columns are written; with this store, and not before, the reader looks at them.
        self._written_word.store_release(self.written)

    def keep_from(self, position: int) -> None:
        """What was written before may be overwritten once it is read: a checkpoint knows of it."""
        self._kept_from = position

    @property
    def is_held(self) -> bool:
        """Whether the reader is done with more than may be overwritten: a checkpoint would make room."""
        return self._kept_from < self._read_word.load_acquire()

    def records_since(self, position: int) -> Iterator[Record]:
        """What the predecessor wrote after its last checkpoint."""
        return self._ring.records(position, self.written)

    def give_back(self) -> None:
        """Returns the memory of a log that is wholly read and in a checkpoint."""
        if self.written == self._given_back_at:
            return
        if min(self._read_word.load_acquire(), self._kept_from) == self.written:
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
        self.min_lines = layout.max_record_lines
        self.number = 0  # of the last record
        self._drops = layout.drops.view(memory)
        self._num_drops = 0
        self._checkpoint = 0

    def checkpointed(self, checkpoint: int) -> None:
        """The checkpoint of this number knows of everything that was written or dropped so far."""
        self.outputs.keep_from(self.outputs.written)
        self.overflow.keep_from(self.overflow.written)
        self._checkpoint, self._num_drops = checkpoint, 0

    def note_drop(self, request_no: int) -> None:
        """There is no room for what a request had to deliver, and it cannot wait. Its row may be cleared now, so no
        successor may look for it there."""
        note = self._drops[self._num_drops]
        note[DropWord.REQUEST_NO] = request_no
        note[DropWord.CHECKPOINT] = self._checkpoint + 1
        self._num_drops += 1

    def take_over(self, checkpoint: int, outputs: int, overflow: int, number: int) -> tuple[list[Record], list[int]]:
        """What the predecessor delivered and dropped behind its last checkpoint, which was of this number, and written
        with the logs at these positions: (records in order, request numbers)."""
        records = [*self.outputs.records_since(outputs), *self.overflow.records_since(overflow)]
        records.sort(key=lambda record: record.number)
        self.number = records[-1].number if records else number
        self.outputs.keep_from(outputs)
        self.overflow.keep_from(overflow)
        self._checkpoint = checkpoint
        notes = itertools.takewhile(lambda note: note[DropWord.CHECKPOINT] == checkpoint + 1, self._drops.tolist())
        dropped = [note[DropWord.REQUEST_NO] for note in notes]
        self._num_drops = len(dropped)
        return records, dropped


class OutputsLogReader:
    """The reader's side. `runner_part` is writable memory of the RUNNER part, `memory` the whole segment, read-only."""

    def __init__(self, layout: Layout, memory: memoryview, runner_part: memoryview) -> None:
        words = layout.words.view(memory)
        runner_words = layout.runner_words.view(runner_part, layout.runner_offset)
        regions = (layout.outputs_log, layout.overflow_log)
        self._rings = [_Ring(region, memory, layout.has_logprobs) for region in regions]
        self._written = [SharedWord(words, Word.OUTPUTS_WRITTEN), SharedWord(words, Word.OVERFLOW_WRITTEN)]
        self._read = [
            OwnWord(runner_words, RunnerWord.OUTPUTS_READ),
            OwnWord(runner_words, RunnerWord.OVERFLOW_READ),
        ]
        self._positions = [0, 0]
        self.number = 0  # of the last record that was taken

    def take(self) -> Record | None:
        """The next record, its columns copied, or None where there is none yet."""
        while True:
            heads = self._heads()
            if not heads:
                return None
            number, which, position = min(heads)
            if number == self.number + 1:
                break
            # The one before it came into the other log between the looks at the two: it is there now.
        ring = self._rings[which]
        _, num_lines, *_ = ring.header(position)
        record = ring.record(position, copied=True)
        self.number = record.number
        self._positions[which] = position + num_lines
        # The columns are copied: from this store on the writer may overwrite them.
        self._read[which].store_release(position + num_lines)
        return record

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
                position += num_lines
        return heads
