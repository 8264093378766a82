"""Logprobs that come with a step: what `Book.submit` takes, and their way into memory that is ready to be sent."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from asyncbook.batch import Batch
from asyncbook.ipc.errors import InvalidBatch
from asyncbook.ipc.logprob_staging import WRONG_SHAPE, stage_logprobs

_INTS = (np.dtype(np.int32), np.dtype(np.int64))
_FLOATS = (np.dtype(np.float32),)


class Logprobs(NamedTuple):
    """A sampler's logprobs of one step, numpy or torch (CPU); `given` of them for each id that was sampled.

    `logprob_token_ids` int32 or int64 and `logprobs` float32, [n, given] or [n, W, given] for ids [n] or [n, W]: first
    the sampled id, then the top ids, best first; `given` is from 1 to `1 + max_logprobs`. `sampled_token_ranks` int32
    or int64 [n] or [n, W]: the sampled id's place in the vocabulary, from 1. What stands behind an id that is padding
    is not looked at.

    vLLM's `LogprobsLists` and `LogprobsTensors` have these names, too, and `submit` takes them (any object with these
    attributes; `selected_token_ranks` is read where there is no `sampled_token_ranks`). With `cu_num_generated_tokens`
    [n] or [n + 1], ascending, row i of the batch has the rows from `cu_num_generated_tokens[i]` on of arrays
    [total, given] and [total].
    """

    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any


class LogprobsArea:
    """Room for the entries of one step (`ipc/logprobs.py`): int32, and the same memory as float32."""

    def __init__(self, entries: np.ndarray) -> None:
        self.entries = entries
        self._values = entries.view(np.float32)

    def put(self, logprobs: Any, batch: Batch, num_ids: int, most: int) -> tuple[int, int]:
        """Writes entries for the rows of the batch that want logprobs, `num_ids` each; (logprobs an id, int32 values),
        (0, 0) where no row wants any. `most` logprobs an id at most. Raises `InvalidBatch`, with nothing written."""
        n, widths = len(batch.rows), batch.logprobs_widths
        arrays = tuple(logprobs) if type(logprobs) is Logprobs else ()
        size = self._stage(arrays, n, num_ids, most, widths) if arrays else WRONG_SHAPE
        if size == WRONG_SHAPE:
            # This says what is wrong with them, or mends it.
            arrays = check_logprobs(logprobs, n, num_ids, most)
            size = self._stage(arrays, n, num_ids, most, widths)
        return (arrays[0].shape[-1] if size else 0), size

    def _stage(self, arrays: tuple[Any, ...], n: int, num_ids: int, most: int, widths: np.ndarray) -> int:
        try:
            size: int = stage_logprobs(*arrays, n, num_ids, most, widths, self.entries, self._values)
        except TypeError:
            return WRONG_SHAPE
        return size


def check_logprobs(logprobs: Any, n: int, num_ids: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As the kernel takes them: C-contiguous [n, num_ids, given] and [n, num_ids]. Raises `InvalidBatch`."""
    try:
        token_ids, values = logprobs.logprob_token_ids, logprobs.logprobs
        ranks = getattr(logprobs, "sampled_token_ranks", None)
        ranks = logprobs.selected_token_ranks if ranks is None else ranks
    except AttributeError as error:
        raise InvalidBatch(
            f"logprobs is a {type(logprobs).__name__}, expected an asyncbook.Logprobs: {error}"
        ) from None
    token_ids = _array("logprobs.logprob_token_ids", token_ids, _INTS)
    values = _array("logprobs.logprobs", values, _FLOATS)
    ranks = _array("logprobs.sampled_token_ranks", ranks, _INTS)
    starts = getattr(logprobs, "cu_num_generated_tokens", None)
    if starts is not None:
        token_ids, values, ranks = _rows_from(token_ids, values, ranks, starts, n, num_ids)
    given = token_ids.shape[-1] if token_ids.ndim else 0
    if not 1 <= given <= most:
        raise InvalidBatch(
            f"logprobs.logprob_token_ids has shape {list(token_ids.shape)}, expected 1 to {most} = 1 + max_logprobs "
            f"in the last place"
        )
    for name, array, last in (("logprob_token_ids", token_ids, [given]), ("logprobs", values, [given]),
                              ("sampled_token_ranks", ranks, [])):  # fmt: skip
        shapes = [[n, num_ids, *last], *([[n, *last]] if num_ids == 1 else [])]
        if list(array.shape) not in shapes:
            raise InvalidBatch(
                f"logprobs.{name} has shape {list(array.shape)}, expected {' or '.join(map(str, shapes))} for a batch "
                f"of {n} rows with {num_ids} ids each"
            )
    shape = (n, num_ids, given)
    return (
        np.require(token_ids.reshape(shape), None, "C"),
        np.require(values.reshape(shape), None, "C"),
        np.require(ranks.reshape(shape[:2]), None, "C"),
    )


def _array(name: str, values: Any, dtypes: tuple[np.dtype, ...]) -> np.ndarray:
    if type(values).__module__.partition(".")[0] == "torch":
        from asyncbook import device

        values = device.host_values(name, values)
    if not isinstance(values, np.ndarray):
        raise InvalidBatch(f"{name} is a {type(values).__name__}, expected a numpy array or a torch tensor")
    if values.dtype not in dtypes:
        raise InvalidBatch(f"{name} is {values.dtype}, expected {' or '.join(map(str, dtypes))}")
    return np.array(values) if not values.flags.writeable else np.asarray(values)


def _rows_from(
    token_ids: np.ndarray, values: np.ndarray, ranks: np.ndarray, starts: Any, n: int, num_ids: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[total, given] and [total] as [n, num_ids, given] and [n, num_ids]; what a row does not have is repeated."""
    total = ranks.shape[0] if ranks.ndim else 0
    firsts = np.asarray(starts)
    if firsts.ndim != 1 or firsts.size not in (n, n + 1) or (n and firsts.dtype.kind not in "iu"):
        raise InvalidBatch(
            f"logprobs.cu_num_generated_tokens is {firsts.dtype} {list(firsts.shape)}, expected int [{n}] or [{n + 1}]"
        )
    ascends = n == 0 or bool(firsts[0] >= 0 and (np.diff(firsts) >= 0).all())
    if not ascends or (n and not (firsts[n - 1] < total and firsts[-1] <= total)):
        raise InvalidBatch(f"logprobs.cu_num_generated_tokens is {firsts.tolist()}, expected 0 to {total}, ascending")
    if token_ids.ndim != 2 or values.ndim != 2 or not token_ids.shape[0] == values.shape[0] == total or ranks.ndim != 1:
        shapes = [list(array.shape) for array in (token_ids, values, ranks)]
        raise InvalidBatch(f"logprobs have shapes {shapes}, expected [total, given], [total, given], [total]")
    places = np.minimum(firsts[:n, None] + np.arange(num_ids), max(total - 1, 0)).astype(np.intp)
    return token_ids[places], values[places], ranks[places]
