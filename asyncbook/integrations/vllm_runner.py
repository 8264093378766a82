"""The model runner's bookkeeping, batched: what takes the place of `GPUModelRunner._bookkeeping_sync`.

It works on vLLM's own objects and leaves them as vLLM does: the arrays of `InputBatch` are written by one kernel, the
requests' output lists grow in C, and the same eight values are returned. Where a step is none of those it knows, vLLM's
own function does it: logits checked for NaN, and ids on a device that the runner waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import compress, repeat
from typing import Any

import numpy as np
import torch
import vllm.envs as envs  # type: ignore[import-not-found]
from vllm.v1.sample.rejection_sampler import RejectionSampler  # type: ignore[import-not-found]
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found]

from asyncbook.integrations import vllm_kernels as kernels
from asyncbook.integrations.vllm_ids import OneIdEach
from asyncbook.integrations.vllm_kernels import PADDING, lists_are_as_known, runner_kernels

VLLM_BOOKKEEPING = GPUModelRunner._bookkeeping_sync
INT32 = torch.int32
SLAB_IDS = 1 << 18


class Arrays:
    """A runner's arrays, which it keeps as long as its batch, as the kernels know them, and room for a step's ids."""

    def __init__(self, runner: Any) -> None:
        batch = runner.input_batch
        self.batch = batch  # held, and so is its memory
        self.is_discarded = runner.discard_request_mask.np
        self.size, self.max_model_len = batch.token_ids_cpu.shape
        # Elsewhere vLLM waits for the ids before it looks at them; asynchronous, it does not look.
        self.is_for_vllm = bool(envs.VLLM_COMPUTE_NANS_IN_LOGITS) or not (
            runner.use_async_scheduling or runner.device.type == "cpu"
        )
        self.has_drafts = runner.speculative_config is not None
        self.sees_lists = lists_are_as_known()
        self.take_sampled, self.take_placeholders = runner_kernels()
        self._known = np.zeros(kernels.NUM_KNOWN, np.int64)
        self.known = self._known.ctypes.data
        columns = (
            (kernels.IS_DISCARDED, self.is_discarded, np.bool_),
            (kernels.TOKEN_IDS, batch.token_ids_cpu, np.int32),
            (kernels.IS_TOKEN_IDS, batch.is_token_ids, np.bool_),
            (kernels.NUM_TOKENS, batch.num_tokens_no_spec, np.int32),
        )
        for word, array, dtype in columns:
            if array.dtype != dtype or not array.flags.c_contiguous or len(array) < self.size:
                raise TypeError(f"an array of vLLM's is {array.dtype} {array.shape}, expected contiguous {dtype}")
            self._known[word] = array.ctypes.data
        self._known[kernels.MAX_MODEL_LEN] = self.max_model_len
        self._known[kernels.VOCAB_SIZE] = batch.vocab_size
        self.ends = np.empty(self.size, np.int64)
        self._known[kernels.ENDS] = self.ends.ctypes.data
        self._taken = self._take_slab(self.size)
        self.req_ids: list[str] = []
        self.req_id_to_index: dict[str, int] = {}

    def append(self, sampled: torch.Tensor, n: int, width: int, outputs: list[list[int]]) -> int:
        """Takes the ids of `sampled` [n, w] into the batch; the number of discarded rows. `outputs`: of the rows, which
        the caller appends to next. The ids are in `flat`, from `start` on."""
        if n > self.size or n > len(outputs):
            raise TypeError(f"vLLM sampled {n} rows of {len(outputs)}, {self.size} at most")
        if sampled.dtype is not INT32 or not sampled.is_contiguous():  # vLLM's own samplers make these
            sampled = sampled.to(INT32).contiguous()
        start, num_ids = self._taken, n * width
        if start + num_ids > self._slab_size:
            start = self._take_slab(num_ids)
        self.start, self._taken = start, start + num_ids
        lists = id(outputs) if self.sees_lists else 0
        code = self.take_sampled(sampled.data_ptr(), start, n, width, self.known, lists)
        if code < 0:
            self._complain(code)
        return code

    def _take_slab(self, num_ids: int) -> int:
        """Room for the ids of many steps. What is handed out stays as it is as long as somebody holds it, and a step
        costs no large allocation, which is slow where the allocator has not been used for a while."""
        self._slab_size = max(SLAB_IDS, num_ids)
        self.flat = np.empty(self._slab_size, np.int32)
        self.items = self.flat.data
        self._known[kernels.FLAT] = self.flat.ctypes.data
        return 0

    def append_placeholders(self, n: int, outputs: list[list[int]]) -> int:
        """Takes a placeholder a row into the batch; the number of discarded rows."""
        if n > len(outputs):
            raise TypeError(f"vLLM sampled {n} rows of {len(outputs)}")
        code = self.take_placeholders(n, self.known, id(outputs) if self.sees_lists else 0)
        if code < 0:
            self._complain(code)
        return code

    def _complain(self, code: int) -> None:
        """As in vLLM, a row that has no room for its ids is a fault of whoever scheduled it."""
        row = -1 - code
        raise AssertionError(
            f"request {self.batch.req_ids[row]!r} has {self.batch.num_tokens_no_spec[row]} ids and no room for "
            f"what was sampled, max_model_len is {self.max_model_len}"
        )

    def names(self) -> tuple[list[str], dict[str, int]]:
        """The requests by row and their rows, as they stay: the batch's own change with the next step. The same two
        objects as long as the batch has the same rows, so nobody may change them."""
        req_ids = self.batch._req_ids
        if req_ids != self.req_ids:
            self.req_ids, self.req_id_to_index = req_ids.copy(), self.batch.req_id_to_index.copy()
        return self.req_ids, self.req_id_to_index


def arrays_of(runner: Any) -> Arrays:
    """The arrays of a runner; found anew where it has made another batch."""
    arrays: Arrays | None = getattr(runner, "_asyncbook_arrays", None)
    if arrays is None or arrays.batch is not runner.input_batch:
        arrays = runner._asyncbook_arrays = Arrays(runner)
    return arrays


def bookkeeping_sync(
    runner: Any,
    scheduler_output: Any,
    sampler_output: Any,
    logits: Any,
    hidden_states: Any,
    num_scheduled_tokens: int,
) -> tuple[Any, ...]:
    """Arguments, results and effects are those of vLLM's method of that name."""
    arrays = arrays_of(runner)
    if arrays.is_for_vllm:
        done: tuple[Any, ...] = VLLM_BOOKKEEPING(
            runner, scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
        )
        return done
    logprobs: Any = None
    id_lists: Sequence[list[int]] = []
    invalid: list[int] = []
    if runner.use_async_scheduling:
        invalid = _keep_on_device(arrays, sampler_output.sampled_token_ids)
    else:
        id_lists, logprobs = _append(arrays, sampler_output.sampled_token_ids, sampler_output.logprobs_tensors)
    prompt_logprobs = {}
    if runner.num_prompt_logprobs:
        prompt_logprobs = runner._get_prompt_logprobs_dict(
            hidden_states[:num_scheduled_tokens], scheduler_output.num_scheduled_tokens
        )
    req_ids, req_id_to_index = arrays.names()
    return {}, None, logprobs, id_lists, prompt_logprobs, req_ids, req_id_to_index, invalid


def _take_back(arrays: Arrays) -> list[int]:
    """The discarded rows. Each drew a number that nobody uses: where it has a generator, that takes the draw back."""
    rows: list[int] = np.flatnonzero(arrays.is_discarded[: arrays.batch.num_reqs]).tolist()
    for row in rows:
        generator = arrays.batch.generators.get(row)
        if generator is not None:
            generator.set_offset(generator.get_offset() - 4)
    return rows


def _append(arrays: Arrays, sampled: torch.Tensor, logprobs_tensors: Any) -> tuple[Sequence[list[int]], Any]:
    """Takes the ids into the batch. Returns them, a list a row, and their logprobs."""
    n, width = sampled.shape
    outputs = arrays.batch.req_output_token_ids  # a row's list here is the very list that its request has
    num_discarded = arrays.append(sampled, n, width, outputs)
    start = arrays.start
    if width == 1 and num_discarded == 0 and n == len(outputs):
        ids = arrays.items[start : start + n].tolist()
        deque(map(list.append, outputs, ids), maxlen=0)
        logprobs = None if logprobs_tensors is None else logprobs_tensors.tolists()
        if arrays.has_drafts:  # those that make them want lists
            return [[token_id] for token_id in ids], logprobs
        return OneIdEach(ids, arrays.flat, start), logprobs
    discarded = _take_back(arrays)
    logprobs = None
    if width == 1:
        if logprobs_tensors is not None:
            logprobs = logprobs_tensors.tolists()
    elif logprobs_tensors is not None:
        _, logprobs = RejectionSampler.parse_output(sampled, arrays.batch.vocab_size, discarded, logprobs_tensors)
    stops = arrays.ends[:n].tolist()
    ids = arrays.items[start : start + (stops[-1] if stops else 0)].tolist()
    id_lists = [ids[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    deque(map(list.extend, outputs, id_lists), maxlen=0)
    return id_lists, logprobs


def _keep_on_device(arrays: Arrays, sampled: Any) -> list[int]:
    """The ids stay where they are, for the next step to take its inputs from; the batch gets placeholders. Returns the
    discarded rows."""
    batch, n = arrays.batch, sampled.shape[0]
    if batch.prev_sampled_token_ids is None:
        assert sampled.shape[-1] == 1
        batch.prev_sampled_token_ids = sampled
    arrays.append_placeholders(n, batch.req_output_token_ids)
    discarded = _take_back(arrays)
    rows_of = dict(zip(batch.req_ids, range(len(batch.req_ids)), strict=True))
    for row in discarded:
        del rows_of[batch.req_ids[row]]
    batch.prev_req_id_to_index = rows_of
    outputs = batch.req_output_token_ids[:n]
    if discarded:
        outputs = compress(outputs, ~arrays.is_discarded[:n])
    deque(map(list.append, outputs, repeat(PADDING)), maxlen=0)
    return discarded
