"""Steps at fixed times, arms in turn, and what each step cost the runner.

A round gives every arm, in random order, a few steps at the interval, so that a busy moment of the machine hits all of
them. The first steps of a round follow a pause, which a running engine has not; they are made and not counted.

**Missed sends.** In an engine with a fixed pace, step k is due at start + k * interval, whatever came before. Where an
arm has more to do in an interval than fits (the call, and the wait for a step that is not there in time), the rest
delays the steps after it, and their time counts from when they would have been due: `corrected_ns`, as wrk2 and
HdrHistogram do, so one long stall shows in every step that it delays. It is reckoned from the arm's own busy time; a
timer that wakes late is not the arm's. `runner_ns` is the bare duration of the call.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncbook.bench.arms import LOOP, Arm, OpenArm, check_equal, settle
from asyncbook.bench.story import Story
from asyncbook.bench.workloads import Workload, make_steps

LEAD_IN_STEPS = 5
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


@dataclass(frozen=True)
class Pace:
    """`num_steps` to count for each arm, in rounds of `round_steps`, each after `LEAD_IN_STEPS` more."""

    interval_ms: float
    num_steps: int
    round_steps: int = 25

    @property
    def num_rounds(self) -> int:
        """The first one warms up and is not counted."""
        return 1 + -(-self.num_steps // self.round_steps)

    @property
    def total_steps(self) -> int:
        return self.num_rounds * (LEAD_IN_STEPS + self.round_steps)

    def seconds(self, num_arms: int) -> float:
        """About how long a run takes, the start of its arms aside."""
        return self.total_steps * num_arms * self.interval_ms / 1000


@dataclass
class Costs:
    """Of each counted step of an arm, in nanoseconds."""

    runner_ns: list[int] = field(default_factory=list)  # the call of submit
    corrected_ns: list[int] = field(default_factory=list)  # the same, from when the step was due
    published_ns: list[int] = field(default_factory=list)  # from the call until a reader could see the step
    apply_ns: list[int] = field(default_factory=list)  # what its bookkeeper worked on it
    read_ns: list[int] = field(default_factory=list)  # what the runner paid to look at the step and take its outputs
    num_late: int = 0  # steps that began late, because of the steps before


@dataclass
class Measured:
    """By arm. Where `is_complete` is False, Ctrl-C ended the run early and nothing was compared."""

    costs: dict[str, Costs]
    is_complete: bool


def _pace(arm: Arm, steps: range, interval_ns: int, costs: Costs) -> None:
    """A few steps, each read half an interval after it began, as a runner does while its device is busy.

    None is made up for: steps on each other's heels would find the caches warm, as an engine's never do.
    """
    now = time.monotonic_ns
    behind_ns = 0  # what is left to do of earlier steps when the next one is due
    for number, step in enumerate(steps):
        start_ns = now()
        arm.submit(step)
        runner_ns = now() - start_ns
        _sleep_until(start_ns + interval_ns // 2)
        read_start_ns = now()
        arm.wait(step)
        seen = arm.read(step)
        read_ns = now() - read_start_ns
        if number >= LEAD_IN_STEPS:
            costs.num_late += behind_ns > 0
            costs.runner_ns.append(runner_ns)
            costs.corrected_ns.append(behind_ns + runner_ns)
            costs.published_ns.append(seen.published_ns - start_ns)
            costs.apply_ns.append(seen.apply_ns)
            costs.read_ns.append(read_ns)
        behind_ns = max(behind_ns + runner_ns + read_ns - interval_ns, 0)
        _sleep_until(start_ns + interval_ns)


def _sleep_until(when_ns: int) -> None:
    left_ns = when_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)


def measure(
    workload: Workload,
    num_rows: int,
    pace: Pace,
    openers: Mapping[str, OpenArm],
    on_round: Callable[[], None] = lambda: None,
    seed: int = 0,
    story: Story | None = None,
) -> Measured:
    """Runs the arms. Raises `ArmsDiffer` where they disagree on what was committed or delivered. `story` is for
    workloads with text."""
    steps = make_steps(workload, num_rows, pace.total_steps, seed, story)
    order = np.random.default_rng(seed)
    costs = {name: Costs() for name in openers}
    interval_ns, round_length = int(pace.interval_ms * 1e6), LEAD_IN_STEPS + pace.round_steps
    with ExitStack() as stack:
        try:
            arms = {name: stack.enter_context(open_arm(steps)) for name, open_arm in openers.items()}
            gc.collect()
            gc.freeze()  # as engines do: what is there by now is not looked at again
            stack.callback(gc.unfreeze)
            for start in range(0, pace.total_steps, round_length):
                for name in order.permutation(list(arms)):
                    kept = costs[name] if start else Costs()
                    _pace(arms[name], range(start, start + round_length), interval_ns, kept)
                    settle(name, arms[name])
                on_round()
            check_equal(arms, num_rows)
        except KeyboardInterrupt:
            return Measured(costs, is_complete=False)
    return Measured(costs, is_complete=True)


def percentiles_us(durations_ns: list[int]) -> dict[str, float]:
    """By name, in microseconds."""
    values = np.percentile(durations_ns, list(PERCENTILES.values())) / 1000
    return {name: round(float(value), 1) for name, value in zip(PERCENTILES, values, strict=True)}


def summary(measured: Measured) -> dict[str, dict[str, Any]]:
    """By arm that has steps: percentiles in microseconds, the share of steps that began late, and what the runner paid
    as a share of the loop's median, 90th and 99th percentile."""
    arms: dict[str, dict[str, Any]] = {}
    for name, cost in measured.costs.items():
        if not cost.runner_ns:
            continue
        runner = percentiles_us(cost.runner_ns)
        arms[name] = {
            "steps": len(cost.runner_ns),
            "runner_us": runner,
            "corrected_us": percentiles_us(cost.corrected_ns),
            "published_us": percentiles_us(cost.published_ns),
            "apply_us": percentiles_us(cost.apply_ns),
            "read_us": percentiles_us(cost.read_ns),
            "share_late": round(cost.num_late / len(cost.runner_ns), 4),
        }
        if LOOP in arms:
            loop = arms[LOOP]["runner_us"]
            arms[name]["share_of_loop"] = {p: round(runner[p] / loop[p], 4) for p in ("p50", "p90", "p99")}
    return arms


def histogram_us(durations_ns: list[int], buckets_per_decade: int = 20) -> dict[str, list[float]]:
    """Log buckets for the distribution in a file: upper ends in microseconds and counts, empty ones left out."""
    keys = np.ceil(np.log10(np.maximum(np.array(durations_ns), 100) / 1000) * buckets_per_decade)
    found, counts = np.unique(keys, return_counts=True)
    return {"upper_us": [round(float(10 ** (key / buckets_per_decade)), 3) for key in found], "counts": counts.tolist()}
