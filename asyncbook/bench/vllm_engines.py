"""Engines of real vLLM side by side in one process, stock and with the plugin, with a clock on their bookkeeping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

MODES = ("stock", "embedded", "sidecar")
PARTS = ("_bookkeeping_sync", "_update_states", "update_from_output", "process_outputs", "step")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# From the least on, evenly: requests fill a block of the cache at different steps.
MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 16, 144


@dataclass
class Arm:
    """An engine and what its parts took, in nanoseconds a step: of the clock, and of the thread's own CPU time, which
    other programs on the machine do not stretch."""

    mode: str
    llm: Any
    num_steps: int = 0
    num_tokens: int = 0
    ns: dict[str, list[int]] = field(default_factory=lambda: {part: [] for part in PARTS})
    cpu_ns: dict[str, list[int]] = field(default_factory=lambda: {part: [] for part in PARTS})
    outputs: dict[str, list[int]] = field(default_factory=dict)

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    @property
    def runner(self) -> Any:
        return self.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def step(self) -> None:
        """One step of the engine, timed whole; its outputs are kept."""
        finished = timed(self, "step", self.engine.step)()
        self.num_steps += 1
        for output in finished:
            token_ids = output.outputs[0].token_ids
            self.num_tokens += len(token_ids) - len(self.outputs.get(output.request_id, ()))
            self.outputs[output.request_id] = list(token_ids)

    def forget(self) -> None:
        """Starts to measure anew."""
        for times in (self.ns, self.cpu_ns):
            for part in PARTS:
                times[part].clear()
        self.num_steps = self.num_tokens = 0


def make_arm(mode: str, model: str, **options: Any) -> Arm:
    """An engine of a mode, its parts timed."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else nearly all memory that the machine has
    from vllm import LLM  # type: ignore[import-not-found]

    from asyncbook.integrations import vllm as plugin
    from asyncbook.integrations.vllm_book import MODE_VARIABLE

    plugin.let_vllm_look_around()
    if mode != "stock":
        if (why_not := plugin.reason_against()) is not None:
            raise RuntimeError(why_not)
        os.environ[MODE_VARIABLE] = mode
        plugin.switch_on()
    try:
        arm = Arm(mode, LLM(model=model, **options))
    finally:
        plugin.switch_off()
        os.environ.pop(MODE_VARIABLE, None)
    _put_clocks(arm)
    return arm


def _put_clocks(arm: Arm) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found]

    from asyncbook.integrations.vllm_runner import bookkeeping_sync

    runner, scheduler, processor = arm.runner, arm.scheduler, arm.engine.output_processor
    keep = GPUModelRunner._bookkeeping_sync if arm.mode == "stock" else bookkeeping_sync
    runner._bookkeeping_sync = timed(arm, "_bookkeeping_sync", partial(keep, runner))
    runner._update_states = timed(arm, "_update_states", runner._update_states)
    scheduler.update_from_output = timed(arm, "update_from_output", scheduler.update_from_output)
    processor.process_outputs = timed(arm, "process_outputs", processor.process_outputs)


def timed(arm: Arm, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with what each call took noted under `part`."""
    ns, cpu_ns = arm.ns[part], arm.cpu_ns[part]

    def call(*arguments: Any, **named: Any) -> Any:
        start_cpu_ns, start_ns = time.thread_time_ns(), time.perf_counter_ns()
        result = function(*arguments, **named)
        ns.append(time.perf_counter_ns() - start_ns)
        cpu_ns.append(time.thread_time_ns() - start_cpu_ns)
        return result

    return call


def add_requests(arm: Arm, num_requests: int, max_tokens: int, vocab_size: int, seed: int) -> None:
    """Requests of random ids that run for `max_tokens` steps and end by length, greedy."""
    from vllm import SamplingParams

    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for number, num_prompt_tokens in enumerate(rng.integers(MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS, num_requests)):
        prompt = rng.integers(0, vocab_size, num_prompt_tokens).tolist()
        arm.engine.add_request(f"{num_requests}-{number}", {"prompt_token_ids": prompt}, params)
