"""An engine's loop around a forward pass of given length: what of the bookkeeping is hidden behind it.

    lag 0   pass N -> its ids -> submit N, wait until it is applied, read it -> pass N+1
    lag 1   pass N -> its ids -> pass N+1 is launched, and while it runs: submit N, read N-1

With lag 1 the next pass does not wait for the book, as in engines with asynchronous scheduling: what decides is who
does the bookkeeping, and whether it is done before the pass ends. Where the runner's thread runs the pass itself, it
does nothing beside the pass: both calls come before pass N+1, and whoever else keeps the book does step N beside it.

A step's bookkeeping is *exposed* as far as the gap between two passes is longer than without any bookkeeping.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from asyncbook.bench.arms import Arm, OpenArm, check_equal, settle
from asyncbook.bench.pacing import percentiles_us
from asyncbook.bench.workloads import Steps
from asyncbook.demo.timeline import FORWARD, LAUNCH, WAIT, Span, Timeline

LIMIT = "forward only"
SPIN_NS = 100_000  # at the end of a timed wait, for the timer alone wakes late


class Forward(Protocol):
    """What computes the passes. `runs_in_thread`: the launch itself takes as long as the pass."""

    runs_in_thread: bool

    def launch(self) -> int:
        """Begins a pass, behind the one before it; returns when it began, on `time.monotonic_ns()`."""

    def wait(self) -> int:
        """Until the pass has ended; returns when that was."""


class TimedForward:
    """A device that is busy for a time and needs nothing of the CPU but a wait, which spins at its end as the wait for
    a GPU does."""

    runs_in_thread = False

    def __init__(self, forward_ms: float) -> None:
        self._forward_ns = int(forward_ms * 1e6)
        self._end_ns = 0

    def launch(self) -> int:
        start_ns = max(time.monotonic_ns(), self._end_ns)
        self._end_ns = start_ns + self._forward_ns
        return start_ns

    def wait(self) -> int:
        left_ns = self._end_ns - SPIN_NS - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        while time.monotonic_ns() < self._end_ns:
            pass
        return self._end_ns


class SpinForward:
    """A pass on the CPU, in the runner's thread, that holds the interpreter's lock: nothing in the same process can be
    done beside it but what the interpreter switches to."""

    runs_in_thread = True

    def __init__(self, forward_ms: float) -> None:
        self._forward_ns = int(forward_ms * 1e6)
        self._end_ns = 0

    def launch(self) -> int:
        start_ns = time.monotonic_ns()
        self._end_ns = start_ns + self._forward_ns
        while time.monotonic_ns() < self._end_ns:
            pass
        self._end_ns = time.monotonic_ns()
        return start_ns

    def wait(self) -> int:
        return self._end_ns


class ModelForward:
    """The demo's model with random weights, on the CPU: a pass takes what it takes."""

    runs_in_thread = True

    def __init__(self, forward_ms: float) -> None:
        import torch

        from asyncbook.demo.engine import Engine
        from asyncbook.demo.model import LlamaConfig, random_llama

        torch.set_num_threads(1)
        self._engine = Engine(random_llama(LlamaConfig(), seed=0), num_rows=8, max_model_len=64, chunk=16)
        self._engine.warm_up()
        self._is_decoding = torch.ones(8, dtype=torch.bool)
        self._end_ns = 0

    def launch(self) -> int:
        start_ns = time.monotonic_ns()
        self._engine.num_tokens.fill_(16)
        self._engine.decode(self._is_decoding)
        self._end_ns = time.monotonic_ns()
        return start_ns

    def wait(self) -> int:
        return self._end_ns


FORWARDS: dict[str, Callable[[float], Forward]] = {"sleep": TimedForward, "spin": SpinForward, "model": ModelForward}


@dataclass
class LoopRun:
    """What one arm's loop came to, step by step in nanoseconds. `gap_ns` lies between two passes; `book_ns` is what the
    runner's thread worked on the book, `wait_ns` what it waited for it, `apply_ns` what was worked elsewhere; `lags`,
    how many steps the book was behind when a step was submitted."""

    way: str
    seconds: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    gap_ns: list[int] = field(default_factory=list)
    forward_ns: list[int] = field(default_factory=list)
    book_ns: list[int] = field(default_factory=list)
    wait_ns: list[int] = field(default_factory=list)
    apply_ns: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    runner_cpu_s: float = 0.0
    sidecar_cpu_s: float = 0.0
    timeline: Timeline = field(default_factory=Timeline)


def cpu_s_of(pid: int | None) -> float:
    """CPU time of all threads of a process so far, 0 without one."""
    if pid is None:
        return 0.0
    runtimes_ns = (int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(runtimes_ns) / 1e9


class EngineLoop:
    """Runs stretches of `steps` with one arm, None for the passes alone. What is measured goes into `run`."""

    def __init__(self, forward: Forward, arm: Arm | None, steps: Steps, lag: int) -> None:
        assert lag in (0, 1)
        self.run = LoopRun("")
        self._forward, self._arm, self._steps, self._lag = forward, arm, steps, lag
        self._book_ns = self._wait_ns = 0

    def stretch(self, numbers: range) -> None:
        """Some steps. Nothing is in flight before and after them."""
        run, pid = self.run, self._arm.sidecar_pid if self._arm is not None else None
        start_s, cpu_s, sidecar_s = time.monotonic(), time.process_time(), cpu_s_of(pid)
        start_ns = self._launch(numbers[0])
        for number in numbers:
            end_ns = self._forward.wait()
            run.forward_ns.append(end_ns - start_ns)
            run.timeline.device.append(Span(FORWARD, number + 1, start_ns, end_ns))
            self._book_ns = self._wait_ns = 0
            if number < numbers[-1]:
                start_ns = self._between(number, has_earlier=number > numbers[0])
                run.gap_ns.append(start_ns - end_ns)
                run.book_ns.append(self._book_ns)
                run.wait_ns.append(self._wait_ns)
            else:
                self._finish(number)
        run.seconds += time.monotonic() - start_s
        run.runner_cpu_s += time.process_time() - cpu_s
        run.sidecar_cpu_s += cpu_s_of(pid) - sidecar_s
        run.num_steps += len(numbers)
        run.num_tokens += int((self._steps.sampled[numbers.start : numbers.stop] >= 0).sum())

    def _between(self, number: int, has_earlier: bool) -> int:
        """From the end of a pass until the next one is launched and the book is done with. When it began."""
        if self._arm is None:
            return self._launch(number + 1)
        if self._lag == 0:
            self._submit(number)
            self._read(number)
            return self._launch(number + 1)
        if not self._forward.runs_in_thread:
            start_ns = self._launch(number + 1)
        self._submit(number)
        if has_earlier:
            self._read(number - 1)
        return self._launch(number + 1) if self._forward.runs_in_thread else start_ns

    def _finish(self, number: int) -> None:
        """After the last pass."""
        if self._arm is not None:
            self._submit(number)
            for earlier in range(number - self._lag, number + 1):
                self._read(earlier)

    def _launch(self, number: int) -> int:
        self.run.timeline.step = number + 1
        with self.run.timeline.span(LAUNCH):
            return self._forward.launch()

    def _submit(self, number: int) -> None:
        assert self._arm is not None
        self.run.lags.append(number - self._arm.num_applied)
        start_ns = time.monotonic_ns()
        self._arm.submit(number)
        self._book_ns += self._add_span("submit", number, start_ns)

    def _read(self, number: int) -> None:
        assert self._arm is not None
        start_ns = time.monotonic_ns()
        self._arm.wait(number)
        self._wait_ns += self._add_span(WAIT, number, start_ns)
        start_ns = time.monotonic_ns()
        seen = self._arm.read(number)
        self._book_ns += self._add_span("outputs", number, start_ns)
        if self._arm.works_elsewhere:
            self.run.apply_ns.append(seen.apply_ns)
        self.run.timeline.applied(number + 1, seen.published_ns, seen.apply_ns)

    def _add_span(self, name: str, number: int, start_ns: int) -> int:
        """Duration in nanoseconds."""
        end_ns = time.monotonic_ns()
        self.run.timeline.runner.append(Span(name, number + 1, start_ns, end_ns))
        return end_ns - start_ns


def measure(
    steps: Steps,
    openers: Mapping[str, OpenArm],
    make_forward: Callable[[], Forward],
    lag: int,
    stretch_steps: int,
    on_stretch: Callable[[], None] = lambda: None,
) -> tuple[list[LoopRun], bool]:
    """The limit and every arm, in stretches and in random order; the first stretch warms up and is not counted. False
    where Ctrl-C ended it early. Raises `ArmsDiffer`."""
    order = np.random.default_rng(steps.num_rows)
    runs = {name: LoopRun(name) for name in (LIMIT, *openers)}
    with ExitStack() as stack:
        try:
            arms = {name: stack.enter_context(open_arm(steps)) for name, open_arm in openers.items()}
            loops = {name: EngineLoop(make_forward(), arms.get(name), steps, lag) for name in runs}
            gc.collect()
            gc.freeze()  # as engines do
            stack.callback(gc.unfreeze)
            for start in range(0, steps.num_steps, stretch_steps):
                for name in order.permutation(list(loops)):
                    loops[name].run = runs[name] if start else LoopRun(name)
                    loops[name].stretch(range(start, min(start + stretch_steps, steps.num_steps)))
                    if name in arms:
                        settle(name, arms[name])
                on_stretch()
            check_equal(arms, steps.num_rows)
        except KeyboardInterrupt:
            return list(runs.values()), False
    return list(runs.values()), True


def summary(runs: Sequence[LoopRun]) -> dict[str, dict[str, Any]]:
    """By arm that has steps. `exposed_us`: the median gap beyond the limit's. `hidden`: what share of the step's
    bookkeeping, wherever it was done, does not show there. CPU time is a step's, spins of the passes included."""
    limit = next(run for run in runs if run.way == LIMIT)
    arms: dict[str, dict[str, Any]] = {}
    for run in runs:
        if not run.gap_ns or not limit.gap_ns:
            continue
        exposed_us = max(float(np.median(run.gap_ns) - np.median(limit.gap_ns)) / 1000, 0.0)
        work_us = sum(float(np.median(ns)) for ns in (run.book_ns, run.apply_ns) if ns) / 1000
        arms[run.way] = {
            "steps_per_s": round(run.num_steps / run.seconds, 2),
            "tokens_per_s": round(run.num_tokens / run.seconds, 1),
            "gap_us": percentiles_us(run.gap_ns),
            "forward_us": percentiles_us(run.forward_ns),
            "exposed_us": round(exposed_us, 1),
            "work_us": round(work_us, 1),
            "hidden": round(max(1 - exposed_us / work_us, 0.0), 4) if work_us else None,
            "wait_us": percentiles_us(run.wait_ns),
            "lag_mean": round(float(np.mean(run.lags)), 3) if run.lags else None,
            "lag_max": max(run.lags, default=None),
            "runner_cpu_us": round(run.runner_cpu_s * 1e6 / run.num_steps, 1),
            "sidecar_cpu_us": round(run.sidecar_cpu_s * 1e6 / run.num_steps, 1),
        }
    return arms
