"""A frame as tensors: one block of memory, one view a column."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from asyncbook.ipc.layout import COLUMN_DTYPES, FINISH_REASON_COLUMN, NUM_INT32_COLUMNS, Column, Layout

_TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.uint32): torch.uint32, np.dtype(np.uint8): torch.uint8}


def tensor_at(memory: memoryview | np.ndarray, offset: int, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] over memory as it is mapped, without a copy; it keeps the mapping alive.

    Torch knows no read-only tensors and warns of arrays that are. Here it is given the bare address: reading needs
    nothing else, and a write into read-only pages is stopped by the processor (SIGSEGV), never taken.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    array = np.frombuffer(memory, np.uint8)
    assert offset + num_bytes <= array.nbytes
    block: Any = (ctypes.c_uint8 * num_bytes).from_address(array.ctypes.data + offset)
    block.memory = array  # torch keeps the block, and the block what it lies in
    return torch.frombuffer(block, dtype=torch.uint8)


class TensorColumns(Mapping[str, torch.Tensor]):
    """Every column of a frame as a tensor [max_num_reqs], by name: `columns.num_tokens` or `columns["num_tokens"]`.

    dtypes as in a frame: int32, `generation` uint32, `finish_reason` uint8. `block` uint8 [frame_bytes] is all of them.
    """

    def __init__(self, layout: Layout, block: torch.Tensor) -> None:
        self.block = block
        self._layout = layout
        self._columns: dict[str, torch.Tensor] = {}  # those that somebody asked for: ten views take 100 us

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("_"):  # asked by copy and pickle before there is anything
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a frame has no column {name!r}") from None

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._columns:
            dtype, layout = _TORCH_DTYPES[COLUMN_DTYPES[name]], self._layout
            index = NUM_INT32_COLUMNS if name == FINISH_REASON_COLUMN else Column[name.upper()]
            start = 4 * index * layout.padded_rows
            self._columns[name] = self.block[start : start + dtype.itemsize * layout.max_num_reqs].view(dtype)
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COLUMN_DTYPES)

    def __len__(self) -> int:
        return len(COLUMN_DTYPES)

    def clone(self) -> TensorColumns:
        """A copy in memory of its own, on the same device."""
        return TensorColumns(self._layout, self.block.clone())
