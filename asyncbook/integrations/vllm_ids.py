"""What a step sampled where every row has exactly one id: vLLM's list of lists, whose lists are made when asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from sys import getrefcount
from typing import Any, overload

import numpy as np

from asyncbook.integrations.vllm_kernels import list_fetcher


class OneIdEach(Sequence[list[int]]):
    """Entry i is `[ids[i]]`, the same list at every look, since vLLM cuts what it is given.

    Equal to a list of such lists, and one in another process. `ids`: of each row; the same, int32, lie in `flat` from
    `start` on.
    """

    __slots__ = ("_flat", "_made", "_start", "ids")

    def __init__(self, ids: list[int], flat: np.ndarray, start: int) -> None:
        self.ids = ids
        self._flat = flat
        self._start = start
        self._made: dict[int, list[int]] = {}

    def column(self) -> np.ndarray:
        """The ids as int32 [n]."""
        return self._flat[self._start : self._start + len(self.ids)]

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...

    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self.ids)))]
        made = self._made.get(index)
        if made is None:
            place = range(len(self.ids))[index]  # from the end as well; an IndexError
            made = self._made.setdefault(place, [self.ids[place]])
        return made

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.__getitem__, range(len(self.ids)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, OneIdEach | list):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class ListPool:
    """Lists of one id each, for outputs. A list that nobody else holds any more is given out again: a thousand new ones
    a step start the garbage collector in every step, which costs more than all the rest."""

    def __init__(self) -> None:
        self._fetch = list_fetcher()
        self._lists: list[list[int]] = []
        (self._free_count,) = map(getrefcount, [[0]])  # what a list counts that only the list around it holds

    def take(self, ids: list[int]) -> list[list[int]]:
        """`[[id] for id in ids]`."""
        n = len(ids)
        lists, self._lists[:n] = self._lists[:n], []
        self._fetch(lists)
        counts, sizes = list(map(getrefcount, lists)), list(map(len, lists))
        if counts.count(self._free_count) + sizes.count(1) < 2 * len(lists):
            for i, (count, size) in enumerate(zip(counts, sizes, strict=True)):
                if count != self._free_count or size != 1:  # held, or cut by whoever had it
                    lists[i] = [0]
        lists += [[0] for _ in range(n - len(lists))]
        deque(map(list.__setitem__, lists, repeat(0), ids), maxlen=0)
        self._lists += lists
        return lists
