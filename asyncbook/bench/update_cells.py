"""What `asyncbook bench updates` gives its arms: cells, the arrays of a persistent batch, and steps to apply to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

WORKS = ("columns", "tokens", "mask", "tensor", "step")
SHARES = ("one", "1%", "10%", "50%", "all")
ID_COUNTS = ("1", "6", "1..6")
MAX_IDS = 6
MAX_MODEL_LEN = 2048
VOCAB_SIZE = 32_000
NUM_STEPS = 4  # different steps that a cell goes through again and again


@dataclass(frozen=True)
class Cell:
    """One measurement: `work` on a batch of `size` rows of which `num_rows` change, `ids` new ids each."""

    work: str
    size: int
    share: str
    num_rows: int
    ids: str

    def __str__(self) -> str:
        rows = f"{self.num_rows} of {self.size} rows"
        ids = "1 id" if self.ids == "1" else f"{self.ids} ids"
        return f"{self.work}: {rows}" if self.work == "columns" else f"{self.work}: {rows}, {ids} each"


def make_cells(works: Sequence[str], sizes: Sequence[int], shares: Sequence[str], ids: Sequence[str]) -> list[Cell]:
    """All of them, but for those that would say the same: 1% of 10 rows is one row."""
    cells: dict[tuple[str, int, int, str], Cell] = {}
    for work in works:
        for size in sizes:
            for share in shares:
                num_rows = {"one": 1, "all": size}.get(share) or -(-size * int(share.rstrip("%")) // 100)
                for count in ids[:1] if work == "columns" else ids:
                    cells.setdefault((work, size, num_rows, count), Cell(work, size, share, num_rows, count))
    return list(cells.values())


@dataclass(frozen=True)
class Step:
    """What changes, in the forms in which arms take it; none of them pays for the form.

    `rows` int64 [n]; `sampled` int32 [n, w], padded with -1; `lengths`, `starts` int64 [n], the spans of work that does
    not read the columns; `ends` int32 [n]. `*_list` are Python's, `id_lists` without padding.
    """

    rows: np.ndarray
    sampled: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    row_list: list[int]
    id_lists: list[list[int]]
    start_list: list[int]
    end_list: list[int]

    @cached_property
    def tensors(self) -> tuple[Any, Any, Any]:
        """`rows`, `starts`, `lengths` as torch tensors."""
        import torch

        return torch.from_numpy(self.rows), torch.from_numpy(self.starts), torch.from_numpy(self.lengths)


def make_steps(cell: Cell, rng: np.random.Generator, shuffled: bool) -> list[Step]:
    """Steps of the same rows, with new ids and places each."""
    rows = rng.choice(cell.size, cell.num_rows, replace=False)
    if not shuffled:
        rows.sort()
    return [_make_step(cell, rows, rng) for _ in range(NUM_STEPS)]


def _make_step(cell: Cell, rows: np.ndarray, rng: np.random.Generator) -> Step:
    n = cell.num_rows
    lengths = rng.integers(1, MAX_IDS + 1, n) if cell.ids == "1..6" else np.full(n, int(cell.ids))
    width = MAX_IDS if cell.ids == "1..6" else int(cell.ids)
    sampled = rng.integers(0, VOCAB_SIZE, (n, width), np.int32)
    sampled[np.arange(width) >= lengths[:, None]] = -1
    starts = rng.integers(0, MAX_MODEL_LEN - MAX_IDS, n)
    ends = (starts + lengths).astype(np.int32)
    id_lists = [ids[:length] for ids, length in zip(sampled.tolist(), lengths.tolist(), strict=True)]
    return Step(rows, sampled, starts, lengths, ends, rows.tolist(), id_lists, starts.tolist(), ends.tolist())


class State:
    """The arrays of a persistent batch, as an arm changes them. `columns` int32 [2, R]: `num_tokens_no_spec` and
    `num_tokens`; `token_ids` int32, `is_token_ids` bool [R, MAX_MODEL_LEN]. Rows start with prompts of zeros."""

    def __init__(self, prompt_lengths: np.ndarray) -> None:
        size = prompt_lengths.size
        self.prompt_lengths = prompt_lengths
        self.columns = np.empty((2, size), np.int32)
        self.num_tokens_no_spec, self.num_tokens = self.columns
        self.token_ids = np.zeros((size, MAX_MODEL_LEN), np.int32)
        self.is_token_ids = np.arange(MAX_MODEL_LEN) < prompt_lengths[:, None]
        self.rewind()

    def rewind(self) -> None:
        """Back to the prompts; what lies behind them is written over."""
        self.columns[:] = self.prompt_lengths

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """What arms must agree on."""
        yield "num_tokens_no_spec", self.num_tokens_no_spec
        yield "num_tokens", self.num_tokens
        yield "token_ids", self.token_ids
        yield "is_token_ids", self.is_token_ids


def make_prompt_lengths(size: int, rng: np.random.Generator) -> np.ndarray:
    """int32 [size]. No two neighbours alike, as in a real batch: equal places would fall on the same cache lines."""
    return rng.integers(16, MAX_MODEL_LEN // 2, size, np.int32)
