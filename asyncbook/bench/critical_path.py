"""`asyncbook bench critical-path`: what the runner pays a step, paced as an engine is, all arms in one run.

In each round every arm does a few steps at the given interval, so that a busy moment of the machine hits all of them.
What an arm was given is drawn from one seed; what it committed and delivered is compared at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

import asyncbook
from asyncbook import Book, BookConfig, Logprobs, RequestParams
from asyncbook.bench.per_row_loop import PerRowLoop

VOCAB_SIZE = 128_000
EOS_TOKEN_ID = VOCAB_SIZE - 1
NUM_PROMPT_TOKENS = 32
STEPS_PER_ROUND = 25
WARM_UP_STEPS = 25
PERCENTS = (50, 90, 99, 100)
PERCENTILES = ("p50", "p90", "p99", "max")
WITH_STOPS = RequestParams(eos_token_id=EOS_TOKEN_ID)
ARMS = ("loop", "embedded", "sidecar zmq", "sidecar ring")


@dataclass
class Costs:
    """Nanoseconds of each measured step: in the runner, and from the call until the step was published."""

    runner_ns: list[int] = field(default_factory=list)
    applied_ns: list[int] = field(default_factory=list)


class LoopArm:
    """The per-row loop."""

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self._loop = PerRowLoop(num_rows, max_model_len, NUM_PROMPT_TOKENS, EOS_TOKEN_ID)
        self.num_delivered = 0

    def step(self, sampled: np.ndarray, costs: Costs) -> None:
        start_ns = time.monotonic_ns()
        self._loop.submit(sampled)
        costs.runner_ns.append(time.monotonic_ns() - start_ns)
        costs.applied_ns.append(costs.runner_ns[-1])
        self.num_delivered += sum(len(ids) for _, ids, _ in self._loop.outputs)

    def history(self, row: int) -> np.ndarray:
        return self._loop.token_ids[row, NUM_PROMPT_TOKENS : self._loop.num_tokens_no_spec[row]]


class BookArm:
    """A book, embedded or with a sidecar."""

    def __init__(self, book: Book, num_rows: int, params: RequestParams = WITH_STOPS) -> None:
        self._book = book
        prompt = np.arange(NUM_PROMPT_TOKENS)
        self._rows = [book.admit(f"request-{row}", prompt, params) for row in range(num_rows)]
        self._batch = book.batch(self._rows)
        self.num_delivered = 0

    def step(self, sampled: np.ndarray, costs: Costs) -> None:
        logprobs = self._logprobs(sampled)
        start_ns = time.monotonic_ns()
        step = self._book.submit(self._batch, sampled, logprobs=logprobs)
        costs.runner_ns.append(time.monotonic_ns() - start_ns)
        self._book.wait_applied(step)
        costs.applied_ns.append(self._book.frame(step).published_ns - start_ns)
        self.num_delivered += sum(outputs.token_ids.size for outputs in self._book.poll_outputs())

    def _logprobs(self, sampled: np.ndarray) -> Logprobs | None:
        """What the sampler gives with a step."""
        return None

    def history(self, row: int) -> np.ndarray:
        return self._book.output_token_ids(self._rows[row])


Arm = LoopArm | BookArm


@contextmanager
def open_arm(name: str, num_rows: int, max_model_len: int) -> Iterator[Arm]:
    """An arm by its name in `ARMS`."""
    if name == "loop":
        yield LoopArm(num_rows, max_model_len)
        return
    config = BookConfig(
        max_num_reqs=num_rows,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        transport="ring" if name == "sidecar ring" else "zmq",
        idle_policy="cadence" if name == "sidecar ring" else "spin-then-sleep",
    )
    with asyncbook.open(config) if name == "embedded" else asyncbook.spawn(config) as book:
        yield BookArm(book, num_rows)


def _pace(sampled: np.ndarray, arm: Arm, costs: Costs, interval_ns: int) -> None:
    """Steps at fixed times. A step that comes late is not made up for: the next one keeps its own distance."""
    for ids in sampled:
        due_ns = time.monotonic_ns() + interval_ns
        arm.step(ids, costs)
        time.sleep(max(due_ns - time.monotonic_ns(), 0) / 1e9)


def measure(
    num_rows: int, num_steps: int, interval_ms: float, on_round: Callable[[], None] = lambda: None
) -> dict[str, Costs]:
    """Costs by arm. Raises `AssertionError` where arms disagree on a committed or delivered token."""
    rng = np.random.default_rng(num_rows)
    total = WARM_UP_STEPS + num_steps
    sampled = rng.integers(0, EOS_TOKEN_ID, (total, num_rows, 1), np.int32)
    costs = {name: Costs() for name in ARMS}
    with ExitStack() as stack:
        arms = {name: stack.enter_context(open_arm(name, num_rows, NUM_PROMPT_TOKENS + total + 1)) for name in ARMS}
        for start in range(0, total, STEPS_PER_ROUND):
            for name, arm in arms.items():
                _pace(sampled[start : start + STEPS_PER_ROUND], arm, costs[name], int(interval_ms * 1e6))
            on_round()
        for name, arm in arms.items():
            assert arm.num_delivered == sampled.size, f"{name} delivered {arm.num_delivered} of {sampled.size} ids"
            for row in range(num_rows):
                assert np.array_equal(arm.history(row), sampled[:, row, 0]), f"{name} differs in row {row}"
    for cost in costs.values():
        del cost.runner_ns[:WARM_UP_STEPS], cost.applied_ns[:WARM_UP_STEPS]
    return costs


def _percentiles_us(durations_ns: list[int]) -> dict[str, float]:
    values = np.percentile(durations_ns, PERCENTS) / 1000
    return {name: round(float(value), 1) for name, value in zip(PERCENTILES, values, strict=True)}


def summary(costs: dict[str, Costs]) -> dict[str, dict[str, Any]]:
    """By arm: percentiles in microseconds of what the runner paid and of submit to published, and the share of the
    loop's median and 99th percentile that the runner paid."""
    arms: dict[str, dict[str, Any]] = {}
    for name, cost in costs.items():
        runner = _percentiles_us(cost.runner_ns)
        loop = arms.get("loop", {"runner_us": runner})["runner_us"]
        arms[name] = {
            "runner_us": runner,
            "published_us": _percentiles_us(cost.applied_ns),
            "share_of_loop_p50": round(runner["p50"] / loop["p50"], 4),
            "share_of_loop_p99": round(runner["p99"] / loop["p99"], 4),
        }
    return arms


def _table(num_rows: int, interval_ms: float, arms: dict[str, dict[str, Any]]) -> Any:
    from rich.table import Table

    title = f"{num_rows} rows, a step each {interval_ms:g} ms: us of the runner a step, and until it was published"
    table = Table(title=title, title_justify="left")
    for heading in ("arm", *PERCENTILES, "of loop", "published", "p99"):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for name, arm in arms.items():
        runner, published = arm["runner_us"], arm["published_us"]
        cells = [f"{runner[percentile]:,.0f}" for percentile in PERCENTILES]
        share = f"{100 * arm['share_of_loop_p50']:.1f} %"
        table.add_row(name, *cells, share, f"{published['p50']:,.0f}", f"{published['p99']:,.0f}")
    return table


@click.command("critical-path")
@click.option("--rows", default="64,256,1024", show_default=True, help="Numbers of rows, with commas between them.")
@click.option("--interval-ms", type=click.FloatRange(0.1), default=5.0, show_default=True, help="From step to step.")
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="To measure, for each arm.")
@click.option("--quick", is_flag=True, help="50 steps: about 20 seconds.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Writes everything there.")
def critical_path_command(rows: str, interval_ms: float, steps: int, quick: bool, json_path: Path | None) -> None:
    """What the runner pays a step, paced as an engine is, all arms side by side; results are compared in the run."""
    from rich.console import Console
    from rich.progress import Progress

    from asyncbook.bench.update_report import describe_run

    steps = 50 if quick else steps
    sizes = [int(part) for part in rows.split(",")]
    about = describe_run(f"asyncbook bench critical-path --rows {rows} --interval-ms {interval_ms:g} --steps {steps}")
    results: dict[int, dict[str, dict[str, Any]]] = {}
    console = Console()
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("", total=len(sizes) * -(-(WARM_UP_STEPS + steps) // STEPS_PER_ROUND))
            for num_rows in sizes:
                progress.update(task, description=f"{num_rows} rows")
                costs = measure(num_rows, steps, interval_ms, lambda: progress.advance(task))
                results[num_rows] = summary(costs)
                console.print(_table(num_rows, interval_ms, results[num_rows]))
    except KeyboardInterrupt:
        console.print("stopped: what is above was measured")
    if json_path is not None:
        json_path.write_text(json.dumps({"about": about, "interval_ms": interval_ms, "rows": results}, indent=1))
