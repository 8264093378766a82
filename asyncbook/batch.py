"""Who takes part in a step. Made once, reused while the batch stays the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from asyncbook.ipc.errors import InvalidBatch
from asyncbook.ipc.layout import INT32_MAX
from asyncbook.ipc.wire import DEFAULT_SCHEDULED, NUM_BATCH_SLOTS, BatchField
from asyncbook.rows import Row, RowRegistry


class Batch:
    """Rows in the order of what is sampled for them. `fields`: int32 [5, n] as it crosses to the bookkeeper."""

    __slots__ = ("fields", "logprobs_widths", "registry", "rows", "slot")

    def __init__(self, registry: RowRegistry, rows: tuple[Row, ...], fields: np.ndarray) -> None:
        self.registry = registry
        self.rows = rows
        self.fields = fields
        self.logprobs_widths = fields[BatchField.LOGPROBS_WIDTH]
        self.slot = -1

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Batch({len(self.rows)} rows)"


def _counts(name: str, values: Any, num_rows: int, least: np.ndarray | int, most: int) -> np.ndarray:
    try:
        counts = np.asarray(values)
    except ValueError:
        counts = np.empty(0, object)
    if counts.shape != (num_rows,) or (num_rows and counts.dtype.kind not in "iu"):
        raise InvalidBatch(f"{name} is {counts.dtype} {list(counts.shape)}, expected int [{num_rows}]")
    bad = np.flatnonzero((counts < least) | (counts > most))
    if bad.size:
        i = int(bad[0])
        lowest = least if isinstance(least, int) else int(least[i])
        raise InvalidBatch(f"{name}[{i}] is {counts[i]}, expected {lowest} to {most}")
    return counts.astype(np.int32)


def make_batch(
    registry: RowRegistry,
    rows: Iterable[Row],
    num_scheduled_tokens: Sequence[int] | np.ndarray | None,
    num_draft_tokens: Sequence[int] | np.ndarray | None,
    num_spec_tokens: int,
) -> Batch:
    """Raises `StaleRow` or `InvalidBatch`."""
    rows = tuple(rows)
    n = len(rows)
    seen: dict[int, int] = {}
    logprobs_widths = []
    for i, row in enumerate(rows):
        logprobs_widths.append(registry.held(row).logprobs_width)
        if row.index in seen:
            raise InvalidBatch(f"row {row.index} is named twice, at {seen[row.index]} and {i}")
        seen[row.index] = i
    fields = np.zeros((BatchField.COUNT, n), np.int32)
    fields[BatchField.ROW] = [row.index for row in rows]
    fields[BatchField.GENERATION] = np.array([row.generation for row in rows], np.uint32).view(np.int32)
    fields[BatchField.NUM_SCHEDULED_TOKENS] = DEFAULT_SCHEDULED
    fields[BatchField.LOGPROBS_WIDTH] = logprobs_widths
    if num_draft_tokens is not None:
        drafts = _counts("num_draft_tokens", num_draft_tokens, n, 0, num_spec_tokens)
        fields[BatchField.NUM_DRAFT_TOKENS] = drafts
    if num_scheduled_tokens is not None:
        least = np.maximum(fields[BatchField.NUM_DRAFT_TOKENS], 1)
        scheduled = _counts("num_scheduled_tokens", num_scheduled_tokens, n, least, INT32_MAX)
        fields[BatchField.NUM_SCHEDULED_TOKENS] = scheduled
    fields.flags.writeable = False
    return Batch(registry, rows, fields)


class BatchSlots:
    """Which batches the bookkeeper remembers. It has `NUM_BATCH_SLOTS` slots, given out in a ring; a batch that lost
    its slot is described again, so nothing is kept for a batch that nobody uses any more."""

    def __init__(self) -> None:
        self._batches: list[Batch | None] = [None] * NUM_BATCH_SLOTS
        self._next_slot = 0

    def is_known(self, batch: Batch) -> bool:
        return batch.slot >= 0 and self._batches[batch.slot] is batch

    @property
    def next_slot(self) -> int:
        """Where `remember` will put a batch."""
        return self._next_slot

    @property
    def known_batches(self) -> list[Batch | None]:
        """By slot."""
        return self._batches

    def remember(self, batch: Batch) -> None:
        batch.slot = self._next_slot
        self._batches[batch.slot] = batch
        self._next_slot = (self._next_slot + 1) % NUM_BATCH_SLOTS


_ID_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


def check_ids(name: str, ids: Any, num_rows: int, most_width: int) -> np.ndarray:
    """Ids as the kernels take them: C-contiguous, aligned and writable, int32 or int64, [num_rows] or
    [num_rows, width]. Raises `InvalidBatch`."""
    if type(ids) is not np.ndarray:
        ids = _as_numpy(name, ids)
    if ids.dtype not in _ID_DTYPES:
        raise InvalidBatch(f"{name} is {ids.dtype}, expected int32 or int64")
    shape = ids.shape
    if not (len(shape) == 1 or (len(shape) == 2 and 1 <= shape[1] <= most_width)) or shape[0] != num_rows:
        expected = f"[{num_rows}] or [{num_rows}, 1 to {most_width}]"
        raise InvalidBatch(f"{name} has shape {list(shape)}, expected {expected} for a batch of {num_rows} rows")
    return ids if ids.flags.carray else np.array(ids, order="C")


def _as_numpy(name: str, ids: Any) -> np.ndarray:
    if isinstance(ids, np.ndarray):  # a subclass
        return np.asarray(ids)
    if type(ids).__module__.partition(".")[0] == "torch":
        from asyncbook import device

        return device.host_array(name, ids)
    raise InvalidBatch(f"{name} is a {type(ids).__name__}, expected a numpy array or a torch tensor")
