"""vLLM's schedulers without a model: what a step samples is drawn from the request's name and its number of outputs.

So the asynchronous scheduler runs as well, which vLLM does not have on the CPU, and thousands of steps take seconds.
"""

from __future__ import annotations

import random
from collections import deque
from functools import cache
from typing import Any

import torch

VOCAB_SIZE = 60
EOS_TOKEN_ID = 3
BLOCK_SIZE = 8
NUM_SPEC_TOKENS = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": NUM_SPEC_TOKENS, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@cache
def block_hasher() -> Any:
    """How prefixes are named; the same names in every scheduler."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK_SIZE, sha256)


def make_scheduler(cls: Any, model: str, *, is_async: bool, num_blocks: int, has_drafts: bool) -> Any:
    """A scheduler of 8 rows, 64 positions, 24 tokens a step."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(
        model=model, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=24, enforce_eager=True,
        speculative_config=NGRAM if has_drafts else None,
    ).create_engine_config()  # fmt: skip
    config.scheduler_config.async_scheduling = is_async
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )


class Simulation:
    """A scheduler and the runner that it thinks it has; `lag` steps are under way when a step's ids come back."""

    def __init__(self, scheduler: Any, lag: int, seed: int) -> None:
        self.scheduler = scheduler
        self.lag = lag
        self.seed = seed
        self.under_way: deque[tuple[Any, Any]] = deque()
        self.delivered: dict[str, list[int]] = {}
        self._num_sampled: dict[str, int] = {}
        self._random = random.Random(seed)

    def add(self, name: str, prompt: list[int], **params: Any) -> None:
        """A request that comes in."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        client = params.pop("client_index", 0)
        sampling = SamplingParams(temperature=0.0, **params)
        if not sampling.ignore_eos:
            sampling._eos_token_id = EOS_TOKEN_ID
        request = Request(name, prompt, sampling, None, client, arrival_time=0.0, block_hasher=block_hasher())
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """A client that goes away."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """Schedules a step; what the oldest step under way sampled comes back, once there are enough of them."""
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.under_way.append((scheduled, self._sample(scheduled)))
        if not self.under_way or (len(self.under_way) <= self.lag and self.scheduler.has_requests()):
            return None
        scheduled, sampled = self.under_way.popleft()
        outputs = self.scheduler.update_from_output(scheduled, sampled)
        for batch in outputs.values():
            for output in batch.outputs:
                self.delivered.setdefault(output.request_id, []).extend(output.new_token_ids)
        if self.lag == 0:
            self._draft()
        return outputs

    def _next_id(self, name: str) -> int:
        count = self._num_sampled[name] = self._num_sampled.get(name, 0) + 1
        return random.Random(f"{self.seed} {name} {count}").randrange(VOCAB_SIZE)

    def _sample(self, scheduled: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(scheduled.num_scheduled_tokens)
        self._random.shuffle(names)  # the runner's rows are in an order of their own
        ids = []
        for name in names:
            if self.scheduler.requests[name].is_prefill_chunk:
                ids.append([])
                continue
            num_drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            ids.append([self._next_id(name) for _ in range(1 + self._random.randint(0, num_drafts))])
        return ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, ids)

    def _draft(self) -> None:
        from vllm.v1.outputs import DraftTokenIds

        if self.scheduler.num_spec_tokens == 0:
            return
        names = [request.request_id for request in self.scheduler.running]
        drafts = [[self._random.randrange(VOCAB_SIZE)] * self._random.randint(0, NUM_SPEC_TOKENS) for _ in names]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))


def random_request(rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    """A prompt, one of a few beginnings so that prefixes repeat, and what its sampling takes."""
    beginning = [[5] * 9, [6, 7] * 5, [8]][rng.randrange(3)]
    prompt = beginning + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(30))]
    params: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 9, 30, 100])}
    if rng.random() < 0.4:
        params["stop_token_ids"] = rng.sample(range(10, VOCAB_SIZE), rng.choice([1, 2, 12]))
    if rng.random() < 0.4:
        params["ignore_eos"] = True
    if rng.random() < 0.2:
        params["client_index"] = rng.randrange(3)
    return prompt, params
