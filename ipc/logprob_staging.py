"""The runner's kernel for a step's logprobs: on their way out in one compiled call, as `ipc/staging.py` does with ids.

Of what a sampler gives for the whole batch, only what each row's request asks for is copied, so a neighbour that wants
many logprobs costs those that want none nothing, and nobody can get a neighbour's number of them.
"""

from __future__ import annotations

from numba import types

from asyncbook.ipc.jit import kernel, rule
from asyncbook.ipc.layout import INT32_MAX, INT32_MIN

_INT = types.int64
_SHAPES = ((2, 1), (3, 2))  # dimensions of ids and logprobs, and of ranks
_INTS = (types.int32, types.int64)
WRONG_SHAPE = -1  # in the place of a size


def _arrays(dimensions: int, element: types.Type) -> types.Array:
    return types.Array(element, dimensions, "C")


_WIDTHS = types.Array(types.int32, 1, "C", readonly=True)
_SIGNATURES = [
    (_arrays(dimensions, ids), _arrays(dimensions, types.float32), _arrays(rank_dimensions, ranks), _INT, _INT, _INT,
     _WIDTHS, types.int32[::1], types.float32[::1])
    for dimensions, rank_dimensions in _SHAPES
    for ids in _INTS
    for ranks in _INTS
]  # fmt: skip


@rule
def _narrow(value):
    """As int32; the least one for what is none."""
    return value if INT32_MIN <= value <= INT32_MAX else INT32_MIN


@kernel(*_SIGNATURES)
def stage_logprobs(token_ids, logprobs, ranks, num_rows, num_ids, most, widths, target, target_values):
    """Writes an entry of `min(widths[i], given)` logprobs for each of the `num_ids` ids of each row i that wants any
    (`widths[i]` > 0), and returns the size in int32 values, or `WRONG_SHAPE` with nothing written.

    `token_ids` int32 or int64 and `logprobs` float32 [num_rows, num_ids, given], or [num_rows, given] with one id a
    row; given is from 1 to `most`; `ranks` int32 or int64, the same without the last dimension. `target_values` float32
    is the same memory as `target` int32."""
    given = token_ids.shape[-1]
    if logprobs.shape != token_ids.shape or ranks.shape != token_ids.shape[:-1] or token_ids.shape[0] != num_rows:
        return WRONG_SHAPE
    if not 1 <= given <= most or ranks.size != num_rows * num_ids or (ranks.ndim == 2 and ranks.shape[1] != num_ids):
        return WRONG_SHAPE
    flat_ids = token_ids.reshape(token_ids.size)
    flat_logprobs = logprobs.reshape(logprobs.size)
    flat_ranks = ranks.reshape(ranks.size)
    at = 0
    for i in range(num_rows):
        width = min(widths[i], given)
        if width <= 0:
            continue
        for index in range(i * num_ids, (i + 1) * num_ids):
            target[at] = _narrow(flat_ranks[index])
            for j in range(width):
                target[at + 1 + j] = _narrow(flat_ids[index * given + j])
                target_values[at + 1 + width + j] = flat_logprobs[index * given + j]
            at += 1 + 2 * width
    return at
