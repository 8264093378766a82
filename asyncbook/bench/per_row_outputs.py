"""What engines make of a row's new ids today, one row at a time, in Python: text with stop strings, and logprobs.

The work is that of vLLM 0.32's `FastIncrementalDetokenizer` and `LogprobsProcessor`, in our own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asyncbook import Logprobs
from asyncbook.output_logprobs import TokenLogprobs

MUCH_PADDING = 256  # ids; from here on it is cheaper to pick out what is none than to make lists of it, too


class PerRowText:
    """The library's `DecodeStream` a row. Stop strings are looked for in what is new of the text, and as many
    characters are held back as the longest of them may still need."""

    def __init__(
        self, tokenizer: Path, prompt: np.ndarray, num_rows: int, stop: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        from tokenizers import Tokenizer
        from tokenizers.decoders import DecodeStream

        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._streams = [DecodeStream(ids=prompt.tolist(), skip_special_tokens=True) for _ in range(num_rows)]
        self._stop, self._min_tokens = stop, min_tokens
        self._num_held = max((len(string) for string in stop), default=1) - 1
        self._num_delivered = [0] * num_rows
        self.texts = [""] * num_rows

    def append(self, row: int, ids: Sequence[int], num_outputs: int) -> int:
        """Ids that come behind `num_outputs` others, none of which stops the request. How many of them are kept where
        a stop string is complete, else -1."""
        stream, tokenizer, text = self._streams[row], self._tokenizer, self.texts[row]
        num_searched, ends = len(text), []
        for i, token_id in enumerate(ids):
            text += stream.step(tokenizer, token_id) or ""
            ends.append(len(text))
            if num_outputs + i < self._min_tokens:
                num_searched = len(text)
        start, end = self._find_stop(text, num_searched)
        if start < 0:
            self.texts[row] = text
            return -1
        self.texts[row] = text[:start]
        return next(i for i, length in enumerate(ends, start=1) if length >= end)

    def _find_stop(self, text: str, num_searched: int) -> tuple[int, int]:
        """Start and end of the stop string whose last character comes first, and not among those searched; or -1."""
        first = (-1, -1)
        for string in self._stop:
            start = text.find(string, max(num_searched + 1 - len(string), 0))
            if start >= 0 and (first[0] < 0 or start + len(string) < first[1]):
                first = start, start + len(string)
        return first

    def take(self, row: int, has_finished: bool) -> str:
        """What can be delivered of the row and was not yet."""
        text, start = self.texts[row], self._num_delivered[row]
        end = len(text) if has_finished else len(text) - self._num_held
        if end <= start:
            return ""
        self._num_delivered[row] = end
        return text[start:end]

    def undelivered(self, row: int) -> str:
        """What is held back of the row."""
        return self.texts[row][self._num_delivered[row] :]


class LogprobColumns(NamedTuple):
    """Logprobs of N outputs: `token_ids` and `values` [N, 1 + k], `ranks` [N]."""

    token_ids: np.ndarray
    values: np.ndarray
    ranks: np.ndarray


def places_of(rows: Sequence[int], counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Row, and place among those of its row, of the first `counts[i]` ids of each row, one row after the other."""
    lengths = np.array(counts, np.intp)
    owners = np.repeat(np.array(rows, np.intp), lengths)
    return owners, np.arange(owners.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _take(given: Logprobs, owners: np.ndarray, offsets: np.ndarray) -> LogprobColumns:
    """What came with these ids."""
    return LogprobColumns(*(array[owners, offsets] for array in given))


class PerRowLogprobs:
    """Each output's logprobs as a list of `(id, logprob, rank)`: the sampled id's, then the top ids', the sampled one
    not again. vLLM makes a dictionary of objects of them, which takes longer."""

    def __init__(self, num_rows: int) -> None:
        self.cumulative = [0.0] * num_rows

    def append(self, rows: Sequence[int], counts: Sequence[int], given: Logprobs) -> list[TokenLogprobs]:
        """Of the first `counts[i]` ids of each row, one row after the other."""
        packed, columns = None, given
        if given.sampled_token_ranks.size - sum(counts) >= MUCH_PADDING:
            columns = Logprobs(*_take(given, *places_of(rows, counts)))
        all_ids, all_values, all_ranks = (column.tolist() for column in columns)
        if columns is not given:
            packed = zip(all_ids, all_values, all_ranks, strict=True)
        entries = []
        for row, count in zip(rows, counts, strict=True):
            cumulative = self.cumulative[row]
            of_row = packed or zip(all_ids[row], all_values[row], all_ranks[row], strict=True)
            for ids, values, rank in islice(of_row, count):
                sampled = ids[0]
                entry = [(sampled, values[0], rank)]
                for place in range(1, len(ids)):
                    if ids[place] != sampled:
                        entry.append((ids[place], values[place], place))
                entries.append(entry)
                cumulative += values[0]
            self.cumulative[row] = cumulative
        return entries


class BatchedLogprobs:
    """The same kept in columns, all rows of a step in a few numpy calls."""

    def __init__(self, num_rows: int, max_outputs: int, width: int) -> None:
        self._token_ids = np.zeros((num_rows, max_outputs, width), np.int32)
        self._values = np.zeros((num_rows, max_outputs, width), np.float32)
        self._ranks = np.zeros((num_rows, max_outputs), np.int32)
        self._num_outputs = np.zeros(num_rows, np.intp)
        self.cumulative = np.zeros(num_rows)

    def append(self, rows: Sequence[int], counts: Sequence[int], given: Logprobs) -> LogprobColumns:
        """Of the first `counts[i]` ids of each row, one row after the other."""
        owners, offsets = places_of(rows, counts)
        columns, places = _take(given, owners, offsets), self._num_outputs[owners] + offsets
        self._token_ids[owners, places] = columns.token_ids
        self._values[owners, places] = columns.values
        self._ranks[owners, places] = columns.ranks
        np.add.at(self.cumulative, owners, columns.values[:, 0])  # one after the other, in the order of the ids
        self._num_outputs[rows] += np.array(counts, np.intp)
        return columns
