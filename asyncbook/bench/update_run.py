"""How `asyncbook bench updates` measures: every round runs all arms of a cell in turn, so that a busy moment of the
machine hits all of them, and ratios are taken within a round."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter, perf_counter_ns

import numpy as np

from asyncbook.bench.update_arms import Arm, make_arms
from asyncbook.bench.update_cells import MAX_IDS, MAX_MODEL_LEN, Cell, Step, make_prompt_lengths, make_steps

SAMPLE_NS = 10_000  # a sample of the fastest arm lasts at least this long, and is the mean of as many calls
MAX_CALLS = 32
ROOM = MAX_MODEL_LEN // 2 // MAX_IDS  # calls between two rewinds
MIN_ROUNDS, MAX_ROUNDS = 15, 2000
NUM_CHECKED_CALLS = 6


class ArmsDiffer(Exception):
    """Two arms left different arrays behind."""


@dataclass(frozen=True)
class Settings:
    """`seconds`: to measure a cell, about (longer where `MIN_ROUNDS` take longer). `calls`: in a row, for one sample;
    None: see SAMPLE_NS. A single call finds its arrays gone from the caches, as in an engine; many find them there."""

    seconds: float
    seed: int = 0
    shuffled: bool = False
    calls: int | None = None


@dataclass(frozen=True)
class Times:
    """Of one arm in one cell: nanoseconds a call (each sample the mean of `calls` calls), and how many times faster
    than the first arm, round by round."""

    arm: str
    samples: int
    calls: int
    p25_ns: float
    p50_ns: float
    p75_ns: float
    p99_ns: float
    speedup_p25: float
    speedup: float
    speedup_p75: float


@dataclass(frozen=True)
class Result:
    """A cell and its arms, the first one the loop."""

    cell: Cell
    times: list[Times]

    def of(self, arm: str) -> Times | None:
        return next((times for times in self.times if times.arm == arm), None)


def check_equal(cell: Cell, arms: Sequence[Arm]) -> None:
    """Raises `ArmsDiffer` naming the arm, array and row."""
    expected = dict(arms[0].state.arrays())
    for arm in arms[1:]:
        for name, array in arm.state.arrays():
            if not np.array_equal(array, expected[name]):
                row = int(np.flatnonzero((array != expected[name]).reshape(cell.size, -1).any(1))[0])
                raise ArmsDiffer(f"{cell}: {arm.name} and {arms[0].name} differ in row {row} of {name}")


def _time(arm: Arm, steps: Sequence[Step]) -> float:
    """Nanoseconds a call."""
    run = arm.run
    start_ns = perf_counter_ns()
    for step in steps:
        run(step)
    return (perf_counter_ns() - start_ns) / len(steps)


def _calls_that_take(ns: int, arms: Sequence[Arm], steps: Sequence[Step]) -> int:
    fastest_ns = min(min(_time(arm, steps[:1]) for _ in range(3)) for arm in arms)
    return int(np.clip(ns / fastest_ns, 1, MAX_CALLS))


def run_cell(cell: Cell, settings: Settings) -> Result:
    """Measures one cell. Raises `ArmsDiffer`."""
    rng = np.random.default_rng([settings.seed, cell.size, cell.num_rows])
    prompt_lengths = make_prompt_lengths(cell.size, rng)
    if cell.work in ("mask", "tensor"):
        prompt_lengths[:] = 0  # the whole mask is to be seen
    steps = make_steps(cell, rng, settings.shuffled)
    with _one_torch_thread() if cell.work == "tensor" else nullcontext():
        return measure(cell, make_arms(cell, prompt_lengths, steps), steps, settings)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Work this small only loses by being shared."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def measure(cell: Cell, arms: Sequence[Arm], steps: Sequence[Step], settings: Settings) -> Result:
    """The rounds of one cell."""
    for arm in arms:
        for step in islice(cycle(steps), NUM_CHECKED_CALLS):  # the first call compiles
            arm.run(step)
    check_equal(cell, arms)
    calls = settings.calls or _calls_that_take(SAMPLE_NS, arms, steps)
    todo = list(islice(cycle(steps), calls))
    samples: list[list[float]] = [[] for _ in arms]
    gc.collect()
    gc.disable()  # the loops make no garbage that needs it
    try:
        end_s, used = perf_counter() + settings.seconds, ROOM
        while len(samples[0]) < MIN_ROUNDS or (perf_counter() < end_s and len(samples[0]) < MAX_ROUNDS):
            if used + calls > ROOM:
                _rewind(arms)
                used = 0
            used += calls
            _run_round(arms, todo, samples)
    finally:
        gc.enable()
    check_equal(cell, arms)
    return Result(cell, _summarize(arms, samples, calls))


def _rewind(arms: Sequence[Arm]) -> None:
    for arm in arms:
        arm.state.rewind()


def _run_round(arms: Sequence[Arm], todo: Sequence[Step], samples: list[list[float]]) -> None:
    """Starts with another arm each time: nobody always runs behind the slowest."""
    first = len(samples[0]) % len(arms)
    for index in (*range(first, len(arms)), *range(first)):
        samples[index].append(_time(arms[index], todo))


def _summarize(arms: Sequence[Arm], samples: list[list[float]], calls: int) -> list[Times]:
    rounds = np.array(samples)
    ratios = rounds[0] / rounds
    results = []
    for arm, ns, ratio in zip(arms, rounds, ratios, strict=True):
        p25, p50, p75, p99 = np.percentile(ns, (25, 50, 75, 99)).tolist()
        low, middle, high = np.percentile(ratio, (25, 50, 75)).tolist()
        results.append(Times(arm.name, ns.size, calls, p25, p50, p75, p99, low, middle, high))
    return results


def run_all(cells: Sequence[Cell], run: Callable[[Cell], Result], on_result: Callable[[Cell, Result], None]) -> bool:
    """Runs the cells; False where Ctrl-C ended it early. What was measured has been handed to `on_result`."""
    gc.collect()
    gc.freeze()  # what is there by now stays: the collections between cells need not look at it
    try:
        for cell in cells:
            on_result(cell, run(cell))
    except KeyboardInterrupt:
        return False
    finally:
        gc.unfreeze()
    return True
