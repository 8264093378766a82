"""Everything that can be seen of a run of vLLM, after each of its steps, in plain values that can be compared.

What two runs of the same requests cannot share is left out, and nothing else: points in time, and what is measured.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

TIMES = frozenset({"timestamp", "arrival_time", "_block_hasher", "last_log_time"})


def plain(value: Any) -> Any:
    """A value as lists, dicts, strings and numbers; arrays and tensors with their dtype."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, torch.Tensor | np.ndarray):
        return [type(value).__name__, str(value.dtype), value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, msgspec.Struct):
        return _fields(value, value.__struct_fields__)
    if hasattr(value, "_fields"):  # a named tuple
        return _fields(value, value._fields)
    if isinstance(value, Sequence) or type(value).__name__ == "ConstantList":
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return _fields(value, [item.name for item in dataclasses.fields(value)])
    if hasattr(value, "__dict__"):
        return type(value).__name__, _fields(value, sorted(vars(value)))
    return repr(value)


def _fields(value: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: plain(getattr(value, name)) for name in names if name not in TIMES}


@dataclass
class Run:
    """What a run showed: after each step of the scheduler and of the model runner, and at its end."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    runner_steps: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    num_preemptions: int = 0


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def runner_of(llm: Any) -> Any:
    """Its model runner."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """All of each request, who runs and who waits, and how full the cache is."""
    return {
        "requests": {name: _fields(request, sorted(vars(request))) for name, request in scheduler.requests.items()},
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "finished": sorted(scheduler.finished_req_ids),
        "usage": scheduler.kv_cache_manager.usage,
    }


def runner_state(runner: Any) -> dict[str, Any]:
    """The batch's arrays as far as they are in use, and its requests' outputs."""
    batch = runner.input_batch
    n = batch.num_reqs
    lengths = batch.num_tokens_no_spec[:n].tolist()
    return {
        "req_ids": list(batch.req_ids),
        "req_id_to_index": dict(batch.req_id_to_index),
        "num_tokens_no_spec": lengths,
        "token_ids": [batch.token_ids_cpu[row, :length].tolist() for row, length in enumerate(lengths)],
        "is_token_ids": [batch.is_token_ids[row, :length].tolist() for row, length in enumerate(lengths)],
        "outputs": {name: list(request.output_token_ids) for name, request in runner.requests.items()},
        "req_output_token_ids": plain(batch.req_output_token_ids),
        "generators": {row: _digest(one.get_state()) for row, one in sorted(batch.generators.items())},
    }


def _digest(state: Any) -> str:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).hexdigest()


class Watch:
    """Records a run of an engine while it is entered."""

    def __init__(self, llm: Any) -> None:
        self.run = Run()
        self._scheduler, self._runner = scheduler_of(llm), runner_of(llm)

    def __enter__(self) -> Run:
        scheduler, runner, run = self._scheduler, self._runner, self.run
        update, sample, preempt = scheduler.update_from_output, runner.sample_tokens, scheduler._preempt_request

        def update_from_output(scheduler_output: Any, runner_output: Any) -> Any:
            outputs = update(scheduler_output, runner_output)
            shown = {"outputs": plain(outputs), "of the runner": plain(runner_output.sampled_token_ids)}
            run.steps.append(shown | scheduler_state(scheduler))
            return outputs

        def sample_tokens(grammar_output: Any) -> Any:
            output = sample(grammar_output)
            run.runner_steps.append({"output": plain(output)} | runner_state(runner))
            return output

        def preempt_request(*arguments: Any, **named: Any) -> Any:
            run.num_preemptions += 1
            return preempt(*arguments, **named)

        scheduler.update_from_output = update_from_output
        scheduler._preempt_request = preempt_request
        runner.sample_tokens = sample_tokens
        return run

    def __exit__(self, *_: object) -> None:
        del self._scheduler.update_from_output, self._scheduler._preempt_request, self._runner.sample_tokens


Requests = Sequence[tuple[Any, Any]]  # prompt ids and SamplingParams


def run_requests(
    llm: Any, requests: Requests, after_step: Callable[[Any, int], None] | None = None, at_once: int = 10_000
) -> Run:
    """Runs the requests, `at_once` of them joining a step, and shows all. `after_step(engine, step)` may abort."""
    engine = llm.llm_engine
    waiting = list(enumerate(requests))
    with Watch(llm) as run:
        step = 0
        while waiting or engine.has_unfinished_requests():
            for number, (prompt, params) in waiting[:at_once]:
                engine.add_request(f"request-{number}", {"prompt_token_ids": list(prompt)}, params)
            del waiting[:at_once]
            for output in engine.step():
                run.results.setdefault(output.request_id, []).append(_result(output))
            step += 1
            if after_step is not None:
                after_step(engine, step)
    return run


def _result(output: Any) -> dict[str, Any]:
    """A `RequestOutput`, all of it but its times."""
    shown = {name: plain(value) for name, value in vars(output).items() if name not in ("metrics", "lora_request")}
    shown["outputs"] = [
        {name: plain(getattr(one, name)) for name in one.__dataclass_fields__} for one in output.outputs
    ]
    return shown


def difference(one: Any, other: Any, path: str = "") -> str | None:
    """Where two plain values differ first, and how; None where they do not. NaN is like NaN."""
    if type(one) is not type(other):
        return f"{path}: {one!r} is no {other!r}"
    if isinstance(one, dict):
        if list(one) != list(other):
            return f"{path}: keys {list(one)} and {list(other)}"
        return next(filter(None, (difference(one[key], other[key], f"{path}.{key}") for key in one)), None)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{path}: {len(one)} and {len(other)} entries"
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)), None)
    is_same = one == other or (isinstance(one, float) and one != one and other != other)
    return None if is_same else f"{path}: {one!r} and {other!r}"


def count_fields(value: Any) -> int:
    """How many single values a plain value holds."""
    if isinstance(value, dict):
        return sum(map(count_fields, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(count_fields, value))
    return 1
