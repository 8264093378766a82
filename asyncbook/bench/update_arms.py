"""The arms of `asyncbook bench updates`: the same work done in several ways, each on arrays of its own.

The loops and the batched variants are our own words for what engines do; where they could be written faster or slower,
they are written faster (arrays in local names, lists ready). The first arm of each work is what the others are
compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from asyncbook.bench.update_cells import MAX_MODEL_LEN, Cell, State, Step
from asyncbook.worker.scatter import append_spans, assign_spans, scatter_columns

LOOP, LISTS, NUMPY = "loop", "lists (PR)", "numpy"
SCATTER, SCATTER_TWO = "scatter_columns", "scatter_columns (2 arrays)"
APPEND, ASSIGN, LEDGER = "append_spans", "assign_spans", "whole step (ledger)"
OPERATOR, INDEX_PUT = "fill_spans_", "index_put_"
VLLM, WHOLE_LOOP = "vLLM", "loop, all of it"
FUSED = (SCATTER, SCATTER_TWO, APPEND, ASSIGN)  # what is never to be slower than the loop

Run = Callable[[Step], None]


class HasArrays(Protocol):
    """What an arm changes."""

    def rewind(self) -> None: ...

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]: ...


@dataclass(frozen=True)
class Arm:
    """`run(step)` is what is timed."""

    name: str
    state: HasArrays
    run: Run


# The two 1-D arrays alone. What is written is known.


def columns_loop(state: State) -> Run:
    num_tokens_no_spec, num_tokens = state.num_tokens_no_spec, state.num_tokens

    def run(step: Step) -> None:
        for row, end in zip(step.row_list, step.end_list, strict=False):
            num_tokens_no_spec[row] = end
            num_tokens[row] = end

    return run


def columns_lists(state: State) -> Run:
    num_tokens_no_spec, num_tokens = state.num_tokens_no_spec, state.num_tokens

    def run(step: Step) -> None:
        rows, ends = [], []
        for row, end in zip(step.row_list, step.end_list, strict=False):
            rows.append(row)
            ends.append(end)
        num_tokens_no_spec[rows] = ends
        num_tokens[rows] = ends

    return run


def columns_numpy(state: State) -> Run:
    num_tokens_no_spec, num_tokens = state.num_tokens_no_spec, state.num_tokens

    def run(step: Step) -> None:
        num_tokens_no_spec[step.rows] = step.ends
        num_tokens[step.rows] = step.ends

    return run


def columns_scatter(state: State) -> Run:
    columns = state.columns

    def run(step: Step) -> None:
        scatter_columns(columns, step.rows, step.ends)

    return run


def columns_scatter_two(state: State) -> Run:
    num_tokens_no_spec, num_tokens = state.num_tokens_no_spec, state.num_tokens

    def run(step: Step) -> None:
        scatter_columns((num_tokens_no_spec, num_tokens), step.rows, step.ends)

    return run


# The columns and token_ids; with `masked`, is_token_ids as well. Where a row ends is read from its column.


def tokens_loop(state: State, masked: bool) -> Run:
    token_ids, is_token_ids = state.token_ids, state.is_token_ids
    num_tokens_no_spec, num_tokens = state.num_tokens_no_spec, state.num_tokens

    def run(step: Step) -> None:
        for row, ids in zip(step.row_list, step.id_lists, strict=False):
            if not ids:
                continue
            start = num_tokens_no_spec[row]
            end = start + len(ids)
            assert end <= MAX_MODEL_LEN
            token_ids[row, start:end] = ids
            if masked:
                is_token_ids[row, start:end] = True
            num_tokens_no_spec[row] = end
            num_tokens[row] = end

    return run


def tokens_lists(state: State, masked: bool) -> Run:
    token_ids, is_token_ids = state.token_ids, state.is_token_ids
    num_tokens_no_spec, num_tokens = state.num_tokens_no_spec, state.num_tokens

    def run(step: Step) -> None:
        rows, ends = [], []
        for row, ids in zip(step.row_list, step.id_lists, strict=False):
            if not ids:
                continue
            start = num_tokens_no_spec[row]
            end = start + len(ids)
            assert end <= MAX_MODEL_LEN
            token_ids[row, start:end] = ids
            if masked:
                is_token_ids[row, start:end] = True
            rows.append(row)
            ends.append(end)
        num_tokens_no_spec[rows] = ends
        num_tokens[rows] = ends

    return run


def tokens_numpy(state: State, masked: bool) -> Run:
    token_ids, is_token_ids = state.token_ids, state.is_token_ids
    num_tokens_no_spec, num_tokens = state.num_tokens_no_spec, state.num_tokens

    def run(step: Step) -> None:
        rows, sampled = step.rows, step.sampled
        starts = num_tokens_no_spec[rows]
        if sampled.shape[1] == 1:
            ends = starts + 1
            places = (rows, starts)
            ids = sampled[:, 0]
        else:
            is_id = sampled >= 0
            lengths = is_id.sum(1)
            ends = starts + lengths
            places = (np.repeat(rows, lengths), (starts[:, None] + np.arange(sampled.shape[1]))[is_id])
            ids = sampled[is_id]
        assert ends.max() <= MAX_MODEL_LEN
        token_ids[places] = ids
        if masked:
            is_token_ids[places] = True
        num_tokens_no_spec[rows] = ends
        num_tokens[rows] = ends

    return run


def tokens_append(state: State, masked: bool) -> Run:
    token_ids, is_token_ids = state.token_ids, state.is_token_ids if masked else None
    num_tokens_no_spec, num_tokens = state.num_tokens_no_spec, state.num_tokens

    def run(step: Step) -> None:
        append_spans(token_ids, is_token_ids, num_tokens, num_tokens_no_spec, step.rows, step.sampled)

    return run


# The mask alone


def mask_loop(state: State) -> Run:
    is_token_ids = state.is_token_ids

    def run(step: Step) -> None:
        for row, start, end in zip(step.row_list, step.start_list, step.end_list, strict=False):
            is_token_ids[row, start:end] = True

    return run


def mask_lists(state: State) -> Run:
    is_token_ids = state.is_token_ids

    def run(step: Step) -> None:
        rows: list[int] = []
        positions: list[int] = []
        for row, start, end in zip(step.row_list, step.start_list, step.end_list, strict=False):
            rows += [row] * (end - start)
            positions += range(start, end)
        is_token_ids[rows, positions] = True

    return run


def mask_numpy(state: State) -> Run:
    is_token_ids = state.is_token_ids

    def run(step: Step) -> None:
        lengths = step.lengths
        before = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) + np.repeat(step.starts - before, lengths)
        is_token_ids[np.repeat(step.rows, lengths), positions] = True

    return run


def mask_assign(state: State) -> Run:
    is_token_ids = state.is_token_ids

    def run(step: Step) -> None:
        assign_spans(is_token_ids, step.rows, step.starts, step.lengths, True)

    return run


# The mask as a torch tensor


def tensor_loop(state: State) -> Run:
    import torch

    is_token_ids = torch.from_numpy(state.is_token_ids)

    def run(step: Step) -> None:
        for row, start, end in zip(step.row_list, step.start_list, step.end_list, strict=False):
            is_token_ids[row, start:end] = True

    return run


def tensor_index_put(state: State) -> Run:
    import torch

    is_token_ids, true = torch.from_numpy(state.is_token_ids), torch.tensor(True)

    def run(step: Step) -> None:
        rows, starts, lengths = step.tensors
        before = lengths.cumsum(0) - lengths
        rows = torch.repeat_interleave(rows, lengths)
        positions = torch.repeat_interleave(starts - before, lengths) + torch.arange(rows.numel())
        is_token_ids.index_put_((rows, positions), true)

    return run


def tensor_operator(state: State) -> Run:
    import torch

    from asyncbook import device  # noqa: F401 (makes the operators)

    is_token_ids, fill_spans_ = torch.from_numpy(state.is_token_ids), torch.ops.asyncbook.fill_spans_

    def run(step: Step) -> None:
        rows, starts, lengths = step.tensors
        fill_spans_(is_token_ids, rows, starts, lengths, True)

    return run


_COLUMNS = {
    LOOP: columns_loop, LISTS: columns_lists, NUMPY: columns_numpy, SCATTER: columns_scatter,
    SCATTER_TWO: columns_scatter_two,
}  # fmt: skip
_TOKENS = {LOOP: tokens_loop, LISTS: tokens_lists, NUMPY: tokens_numpy, APPEND: tokens_append}
_MASK = {LOOP: mask_loop, LISTS: mask_lists, NUMPY: mask_numpy, ASSIGN: mask_assign}
_TENSOR = {LOOP: tensor_loop, INDEX_PUT: tensor_index_put, OPERATOR: tensor_operator}


def make_arms(cell: Cell, prompt_lengths: np.ndarray, steps: list[Step]) -> list[Arm]:
    """Every arm of the cell's work, on arrays of its own."""
    arms = []
    if cell.work in ("tokens", "step"):
        for name, make_tokens in _TOKENS.items():
            state = State(prompt_lengths)
            arms.append(Arm(name, state, make_tokens(state, cell.work == "step")))
    else:
        for name, make in {"columns": _COLUMNS, "mask": _MASK, "tensor": _TENSOR}[cell.work].items():
            state = State(prompt_lengths)
            arms.append(Arm(name, state, make(state)))
    if cell.work == "step":
        from asyncbook.bench.update_ledger import LedgerState

        ledger = LedgerState(prompt_lengths, steps[0].rows)
        arms.append(Arm(LEDGER, ledger, ledger.run))
    return arms
