"""Real vLLM as an arm: its own `_bookkeeping_sync` on its own `InputBatch`, without a model. Written against vLLM 0.32.

Beside it: the loop arm of the other cells, which does the work on the arrays only, from lists that are ready; the same
loop with everything around it that vLLM does; and `append_spans`. So one sees whether the loop that all other cells
are compared with is a fair one.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from asyncbook.bench.update_arms import APPEND, LOOP, VLLM, WHOLE_LOOP, Arm, Run, tokens_append, tokens_loop
from asyncbook.bench.update_cells import MAX_MODEL_LEN, VOCAB_SIZE, Cell, State, Step, make_prompt_lengths, make_steps
from asyncbook.bench.update_run import Result, Settings, measure

BLOCK_SIZE = 16


class VllmState:
    """An `InputBatch` full of requests, and just enough of a `GPUModelRunner` to keep its books."""

    def __init__(
        self, prompt_lengths: np.ndarray, max_model_len: int = MAX_MODEL_LEN, vocab_size: int = VOCAB_SIZE
    ) -> None:
        from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
        from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch  # type: ignore[import-not-found]
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found]

        size = prompt_lengths.size
        self._prompt_lengths = prompt_lengths
        self._batch: Any = InputBatch(
            max_num_reqs=size,
            max_model_len=max_model_len,
            max_num_batched_tokens=8192,
            device=torch.device("cpu"),
            vocab_size=vocab_size,
            block_sizes=[BLOCK_SIZE],
            max_num_blocks_per_req=[max_model_len // BLOCK_SIZE],
        )
        self._requests: dict[str, Any] = {}
        for row, length in enumerate(prompt_lengths.tolist()):
            request = CachedRequestState(
                req_id=f"request-{row}",
                prompt_token_ids=[0] * length,
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0, max_tokens=max_model_len),
                generator=None,
                block_ids=([0],),
                num_computed_tokens=0,
                output_token_ids=[],
            )
            self._requests[request.req_id] = request
            self._batch.add_request(request)
        self._batch.refresh_metadata()
        self._bookkeeping_sync: Any = GPUModelRunner._bookkeeping_sync
        self._runner = SimpleNamespace(
            use_async_scheduling=False,
            input_batch=self._batch,
            requests=self._requests,
            max_model_len=max_model_len,
            discard_request_mask=SimpleNamespace(np=np.zeros(size, np.bool_)),
            _to_list=lambda sampled: sampled.tolist(),
            _get_prompt_logprobs_dict=lambda *arguments: {},
        )
        self._scheduler_output = SimpleNamespace(num_scheduled_tokens={})
        self._hidden_states = torch.zeros(1)

    def run(self, step: Step) -> None:
        sampler_output = SimpleNamespace(sampled_token_ids=torch.from_numpy(step.sampled), logprobs_tensors=None)
        self._bookkeeping_sync(
            self._runner, self._scheduler_output, sampler_output, None, self._hidden_states, num_scheduled_tokens=0
        )

    def rewind(self) -> None:
        self._batch.num_tokens_no_spec[: self._prompt_lengths.size] = self._prompt_lengths
        for request in self._requests.values():
            request.output_token_ids.clear()

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """What it has of `State.arrays`."""
        size = self._prompt_lengths.size
        yield "num_tokens_no_spec", self._batch.num_tokens_no_spec[:size]
        yield "token_ids", self._batch.token_ids_cpu[:size]
        yield "is_token_ids", self._batch.is_token_ids[:size]


class WholeLoopState(State):
    """A `State` with what else is kept of a request."""

    def __init__(self, prompt_lengths: np.ndarray) -> None:
        self.request_ids = [f"request-{row}" for row in range(prompt_lengths.size)]
        self.rows = {request_id: row for row, request_id in enumerate(self.request_ids)}
        self.outputs: dict[str, list[int]] = {request_id: [] for request_id in self.request_ids}
        super().__init__(prompt_lengths)

    def rewind(self) -> None:
        super().rewind()
        for token_ids in self.outputs.values():
            token_ids.clear()

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """As in vLLM 0.32, which has no `num_tokens` any more."""
        return ((name, array) for name, array in super().arrays() if name != "num_tokens")


def whole_loop(state: WholeLoopState) -> Run:
    """Sampled ids become lists, names are copied for the outputs, then the loop, each request's list included."""

    def run(step: Step) -> None:
        request_ids, rows = state.request_ids.copy(), state.rows.copy()
        sampled = torch.from_numpy(step.sampled)
        if sampled.shape[1] == 1:
            id_lists = sampled.tolist()
        else:
            ids_of_rows = sampled.numpy()
            is_id = (ids_of_rows != -1) & (ids_of_rows < VOCAB_SIZE)
            id_lists = [ids[is_id[row]].tolist() for row, ids in enumerate(ids_of_rows)]
        for row, ids in enumerate(id_lists):
            if not ids:
                continue
            start = state.num_tokens_no_spec[row]
            end = start + len(ids)
            assert end <= MAX_MODEL_LEN
            state.token_ids[row, start:end] = ids
            state.is_token_ids[row, start:end] = True
            state.num_tokens_no_spec[row] = end
            state.outputs[request_ids[row]].extend(ids)
        assert len(rows) == len(request_ids)

    return run


def run_peer_cell(cell: Cell, settings: Settings) -> Result:
    """All rows, in order, as vLLM takes them."""
    rng = np.random.default_rng([settings.seed, cell.size])
    prompt_lengths = make_prompt_lengths(cell.size, rng)
    steps = make_steps(cell, rng, shuffled=False)
    loop, whole, append, vllm = (
        State(prompt_lengths), WholeLoopState(prompt_lengths), State(prompt_lengths), VllmState(prompt_lengths)
    )  # fmt: skip
    arms = [
        Arm(LOOP, loop, tokens_loop(loop, masked=True)),
        Arm(WHOLE_LOOP, whole, whole_loop(whole)),
        Arm(VLLM, vllm, vllm.run),
        Arm(APPEND, append, tokens_append(append, masked=True)),
    ]
    return measure(cell, arms, steps, settings)
