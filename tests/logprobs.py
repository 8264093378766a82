"""Logprobs for tests, and what was delivered of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncbook import Book, Logprobs


def logprobs_of(ids: Any, values: Any = None, *, given: int | None = None, ranks: Any = None) -> Logprobs:
    """Logprobs for ids [n] or [n, w]: `values` of the same shape with `given` (or as many as it has) in the last place,
    by default -0.5, -1.5 and so on; behind the sampled id come the ids above it."""
    ids = np.asarray(ids)
    if values is None:
        values = np.broadcast_to(-0.5 - np.arange(given or 1), (*ids.shape, given or 1))
    values = np.array(values, np.float32)
    if values.ndim == ids.ndim:
        values = values[..., None]
    token_ids = ids[..., None] + np.arange(values.shape[-1])
    ranks = np.ones(ids.shape) if ranks is None else ranks
    return Logprobs(token_ids.astype(ids.dtype), values, np.asarray(ranks, np.int32))


def delivered_logprobs(book: Book) -> dict[str, tuple[list[Any], float | None, bool]]:
    """What came since the last look, by request: logprobs by id, the last cumulative one, and whether there is a NaN.
    Requests that asked for none have an empty list and None."""
    requests: dict[str, tuple[list[Any], float | None, bool]] = {}
    for outputs in book.poll_outputs():
        assert outputs.logprobs is not None
        for i, request in enumerate(outputs):
            entries, _, has_nan = requests.get(request.request_id, ([], None, False))
            assert request.logprobs is None or len(request.logprobs) == request.token_ids.size
            requests[request.request_id] = (
                entries + (request.logprobs or []),
                request.cumulative_logprob,
                has_nan or bool(outputs.logprobs.has_nan[i]),
            )
    return requests
