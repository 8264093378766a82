"""The sample ring: what each step sampled, in shared memory, one slot for each step in flight.

One producer, one consumer, no index to share: step s lies in slot s % num_ring_slots, and the runner submits it only
when step s - num_ring_slots is applied, so a slot is never overwritten before it was read. Two words publish a step.
`DESCRIBED` says that the runner submitted it; `ARRIVED` that its ids are there, which is later where a device brings
them. Both are the step's number, so the reader knows what it waits for and needs no reset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from asyncbook.ipc import wire
from asyncbook.ipc.layout import Layout, SlotWord, Word, narrow
from asyncbook.ipc.publish import Word as SharedWord
from asyncbook.ipc.publish import fence, load_acquire, store_release
from numba import njit, types

_DESCRIBED, _ARRIVED = int(SlotWord.DESCRIBED), int(SlotWord.ARRIVED)
_MESSAGE_SEQ, _BATCH_SLOT = int(SlotWord.MESSAGE_SEQ), int(SlotWord.BATCH_SLOT)
_WIDTH, _DRAFT_WIDTH = int(SlotWord.WIDTH), int(SlotWord.DRAFT_WIDTH)
_NO_DRAFTS = np.ndarray((0, 0), np.int32, b"")

_INT32 = types.int32[::1]
_IDS = types.Array(types.int32, 1, "C", readonly=True)
_INT = types.int64


# One compiled call for the whole of it: on a core whose caches a forward pass has emptied, each numpy operation costs
# microseconds.
@njit(
    (types.int64[::1], _INT32, _INT32, _IDS, _IDS, _INT, _INT, _INT, _INT, _INT, _INT, _INT),
    cache=True,
    nogil=True,
    _nrt=False,
)
def _write(
    header: Any,
    slot_ids: Any,
    slot_drafts: Any,
    ids: Any,
    drafts: Any,
    header_address: int,
    is_sleeping_address: int,
    step: int,
    seq: int,
    batch_slot: int,
    width: int,
    draft_width: int,
) -> int:
    for index in range(ids.shape[0]):
        slot_ids[index] = ids[index]
    # The bookkeeper reads the ids once it has seen ARRIVED, which this thread stores after them.
    store_release(header_address + 8 * _ARRIVED, step)
    for index in range(drafts.shape[0]):
        slot_drafts[index] = drafts[index]
    header[_MESSAGE_SEQ] = seq
    header[_BATCH_SLOT] = batch_slot
    header[_WIDTH] = width
    header[_DRAFT_WIDTH] = draft_width
    store_release(header_address + 8 * _DESCRIBED, step)
    # The step is stored, then the sleeper is looked for; the bookkeeper says that it sleeps, then looks for a step.
    # With a fence between the two on both sides, at least one of them sees the other: no step is slept over.
    fence()
    return load_acquire(is_sleeping_address)


class SampleRingWriter:
    """The runner's side. `runner_part` is writable memory of the RUNNER part, `words` the bookkeeper's, read-only."""

    def __init__(self, layout: Layout, runner_part: memoryview, words: np.ndarray) -> None:
        base = layout.runner_offset
        headers = list(layout.ring_headers.view(runner_part, base))
        token_ids = layout.ring_token_ids.view(runner_part, base)
        draft_token_ids = layout.ring_draft_token_ids.view(runner_part, base)
        # The arrays keep their memory alive for the addresses beside them.
        self._slots = [
            (header, token_ids[slot], draft_token_ids[slot], header.ctypes.data) for slot, header in enumerate(headers)
        ]
        self._words = words
        self._is_sleeping_address = words[Word.IS_SLEEPING :].ctypes.data

    def write(self, step: int, seq: int, batch_slot: int, sampled: np.ndarray, drafts: np.ndarray | None) -> bool:
        """Puts a step with its ids (int32 or int64, [n] or [n, width]) into the ring.

        Returns whether the bookkeeper sleeps and needs a doorbell.
        """
        header, slot_ids, slot_drafts, header_address = self._slots[step % len(self._slots)]
        if sampled.itemsize == 8:
            wide, sampled = sampled, np.empty(sampled.shape, np.int32)
            narrow(wide.reshape(-1), sampled.reshape(-1))
        if drafts is None:
            drafts = _NO_DRAFTS
        is_sleeping = _write(
            header,
            slot_ids,
            slot_drafts,
            _flat(sampled),
            _flat(drafts),
            header_address,
            self._is_sleeping_address,
            step,
            seq,
            batch_slot,
            sampled.shape[1] if sampled.ndim == 2 else 1,
            drafts.shape[1],
        )
        return is_sleeping != 0


def _flat(ids: np.ndarray) -> np.ndarray:
    """A read-only view [ids.size], the one type that `_write` is compiled for."""
    return np.ndarray(ids.size, np.int32, ids.data.toreadonly()) if ids.size else _NO_DRAFTS.reshape(-1)


class SampleRingReader:
    """The bookkeeper's side."""

    def __init__(self, layout: Layout, memory: memoryview) -> None:
        headers = layout.ring_headers.view(memory)
        self._headers = list(headers)
        self._token_ids = [ids.data.cast("B").toreadonly() for ids in layout.ring_token_ids.view(memory)]
        drafts = layout.ring_draft_token_ids.view(memory)
        self._draft_token_ids = [ids.data.cast("B").toreadonly() if ids.size else memoryview(b"") for ids in drafts]
        self._described = [SharedWord(header, SlotWord.DESCRIBED) for header in headers]
        self._arrived = [SharedWord(header, SlotWord.ARRIVED) for header in headers]
        self._num_slots = layout.num_ring_slots

    def is_submitted(self, step: int) -> bool:
        """Whether the runner has submitted the step; its ids may still be on their way."""
        return self._described[step % self._num_slots].load_acquire() == step

    def has_arrived(self, step: int) -> bool:
        """Whether the ids of a submitted step are in its slot."""
        return self._arrived[step % self._num_slots].load_acquire() == step

    def message_seq(self, step: int) -> int:
        """Where a submitted step stands in the order of messages."""
        return int(self._headers[step % self._num_slots][_MESSAGE_SEQ])

    def message(self, step: int, num_rows: int) -> wire.Step:
        """An arrived step of `num_rows` rows as the message it stands for. Its ids are the slot's own memory, good
        until the step is published as applied."""
        slot = step % self._num_slots
        _, seq, batch_slot, width, draft_width = self._headers[slot][: _DRAFT_WIDTH + 1].tolist()
        return wire.Step(
            seq,
            step,
            batch_slot,
            width,
            False,
            self._token_ids[slot][: 4 * num_rows * width],
            draft_width,
            self._draft_token_ids[slot][: 4 * num_rows * draft_width] if draft_width else None,
        )

    def batch_slot(self, step: int) -> int:
        """The batch of a submitted step."""
        return int(self._headers[step % self._num_slots][_BATCH_SLOT])
