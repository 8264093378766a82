"""The model runner's bookkeeping, batched: what takes the place of `GPUModelRunner._bookkeeping_sync`.

It works on vLLM's own objects and leaves them as vLLM does: the arrays of `InputBatch` are written by one kernel, the
requests' output lists grow in C, and the same eight values are returned. Where a step is none of those it knows, vLLM's
own function does it: logits checked for NaN, and ids on a device that the runner waits for.
"""

from __future__ import annotations

from collections import deque
from itertools import compress, repeat
from typing import Any

import numpy as np
import torch
import vllm.envs as envs  # type: ignore[import-not-found]
from vllm.v1.sample.rejection_sampler import RejectionSampler  # type: ignore[import-not-found]
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found]

from asyncbook.integrations.vllm_kernels import PADDING, runner_kernels

VLLM_BOOKKEEPING = GPUModelRunner._bookkeeping_sync


class Arrays:
    """The addresses of a runner's arrays, which it keeps as long as its batch, and room for the ids of a step."""

    def __init__(self, runner: Any) -> None:
        batch = runner.input_batch
        self.batch = batch  # held, and so is its memory
        self.is_discarded = runner.discard_request_mask.np
        self.size, self.max_model_len = batch.token_ids_cpu.shape
        self.width = 0
        self.checks_nans = bool(envs.VLLM_COMPUTE_NANS_IN_LOGITS)
        self.take_sampled, self.take_placeholders = runner_kernels()
        columns = (self.is_discarded, batch.token_ids_cpu, batch.is_token_ids, batch.num_tokens_no_spec)
        dtypes = (np.bool_, np.int32, np.bool_, np.int32)
        for array, dtype in zip(columns, dtypes, strict=True):
            if array.dtype != dtype or not array.flags.c_contiguous or len(array) < self.size:
                raise TypeError(f"an array of vLLM's is {array.dtype} {array.shape}, expected contiguous {dtype}")
        self.addresses = [array.ctypes.data for array in columns]

    def reserve(self, width: int) -> None:
        """Room for so many ids a row."""
        if width > self.width:
            self.flat, self.ends = np.empty(self.size * width, np.int64), np.empty(self.size, np.int64)
            self.flat_address, self.ends_address = self.flat.ctypes.data, self.ends.ctypes.data
            self.width = width

    def append(self, sampled: torch.Tensor) -> int:
        """Takes the ids of `sampled` [n, w] into the batch; the number of discarded rows."""
        n, width = sampled.shape
        self.reserve(width)
        assert n <= self.size
        discarded, token_ids, is_token_ids, num_tokens = self.addresses
        return self._checked(
            self.take_sampled(
                sampled.data_ptr(), sampled.dtype is torch.int64, n, width, discarded, self.batch.vocab_size,
                token_ids, is_token_ids, self.max_model_len, num_tokens, self.flat_address, self.ends_address,
            )
        )  # fmt: skip

    def append_placeholders(self, n: int) -> int:
        """Takes a placeholder a row into the batch; the number of discarded rows."""
        assert n <= self.size
        discarded, token_ids, is_token_ids, num_tokens = self.addresses
        return self._checked(
            self.take_placeholders(n, discarded, token_ids, is_token_ids, self.max_model_len, num_tokens)
        )

    def _checked(self, code: int) -> int:
        """As in vLLM, a row that has no room for its ids is a fault of whoever scheduled it."""
        if code < 0:
            row = -1 - code
            raise AssertionError(
                f"request {self.batch.req_ids[row]!r} has {self.batch.num_tokens_no_spec[row]} ids and no room for "
                f"what was sampled, max_model_len is {self.max_model_len}"
            )
        return code


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
    sampled = sampler_output.sampled_token_ids
    arrays = arrays_of(runner)
    is_async = runner.use_async_scheduling
    if arrays.checks_nans or not (is_async or (sampled.is_cpu and sampled.is_contiguous())):
        done: tuple[Any, ...] = VLLM_BOOKKEEPING(
            runner, scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
        )
        return done
    batch = runner.input_batch
    # What is returned outlives the step: the next one may already move rows.
    req_ids, req_id_to_index = batch.req_ids.copy(), batch.req_id_to_index.copy()
    logprobs: Any = None
    id_lists: list[list[int]] = []
    invalid: list[int] = []
    if is_async:
        invalid = _keep_on_device(arrays, sampled)
    else:
        id_lists, logprobs = _append(arrays, sampler_output)
    prompt_logprobs = {}
    if runner.num_prompt_logprobs:
        prompt_logprobs = runner._get_prompt_logprobs_dict(
            hidden_states[:num_scheduled_tokens], scheduler_output.num_scheduled_tokens
        )
    return {}, None, logprobs, id_lists, prompt_logprobs, req_ids, req_id_to_index, invalid


def _take_back(arrays: Arrays) -> list[int]:
    """The discarded rows. Each drew a number that nobody uses: where it has a generator, that takes the draw back."""
    rows: list[int] = np.flatnonzero(arrays.is_discarded[: arrays.batch.num_reqs]).tolist()
    for row in rows:
        generator = arrays.batch.generators.get(row)
        if generator is not None:
            generator.set_offset(generator.get_offset() - 4)
    return rows


def _append(arrays: Arrays, sampler_output: Any) -> tuple[list[list[int]], Any]:
    """Takes the ids into the batch. Returns them, a list a row, and their logprobs."""
    batch, sampled, logprobs_tensors = arrays.batch, sampler_output.sampled_token_ids, sampler_output.logprobs_tensors
    n, width = sampled.shape
    discarded = _take_back(arrays) if arrays.append(sampled) or n < batch.num_reqs else []
    outputs = batch.req_output_token_ids  # a row's list here is the very list that its request has
    logprobs = None
    if width == 1 and not discarded:
        ids = arrays.flat[:n].tolist()
        deque(map(list.append, outputs, ids), maxlen=0)
        if logprobs_tensors is not None:
            logprobs = logprobs_tensors.tolists()
        return [[token_id] for token_id in ids], logprobs
    if width == 1:
        if logprobs_tensors is not None:
            logprobs = logprobs_tensors.tolists()
    elif logprobs_tensors is not None:
        _, logprobs = RejectionSampler.parse_output(sampled, batch.vocab_size, discarded, logprobs_tensors)
    stops = arrays.ends[:n].tolist()
    ids = arrays.flat[: stops[-1] if stops else 0].tolist()
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
    arrays.append_placeholders(n)
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
