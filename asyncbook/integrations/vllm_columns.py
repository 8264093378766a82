"""What the scheduler's bookkeeping has to know of each request, in columns; a request's place in them is its slot.

A request has a slot while it is *plain*: it runs, its first output is out, and all that a step can do to it is to make
it longer or to end it. Nothing here is the only copy: a request that is looked at anew, or forgotten, loses nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.request import RequestStatus  # type: ignore[import-not-found]

from asyncbook.integrations.vllm_kernels import MAX_STOP_IDS, PADDING


class RequestColumns:
    """Requests by slot. int32 [S] columns, `stop_token_ids` int32 [S, MAX_STOP_IDS]; `version` changes with `slots`.

    The lists have an entry more, so that slot -1, which is none, is None there: the requests, their own two lists of
    ids, and the numbers of their clients.
    """

    num_tokens: np.ndarray
    limits: np.ndarray
    eos_token_ids: np.ndarray
    stop_token_ids: np.ndarray

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.slots: dict[str, int] = {}
        self.version = 0
        self.requests: list[Any] = [None]
        self.all_token_ids: list[Any] = [None]
        self.output_token_ids: list[Any] = [None]
        self.clients: list[Any] = [None]
        self._free: list[int] = []
        self._allocate(64)

    def _allocate(self, size: int) -> None:
        """Makes the columns `size` long, with what they hold."""
        old_size = len(self.requests) - 1
        for name, fill in (("num_tokens", 0), ("limits", 0), ("eos_token_ids", PADDING)):
            column = np.full(size, fill, np.int32)
            column[:old_size] = getattr(self, name, column[:0])
            setattr(self, name, column)
        stop_token_ids = np.full((size, MAX_STOP_IDS), PADDING, np.int32)
        if old_size:
            stop_token_ids[:old_size] = self.stop_token_ids
        self.stop_token_ids = stop_token_ids
        self._free += range(size - 1, old_size - 1, -1)
        for items in (self.requests, self.all_token_ids, self.output_token_ids, self.clients):
            items += [None] * (size - old_size)

    def look_at(self, request: Any) -> None:
        """Takes note of what a request is now, after something of it may have changed."""
        slot = self.slots.get(request.request_id)
        if not is_plain(request):
            self.forget(request)
            return
        if slot is None or self.requests[slot] is not request:
            self.forget(request)
            slot = self._take(request)
        self.num_tokens[slot] = request.num_tokens

    def _take(self, request: Any) -> int:
        if not self._free:
            self._allocate(2 * len(self.num_tokens))
        slot = self._free.pop()
        params = request.sampling_params
        self.requests[slot] = request
        self.all_token_ids[slot], self.output_token_ids[slot] = request._all_token_ids, request._output_token_ids
        self.clients[slot] = request.client_index
        self.limits[slot] = min(self.max_model_len, request.num_prompt_tokens + request.max_tokens)
        self.eos_token_ids[slot] = PADDING if params.eos_token_id is None else params.eos_token_id
        self.stop_token_ids[slot] = PADDING
        self.stop_token_ids[slot, : len(params.stop_token_ids or ())] = list(params.stop_token_ids or ())
        self.slots[request.request_id] = slot
        self.version += 1
        return slot

    def forget(self, request: Any) -> None:
        """Gives the request's slot back, if it has one."""
        slot = self.slots.pop(request.request_id, None)
        if slot is not None:
            self.requests[slot] = self.all_token_ids[slot] = self.output_token_ids[slot] = self.clients[slot] = None
            self._free.append(slot)
            self.version += 1


def is_plain(request: Any) -> bool:
    """Whether a step can only make the request longer or end it, with nothing to say of it but its new ids (and their
    logprobs)."""
    params = request.sampling_params
    return (
        request.status == RequestStatus.RUNNING
        and params is not None
        and request.pooling_params is None
        and request.prefill_stats is None
        and not request.events
        and request.num_stale_output_tokens == 0
        and request.stop_reason is None
        and request.num_nans_in_logits == 0
        and request.spec_decode_metrics is None
        and request.trace_headers is None
        and not request.resumable
        and not request.use_structured_output
        and not request.has_encoder_inputs
        and params.repetition_detection is None
        and len(params.stop_token_ids or ()) <= MAX_STOP_IDS
    )
