"""The runner's kernels: a step's ids on their way out, each in one compiled call.

A forward pass empties the caches of the core that launches it. After that every numpy operation costs microseconds,
however little it does, and a call into code that is already compiled for the array as it is costs one time that.
"""

from __future__ import annotations

from numba import types

from asyncbook.ipc.jit import kernel, rule
from asyncbook.ipc.layout import INT32_MAX, INT32_MIN, SlotWord
from asyncbook.ipc.publish import fence, load_acquire, store_release

_DESCRIBED, _ARRIVED = int(SlotWord.DESCRIBED), int(SlotWord.ARRIVED)
_MESSAGE_SEQ, _BATCH_SLOT = int(SlotWord.MESSAGE_SEQ), int(SlotWord.BATCH_SLOT)
_WIDTH, _DRAFT_WIDTH = int(SlotWord.WIDTH), int(SlotWord.DRAFT_WIDTH)
_LOGPROBS_WIDTH = int(SlotWord.LOGPROBS_WIDTH)
_WORD_BYTES = 8

_INT = types.int64
_TARGET = types.int32[::1]
_IDS = (types.int32[::1], types.int64[::1], types.int32[:, ::1], types.int64[:, ::1])
WRONG_SHAPE = 0  # in the place of a width


@rule
def _copy(ids, num_rows, max_width, target):
    """The ids as int32 into `target`, row after row; what is no int32 becomes the least one. Returns the width."""
    width = ids.shape[-1] if ids.ndim == 2 else 1
    if ids.shape[0] != num_rows or not 0 < width <= max_width:
        return WRONG_SHAPE
    flat = ids.reshape(ids.size)
    for i in range(ids.size):
        target[i] = flat[i] if INT32_MIN <= flat[i] <= INT32_MAX else INT32_MIN
    return width


@rule
def _describe(header, header_address, is_sleeping_address, step, seq, batch_slot, width, draft_width,
              logprobs_width):  # fmt: skip
    """The second half of a step in the ring. Returns -1 where the bookkeeper sleeps, else the width."""
    header[_MESSAGE_SEQ] = seq
    header[_BATCH_SLOT] = batch_slot
    header[_WIDTH] = width
    header[_DRAFT_WIDTH] = draft_width
    header[_LOGPROBS_WIDTH] = logprobs_width
    store_release(header_address + _WORD_BYTES * _DESCRIBED, step)
    # The step is stored, then the sleeper is looked for; the bookkeeper says that it sleeps, then looks for a step.
    # With a fence between the two on both sides, at least one of them sees the other: no step is slept over.
    fence()
    return -1 if load_acquire(is_sleeping_address) != 0 else width


@kernel(*((ids, _INT, _INT, _TARGET) for ids in _IDS))
def stage(ids, num_rows, max_width, target):
    """Copies ids [num_rows] or [num_rows, width] into `target`; returns the width, `WRONG_SHAPE` for another shape."""
    return _copy(ids, num_rows, max_width, target)


@kernel(*((ids, _INT, _INT, _TARGET, types.int64[::1], *(_INT,) * 7) for ids in _IDS))
def fill_slot(ids, num_rows, max_width, target, header, header_address, is_sleeping_address, step, seq, batch_slot,
              draft_width, logprobs_width):  # fmt: skip
    """Fills a slot of the sample ring and publishes it. Returns -1 where the bookkeeper sleeps, else the width,
    `WRONG_SHAPE` with nothing published. The drafts and logprobs are in the slot already."""
    width = _copy(ids, num_rows, max_width, target)
    if width == WRONG_SHAPE:
        return WRONG_SHAPE
    # The bookkeeper reads the ids once it has seen ARRIVED, which this thread stores after them.
    store_release(header_address + _WORD_BYTES * _ARRIVED, step)
    return _describe(
        header, header_address, is_sleeping_address, step, seq, batch_slot, width, draft_width, logprobs_width
    )


@kernel((types.int64[::1], _INT, _INT, _INT, _INT, _INT, _INT, _INT))
def describe_slot(header, header_address, is_sleeping_address, step, seq, batch_slot, width, draft_width):
    """Publishes a step whose ids a device brings, now or later, and after them ARRIVED. It has no logprobs. Returns as
    `fill_slot`."""
    return _describe(header, header_address, is_sleeping_address, step, seq, batch_slot, width, draft_width, 0)
