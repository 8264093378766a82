"""The outputs once more, for other processes that map the segment read-only: one log, any number of readers.

Records are those of the outputs logs (`outputs_log.py`), copied as they are, and between them records of names, which
say what request a number stands for. Nobody tells the writer what was read, so no reader can hold it up: it overwrites
the oldest records, and a reader finds out. It has begun to overwrite when `BROADCAST_RESERVED` is more than a log's
length ahead, which is stored before the first byte goes; a reader copies, then looks. `BROADCAST_WRITTEN` is
release-stored after a record, so what lies before it is whole.

Where all readers say that they have read everything, the next record begins the log anew, at its first line: so the
log stays in the caches as long as they keep up, and grows to its length when one does not. `BROADCAST_START` is the
position of the first line; it is stored before anything is written behind it, and a reader loads it behind `WRITTEN`.

`BROADCAST_EPOCH` is odd while everything that is delivered gets here, and grows whenever that begins or ends. A reader
that sees another one than its own has missed something.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncbook.ipc.errors import OutputsLost
from asyncbook.ipc.layout import LINE_BYTES, NAMES_RECORD, PADDING_RECORD, Layout, RecordWord, Word
from asyncbook.ipc.log_ring import LogRing, Record, lines_of
from asyncbook.ipc.publish import OwnWord, fence
from asyncbook.ipc.publish import Word as SharedWord
from asyncbook.ipc.segment import give_back

WARM_BYTES = 1 << 19  # of the log that readers are let go through before it begins anew


class NamesRecord(NamedTuple):
    """Which requests were admitted, a list of `wire.Named`, encoded."""

    data: bytes


class BroadcastWriter:
    """The bookkeeper's side."""

    def __init__(self, layout: Layout, memory: memoryview) -> None:
        words = layout.words.view(memory)
        self._reserved_word = OwnWord(words, Word.BROADCAST_RESERVED)
        self._written_word = OwnWord(words, Word.BROADCAST_WRITTEN)
        self._epoch_word = OwnWord(words, Word.BROADCAST_EPOCH)
        self._start_word = OwnWord(words, Word.BROADCAST_START)
        self._start_number_word = OwnWord(words, Word.BROADCAST_START_NUMBER)
        self._memory, self._region = memory, layout.broadcast_log
        self._lines = layout.broadcast_log.view(memory)
        self.written = self._written_word.load_acquire()
        self.epoch = self._epoch_word.load_acquire()
        self._start = self._start_word.load_acquire()

    @property
    def is_on(self) -> bool:
        """Whether somebody listens."""
        return self.epoch % 2 == 1

    def turn_on(self, number: int) -> None:
        """From here on everything delivered is written; `number`: of the last delivery before."""
        if not self.is_on:
            self._start_at_first_line(number)
            self._next_epoch(1)

    def begin_anew(self, number: int) -> None:
        """Everybody has read everything; `number`: of the last delivery. Saves memory that was touched long ago."""
        if (self.written - self._start) * LINE_BYTES >= WARM_BYTES:
            self._start_at_first_line(number)

    def _start_at_first_line(self, number: int) -> None:
        self._start = self.written
        # Whoever takes over between the two counts from this number, which is broadcast, wherever the log starts.
        self._start_number_word.store_release(number)
        self._start_word.store_release(self._start)

    def turn_off(self) -> None:
        """Nobody listens any more: the memory goes back."""
        if self.is_on:
            self._next_epoch(1)
            give_back(self._memory, self._region.offset, self._region.end - self._region.offset)

    def _next_epoch(self, distance: int) -> None:
        self.epoch += distance
        self._epoch_word.store_release(self.epoch)

    def write_record(self, lines: np.ndarray) -> None:
        """A record of an outputs log: int64 [n, WORDS_PER_LINE], header first."""
        if len(lines) > len(self._lines) // 2:
            self._next_epoch(2)  # too large for anybody to read it in time
            return
        self._reserve(len(lines))[:] = lines
        self._publish(len(lines))

    def write_names(self, data: bytes) -> None:
        """A record of names."""
        num_lines = lines_of(-(-len(data) // 4))
        lines = self._reserve(num_lines)
        lines[0, RecordWord.NUMBER] = 0
        lines[0, RecordWord.NUM_LINES] = num_lines
        lines[0, RecordWord.NUM_REQUESTS] = NAMES_RECORD
        lines[0, RecordWord.BLOCK_SIZE] = len(data)
        lines[1:].reshape(-1).view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        self._publish(num_lines)

    def _reserve(self, num_lines: int) -> np.ndarray:
        """Lines in a row for a record. What lay there is gone from here on."""
        start = (self.written - self._start) % len(self._lines)
        to_turn = len(self._lines) - start
        if to_turn < num_lines:
            self._announce(to_turn)
            self._lines[start, RecordWord.NUM_LINES] = to_turn
            self._lines[start, RecordWord.NUM_REQUESTS] = PADDING_RECORD
            self._publish(to_turn)
            start = 0
        self._announce(num_lines)
        return self._lines[start : start + num_lines]

    def _announce(self, num_lines: int) -> None:
        self._reserved_word.store_release(self.written + num_lines)
        # The fence keeps what is written next behind the announcement; see `BroadcastReader.take` for the other half.
        fence()

    def _publish(self, num_lines: int) -> None:
        self.written += num_lines
        # The record is written; with this store, and not before, a reader looks at it.
        self._written_word.store_release(self.written)

    def last_number_since(self, position: int, number: int) -> int:
        """The number of the last delivery that is here, or need not be. A checkpoint says that it was `number` at a
        position; the epoch may have begun later."""
        position = max(position, self._start)
        number = max(number, self._start_number_word.load_acquire())
        while position < self.written:
            header = self._lines[(position - self._start) % len(self._lines)]
            number = max(number, int(header[RecordWord.NUMBER])) if header[RecordWord.NUM_REQUESTS] >= 0 else number
            position += int(header[RecordWord.NUM_LINES])
        return number


class BroadcastReader:
    """A reader's side, from a position and epoch on that the bookkeeper named. `memory`: the segment, read-only."""

    def __init__(self, layout: Layout, memory: memoryview, position: int, epoch: int) -> None:
        words = layout.words.view(memory)
        self._reserved_word = SharedWord(words, Word.BROADCAST_RESERVED)
        self._written_word = SharedWord(words, Word.BROADCAST_WRITTEN)
        self._epoch_word = SharedWord(words, Word.BROADCAST_EPOCH)
        self._start_word = SharedWord(words, Word.BROADCAST_START)
        self._ring = LogRing(layout.broadcast_log, memory, layout.has_logprobs)
        self.position, self.epoch = position, epoch

    @property
    def has_next(self) -> bool:
        """Whether something was written that was not read yet."""
        return self._written_word.load_acquire() > self.position

    @property
    def lag_bytes(self) -> int:
        """Of the log, not read yet."""
        return LINE_BYTES * max(0, self._written_word.load_acquire() - self.position)

    def take(self) -> Record | NamesRecord | None:
        """The next record, copied; None where there is none yet. Raises `OutputsLost`."""
        while self.position < self._written_word.load_acquire():
            place = self.position - self._start_word.load_acquire()
            _, num_lines, _, n, size, *_ = self._ring.header(place)
            self._check()  # before sizes are used that may be those of another record
            record: Record | NamesRecord | None = None
            if n == NAMES_RECORD:
                record = NamesRecord(self._ring.block(place, -(-size // 4)).tobytes()[:size])
            elif n != PADDING_RECORD:
                record = self._ring.record(place, is_copied=True)
            self._check()
            self.position += num_lines
            if record is not None:
                return record
        self._check()
        return None

    def _check(self) -> None:
        """Raises `OutputsLost` where what was copied may have been overwritten, or given back, meanwhile."""
        fence()  # what was copied was loaded before this; the words below are loaded after it
        is_there = self._reserved_word.load_acquire() - self.position <= self._ring.num_lines
        is_there &= self._start_word.load_acquire() <= self.position
        if not is_there or self._epoch_word.load_acquire() != self.epoch:
            self._raise_lost()

    def _raise_lost(self) -> None:
        raise OutputsLost(
            f"outputs went before they were read: {self.lag_bytes} bytes wait to be read, of which "
            f"{LINE_BYTES * self._ring.num_lines} are kept; read more often, or subscribe again for what comes now"
        )
