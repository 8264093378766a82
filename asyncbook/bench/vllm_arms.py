"""Real vLLM's own functions as arms of `critical-path`, on its own objects and without a model. For vLLM 0.32.

In a running engine each is paid somewhere else: `_bookkeeping_sync` by the model runner, `update_from_output` by the
engine core, between two schedules; `process_outputs` by the front end, here without a tokenizer. What goes into one of
them is made ready outside of the time that is measured.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncbook.bench.arms import Arm, OpenArm, Seen
from asyncbook.bench.update_vllm import VllmState
from asyncbook.bench.workloads import NUM_PROMPT_TOKENS, VOCAB_SIZE, Steps

BLOCK_SIZE = 16
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
}


def can_run(workload: str) -> bool:
    """Where the three do the whole work, and no more than it."""
    return workload == "plain"


class _VllmArm:
    """What is common. `_call(step)` is what is timed; `_prepare(step)` makes its input."""

    sidecar_pid = None
    works_elsewhere = False

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.request_ids = [f"request-{row}" for row in range(steps.num_rows)]
        self.num_applied = self.num_delivered = self.checksum = 0
        self._prepare(0)

    def submit(self, step: int) -> None:
        start_ns = time.monotonic_ns()
        self._call(step)
        end_ns = time.monotonic_ns()
        self._seen = Seen(end_ns, end_ns - start_ns)
        self.num_applied = step + 1

    def wait(self, step: int) -> None:
        pass

    def read(self, step: int) -> Seen:
        ids = self._steps.sampled[step]
        self.num_delivered += ids.size  # what they deliver is checked in `history`, where they keep one
        self.checksum += int(ids.sum(dtype=np.int64))
        if step + 1 < self._steps.num_steps:
            self._prepare(step + 1)
        return self._seen

    def _prepare(self, step: int) -> None:
        raise NotImplementedError

    def _call(self, step: int) -> None:
        raise NotImplementedError

    def history(self, row: int) -> np.ndarray:
        return self._steps.sampled[: self.num_applied, row, 0]

    def finish_reason(self, row: int) -> int:
        return 0

    def settle(self) -> None:
        pass

    def text(self, row: int) -> str:
        return ""

    def cumulative_logprob(self, row: int) -> float:
        return 0.0


class BookkeepingArm(_VllmArm):
    """`GPUModelRunner._bookkeeping_sync`."""

    def __init__(self, steps: Steps) -> None:
        lengths = np.full(steps.num_rows, NUM_PROMPT_TOKENS, np.int32)
        max_model_len = -(-steps.max_model_len // BLOCK_SIZE) * BLOCK_SIZE
        self._state = VllmState(lengths, max_model_len, VOCAB_SIZE)
        super().__init__(steps)

    def _prepare(self, step: int) -> None:
        self._step: Any = SimpleNamespace(sampled=self._steps.sampled[step])

    def _call(self, step: int) -> None:
        self._state.run(self._step)

    def history(self, row: int) -> np.ndarray:
        arrays = dict(self._state.arrays())
        ids: np.ndarray = arrays["token_ids"][row, NUM_PROMPT_TOKENS : arrays["num_tokens_no_spec"][row]]
        return ids


class SchedulerArm(_VllmArm):
    """`Scheduler.update_from_output`."""

    def __init__(self, steps: Steps) -> None:
        from vllm import SamplingParams  # type: ignore[import-not-found]
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput  # type: ignore[import-not-found]
        from vllm.v1.request import Request, RequestStatus  # type: ignore[import-not-found]

        self._scheduler = make_scheduler(steps.num_rows, steps.max_model_len)
        self._requests = []
        for row in range(steps.num_rows):
            params = SamplingParams(temperature=0.0, max_tokens=steps.max_model_len)
            request = Request(f"request-{row}", [0] * NUM_PROMPT_TOKENS, params, None)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = NUM_PROMPT_TOKENS - 1
            self._scheduler.requests[request.request_id] = request
            self._scheduler.running.append(request)
            self._requests.append(request)
        self._output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens={request.request_id: 1 for request in self._requests},
            total_num_scheduled_tokens=steps.num_rows,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0],
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )
        super().__init__(steps)

    def _prepare(self, step: int) -> None:
        from vllm.v1.outputs import ModelRunnerOutput  # type: ignore[import-not-found]

        for request in self._requests:  # as scheduling does
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
        ids = self._steps.sampled[step].tolist()
        places = {request_id: row for row, request_id in enumerate(self.request_ids)}
        self._sampled = ModelRunnerOutput(req_ids=self.request_ids, req_id_to_index=places, sampled_token_ids=ids)

    def _call(self, step: int) -> None:
        self._scheduler.update_from_output(self._output, self._sampled)

    def history(self, row: int) -> np.ndarray:
        return np.array(self._requests[row].output_token_ids, np.int32)


class FrontEndArm(_VllmArm):
    """`OutputProcessor.process_outputs`."""

    def __init__(self, steps: Steps) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]
        from vllm.v1.engine import EngineCoreRequest  # type: ignore[import-not-found]
        from vllm.v1.engine.output_processor import OutputProcessor  # type: ignore[import-not-found]

        self._processor = OutputProcessor(None, log_stats=False)
        self._delivered: list[list[int]] = [[] for _ in range(steps.num_rows)]
        for row in range(steps.num_rows):
            params = SamplingParams(
                temperature=0.0, max_tokens=steps.max_model_len, output_kind=RequestOutputKind.DELTA, detokenize=False
            )
            request = EngineCoreRequest(
                request_id=f"request-{row}",
                prompt_token_ids=[0] * NUM_PROMPT_TOKENS,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                external_req_id=f"request-{row}",
            )
            self._processor.add_request(request, None)
        super().__init__(steps)

    def _prepare(self, step: int) -> None:
        from vllm.v1.engine import EngineCoreOutput

        ids = self._steps.sampled[step].tolist()
        pairs = zip(self.request_ids, ids, strict=True)
        self._outputs = [EngineCoreOutput(request_id=name, new_token_ids=new) for name, new in pairs]

    def _call(self, step: int) -> None:
        processed = self._processor.process_outputs(self._outputs)
        self._last = processed.request_outputs

    def read(self, step: int) -> Seen:
        for row, output in enumerate(self._last):
            self._delivered[row] += output.outputs[0].token_ids
        return super().read(step)

    def history(self, row: int) -> np.ndarray:
        return np.array(self._delivered[row], np.int32)


def make_scheduler(num_rows: int, max_model_len: int) -> Any:
    """A scheduler of a model that has nothing but a configuration."""
    import torch
    from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
    from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
    from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL_CONFIG))
        arguments = EngineArgs(
            model=folder, skip_tokenizer_init=True, max_model_len=max_model_len, max_num_seqs=num_rows,
            max_num_batched_tokens=max(num_rows, max_model_len), block_size=BLOCK_SIZE, enforce_eager=True,
            async_scheduling=False,
        )  # fmt: skip
        config = arguments.create_engine_config()
    num_blocks = num_rows * (max_model_len // BLOCK_SIZE + 2)
    config.cache_config.num_gpu_blocks = num_blocks
    attention = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    kv_cache = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)]
    )
    return Scheduler(
        vllm_config=config, kv_cache_config=kv_cache, block_size=BLOCK_SIZE, log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )  # fmt: skip


@contextmanager
def _open_bookkeeping(steps: Steps) -> Iterator[Arm]:
    yield BookkeepingArm(steps)


@contextmanager
def _open_scheduler(steps: Steps) -> Iterator[Arm]:
    yield SchedulerArm(steps)


@contextmanager
def _open_front_end(steps: Steps) -> Iterator[Arm]:
    yield FrontEndArm(steps)


VLLM_ARMS: dict[str, OpenArm] = {
    "vLLM bookkeeping": _open_bookkeeping,
    "vLLM scheduler": _open_scheduler,
    "vLLM front end": _open_front_end,
}
