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
import vllm.envs as envs  # type: ignore[import-not-found]
from vllm.v1.sample.rejection_sampler import RejectionSampler  # type: ignore[import-not-found]
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found]

from asyncbook.integrations.vllm_kernels import PADDING, take_placeholders, take_sampled

VLLM_BOOKKEEPING = GPUModelRunner._bookkeeping_sync


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
    if envs.VLLM_COMPUTE_NANS_IN_LOGITS or not (runner.use_async_scheduling or sampled.device.type == "cpu"):
        done: tuple[Any, ...] = VLLM_BOOKKEEPING(
            runner, scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
        )
        return done
    batch = runner.input_batch
    is_discarded = runner.discard_request_mask.np
    discarded = np.flatnonzero(is_discarded[: batch.num_reqs]).tolist()
    for row in discarded:
        # The row drew a number that nobody uses: its generator takes the draw back.
        generator = batch.generators.get(row)
        if generator is not None:
            generator.set_offset(generator.get_offset() - 4)
    # What is returned outlives the step: the next one may already move rows.
    req_ids, req_id_to_index = batch.req_ids.copy(), batch.req_id_to_index.copy()
    logprobs: Any = None
    id_lists: list[list[int]] = []
    invalid: list[int] = []
    if runner.use_async_scheduling:
        invalid = discarded
        _keep_on_device(batch, sampled, is_discarded, discarded)
    else:
        id_lists, logprobs = _append(batch, sampler_output, is_discarded, discarded)
    prompt_logprobs = runner._get_prompt_logprobs_dict(
        hidden_states[:num_scheduled_tokens], scheduler_output.num_scheduled_tokens
    )
    return {}, None, logprobs, id_lists, prompt_logprobs, req_ids, req_id_to_index, invalid


def _append(
    batch: Any, sampler_output: Any, is_discarded: np.ndarray, discarded: list[int]
) -> tuple[list[list[int]], Any]:
    """Takes the ids into the batch. Returns them, a list a row, and their logprobs."""
    sampled, logprobs_tensors = sampler_output.sampled_token_ids, sampler_output.logprobs_tensors
    ids = sampled.numpy()
    n, width = ids.shape
    flat, ends = np.empty(n * width, np.int64), np.empty(n, np.int64)
    full_row = take_sampled(
        ids, is_discarded, batch.vocab_size, batch.token_ids_cpu, batch.is_token_ids, batch.num_tokens_no_spec,
        flat, ends,
    )  # fmt: skip
    _check_room(batch, full_row)
    logprobs = None
    if width == 1:
        id_lists = ids.tolist()
        for row in discarded:
            id_lists[row].clear()
        if logprobs_tensors is not None:
            logprobs = logprobs_tensors.tolists()
    elif logprobs_tensors is not None:
        id_lists, logprobs = RejectionSampler.parse_output(sampled, batch.vocab_size, discarded, logprobs_tensors)
    else:
        stops = ends.tolist()
        all_ids = flat[: stops[-1] if stops else 0].tolist()
        id_lists = [all_ids[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    # A row's list here is the very list that its request has.
    outputs = batch.req_output_token_ids
    if width == 1 and not discarded:
        deque(map(list.append, outputs, flat.tolist()), maxlen=0)
    else:
        deque(map(list.extend, outputs, id_lists), maxlen=0)
    return id_lists, logprobs


def _keep_on_device(batch: Any, sampled: Any, is_discarded: np.ndarray, discarded: list[int]) -> None:
    """The ids stay where they are, for the next step to take its inputs from; the batch gets placeholders."""
    if batch.prev_sampled_token_ids is None:
        assert sampled.shape[-1] == 1
        batch.prev_sampled_token_ids = sampled
    rows_of = dict(zip(batch.req_ids, range(len(batch.req_ids)), strict=True))
    for row in discarded:
        del rows_of[batch.req_ids[row]]
    batch.prev_req_id_to_index = rows_of
    n = sampled.shape[0]
    full_row = take_placeholders(n, is_discarded, batch.token_ids_cpu, batch.is_token_ids, batch.num_tokens_no_spec)
    _check_room(batch, full_row)
    outputs = batch.req_output_token_ids[:n]
    if discarded:
        outputs = compress(outputs, ~is_discarded[:n])
    deque(map(list.append, outputs, repeat(PADDING)), maxlen=0)


def _check_room(batch: Any, full_row: int) -> None:
    """As in vLLM, a row that has no room for its ids is a fault of whoever scheduled it."""
    assert full_row < 0, (
        f"request {batch.req_ids[full_row]!r} has {batch.num_tokens_no_spec[full_row]} ids and no room for what was "
        f"sampled, max_model_len is {batch.token_ids_cpu.shape[1]}"
    )
