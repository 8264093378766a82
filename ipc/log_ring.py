"""A ring of lines in which records lie: what the outputs logs and the broadcast log have in common.

A record is a header of one line (`layout.RecordWord`), the columns of a delivery (`ipc/columns.py`) and, where it has
logprobs, their section behind these (`ipc/logprobs.py`). Positions count lines and only grow; a record does not wrap,
so the rest of the ring's end is filled with a padding record where it is too small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from asyncbook.ipc.columns import OutputColumns, Texts
from asyncbook.ipc.layout import LINE_BYTES, PADDING_RECORD, RecordWord, Region
from asyncbook.ipc.logprobs import LogprobColumns, section_start

INT32_PER_LINE = LINE_BYTES // 4
NUM_HEADER_WORDS = len(RecordWord)


class Record(NamedTuple):
    """A delivery as it lies in a log."""

    number: int
    step: int
    columns: OutputColumns


def lines_of(size: int) -> int:
    """Lines of a record with so many int32 values behind its header."""
    return 1 + -(-size // INT32_PER_LINE)


def header_of(number: int, step: int, columns: OutputColumns) -> tuple[int, ...]:
    """The words of a record's header."""
    sizes = columns.block.size, columns.logprobs_size, columns.text_size
    return number, lines_of(columns.record_size), step, columns.n, *sizes


def put_behind_columns(values: np.ndarray, columns: OutputColumns) -> None:
    """The columns, and their logprobs behind them, into a record's int32 values. Their text is not put there."""
    size = columns.block.size
    values[:size] = columns.block
    if columns.logprobs is not None and columns.logprobs_size:
        start = section_start(size)
        values[start : start + columns.logprobs_size] = columns.logprobs.section


class LogRing:
    """Lines of one log: int64 for headers, int32 for columns."""

    def __init__(self, region: Region, memory: memoryview, has_logprobs: bool) -> None:
        self._has_logprobs = has_logprobs
        self.headers = region.view(memory)
        self.num_lines = region.shape[0]
        self.values = self.headers.reshape(-1).view(np.int32)

    def header(self, position: int) -> list[int]:
        """The words of the header at a position."""
        words: list[int] = self.headers[position % self.num_lines, :NUM_HEADER_WORDS].tolist()
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
        number, _, step, n, size, logprobs_size, text_size = self.header(position)
        text_start = section_start(size) + logprobs_size if logprobs_size else size
        block = self.block(position, text_start + text_size)
        block = block.copy() if is_copied else block
        columns = OutputColumns(n, block[:size])
        if self._has_logprobs:
            columns.logprobs = LogprobColumns.behind(block, n, size, columns.token_ids.size, logprobs_size)
        if text_size:
            columns.texts = Texts.read(n, block[text_start:])
        return Record(number, step, columns)

    def positions(self, start: int, end: int) -> Iterator[int]:
        """Of every record from one position to another."""
        while start < end:
            _, num_lines, _, n, *_ = self.header(start)
            if n != PADDING_RECORD:
                yield start
            start += num_lines


def record_lines(number: int, step: int, columns: OutputColumns) -> np.ndarray:
    """int64 [lines, WORDS_PER_LINE]: a record that is in no log."""
    lines = np.zeros((lines_of(columns.record_size), LINE_BYTES // 8), np.int64)
    lines[0, :NUM_HEADER_WORDS] = header_of(number, step, columns)
    values = lines[1:].reshape(-1).view(np.int32)
    put_behind_columns(values, columns)
    if columns.texts is not None:
        columns.texts.write(values[columns.text_start : columns.record_size])
    return lines
