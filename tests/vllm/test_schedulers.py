"""The schedulers with columns against vLLM's own, on any sequence of what can happen to them, without a model."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.vllm.simulation import Simulation, make_scheduler, random_request
from tests.vllm.watch import difference, plain, scheduler_state

STEPS = 400
# Whether it is asynchronous (steps under way then), blocks of the cache, whether there are drafts.
CASES = {
    "synchronous": (0, 100, False),
    "synchronous, drafts": (0, 100, True),
    "synchronous, few blocks": (0, 22, False),
    "synchronous, few blocks, drafts": (0, 22, True),
    "asynchronous": (1, 100, False),
    "asynchronous, few blocks": (1, 22, False),
    "asynchronous, three under way": (3, 30, False),
}


def make_pair(name: str, seed: int) -> tuple[Simulation, Simulation]:
    """vLLM's own and the one with columns."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from asyncbook.integrations.vllm_scheduler import scheduler_cls

    lag, num_blocks, has_drafts = CASES[name]
    model = os.environ["ASYNCBOOK_VLLM_MODEL"]
    one, other = (
        Simulation(
            make_scheduler(cls, model, is_async=lag > 0, num_blocks=num_blocks, has_drafts=has_drafts), lag, seed
        )
        for cls in (AsyncScheduler if lag else Scheduler, scheduler_cls(lag > 0))
    )
    return one, other


def operate(rng: random.Random, simulations: tuple[Simulation, ...], number: int) -> None:
    """Something that happens between two steps, to all alike."""
    scheduler = simulations[0].scheduler
    chance = rng.random()
    if chance < 0.35 and len(scheduler.requests) < 14:
        prompt, params = random_request(rng)
        for simulation in simulations:
            simulation.add(f"request-{number}", list(prompt), **params)
    elif chance < 0.41 and scheduler.requests:
        name = rng.choice(sorted(scheduler.requests))
        for simulation in simulations:
            simulation.abort(name)
    elif chance < 0.43:
        for simulation in simulations:
            simulation.scheduler.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_any_sequence_is_equal(name: str, seed: int) -> None:
    stock, mine = make_pair(name, seed)
    rng = random.Random(seed)
    grown = 0
    grow = mine.scheduler._grow

    def counted(*arguments: Any) -> Any:
        nonlocal grown
        outputs = grow(*arguments)
        grown += len(outputs)
        return outputs

    mine.scheduler._grow = counted
    for number in range(STEPS):
        operate(rng, (stock, mine), number)
        outputs = [plain(simulation.step()) for simulation in (stock, mine)]
        assert difference(*outputs, f"step {number}, outputs") is None
        states = [scheduler_state(simulation.scheduler) for simulation in (stock, mine)]
        assert difference(*states, f"step {number}, state") is None
    assert grown > STEPS / 2  # the columns did something
