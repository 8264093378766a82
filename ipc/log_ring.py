"""A ring of lines in which records lie: what the outputs logs and the broadcast log have in common.

A record is a header of one line (`layout.RecordWord`) and the columns of a delivery (`ipc/columns.py`). Positions count
lines and only grow; a record does not wrap, so the rest of the ring's end is filled with a padding record where it is
too small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from asyncbook.ipc.columns import OutputColumns, Texts
from asyncbook.ipc.layout import LINE_BYTES, PADDING_RECORD, RecordWord, Region

INT32_PER_LINE = LINE_BYTES // 4
_NUM_HEADER_WORDS = len(RecordWord)


class Record(NamedTuple):
    """A delivery as it lies in a log."""

    number: int
    step: int
    columns: OutputColumns


def lines_of(block_size: int) -> int:
    """Lines of a record with so many int32 values behind its header."""
    return 1 + -(-block_size // INT32_PER_LINE)


class LogRing:
    """Lines of one log: int64 for headers, int32 for columns."""

    def __init__(self, region: Region, memory: memoryview) -> None:
        self.headers = region.view(memory)
        self.num_lines = region.shape[0]
        self.values = self.headers.reshape(-1).view(np.int32)

    def header(self, position: int) -> list[int]:
        """The words of the header at a position."""
        words: list[int] = self.headers[position % self.num_lines, :_NUM_HEADER_WORDS].tolist()
        return words

    def lines(self, position: int, num_lines: int) -> np.ndarray:
        """int64 [num_lines, WORDS_PER_LINE]: the whole record at a position."""
        start = position % self.num_lines
        return self.headers[start : start + num_lines]

    def block(self, position: int, size: int) -> np.ndarray:
        """int32 [size]: the columns of the record at a position."""
        start = (position % self.num_lines + 1) * INT32_PER_LINE
        return self.values[start : start + size]

    def record(self, position: int, *, is_copied: bool = False) -> Record:
        """The record at a position, in the log's own memory or copied from it."""
        number, _, step, n, size, text_size = self.header(position)
        block = self.block(position, size + text_size)
        block = block.copy() if is_copied else block
        return Record(number, step, OutputColumns(n, block[:size], Texts.read(n, block[size:]) if text_size else None))

    def positions(self, start: int, end: int) -> Iterator[int]:
        """Of every record from one position to another."""
        while start < end:
            _, num_lines, _, n, *_ = self.header(start)
            if n != PADDING_RECORD:
                yield start
            start += num_lines


def record_lines(number: int, step: int, columns: OutputColumns) -> np.ndarray:
    """int64 [lines, WORDS_PER_LINE]: a record that is in no log."""
    size, text_size = columns.block.size, columns.text_size
    num_lines = lines_of(size + text_size)
    lines = np.zeros((num_lines, LINE_BYTES // 8), np.int64)
    lines[0, :_NUM_HEADER_WORDS] = number, num_lines, step, columns.n, size, text_size
    values = lines[1:].reshape(-1).view(np.int32)
    values[:size] = columns.block
    if columns.texts is not None:
        columns.texts.write(values[size : size + text_size])
    return lines
