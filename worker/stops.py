"""Stop strings of the rows, ready to be looked for byte by byte (Knuth, Morris and Pratt; see `text_kernels.py`).

For each stop string of a row `progress` says how many of its bytes the text ends with: what still can become it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class StopTable:
    """Stop strings of R rows. String j of a row is `stop_bytes[row, ends[row, j] : ends[row, j + 1]]`, UTF-8; the
    longest border (proper prefix that is a suffix, too) of its first k bytes is `borders[row, ends[row, j] + k - 1]`.

    `stop_bytes` uint8 and `borders` int32 [R, S], `ends` int32 [R, N + 1], `progress` int32 [R, N]. S and N grow with
    what requests bring, for all rows: they are the most that any row had.
    """

    def __init__(self, num_rows: int) -> None:
        self.stop_bytes = np.zeros((num_rows, 32), np.uint8)
        self.borders = np.zeros((num_rows, 32), np.int32)
        self.ends = np.zeros((num_rows, 5), np.int32)
        self.progress = np.zeros((num_rows, 4), np.int32)

    def set(self, row: int, stop: Sequence[str]) -> None:
        """The row's stop strings from here on, none of them begun. Raises `ValueError` for one that is empty or is no
        Unicode text."""
        encoded = [encode_stop(string) for string in stop]
        ends = np.cumsum([0, *map(len, encoded)])
        self._make_room(int(ends[-1]), len(encoded))
        self.ends[row, : ends.size] = ends
        self.progress[row] = 0
        self.stop_bytes[row, : ends[-1]] = np.frombuffer(b"".join(encoded), np.uint8)
        self.borders[row, : ends[-1]] = [border for string in encoded for border in border_lengths(string)]

    def _make_room(self, num_bytes: int, num_strings: int) -> None:
        self.stop_bytes = _widened(self.stop_bytes, num_bytes)
        self.borders = _widened(self.borders, num_bytes)
        self.ends = _widened(self.ends, num_strings + 1)
        self.progress = _widened(self.progress, num_strings)


def encode_stop(string: str) -> bytes:
    """A stop string as UTF-8. Raises `ValueError` for one that is empty, or holds half a surrogate pair."""
    if not string:
        raise ValueError("a stop string is empty, expected at least one character")
    return string.encode()


def border_lengths(string: bytes) -> list[int]:
    """For each k from 1: the length of the longest proper prefix of `string[:k]` that it ends with as well."""
    borders = [0] * len(string)
    border = 0
    for position in range(1, len(string)):
        while border and string[border] != string[position]:
            border = borders[border - 1]
        if string[border] == string[position]:
            border += 1
        borders[position] = border
    return borders


def _widened(array: np.ndarray, width: int) -> np.ndarray:
    if width <= array.shape[1]:
        return array
    wider = np.zeros((array.shape[0], 2 * width), array.dtype)
    wider[:, : array.shape[1]] = array
    return wider
