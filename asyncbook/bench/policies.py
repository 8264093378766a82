"""`asyncbook bench policies`: what each way of waiting for the next step costs the runner, the step and the machine.

As `critical-path`, paced and in turns; here every arm is a sidecar. Those that spin without end would be in the way of
the others, so each of them has the machine to itself, after the others.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

import asyncbook
from asyncbook import Book, BookConfig
from asyncbook.bench.about import cpu_s, describe_run
from asyncbook.bench.pacing import percentiles_us
from asyncbook.bench.workloads import EOS_TOKEN_ID, NUM_PROMPT_TOKENS, VOCAB_SIZE

STEPS_PER_ROUND = 15
UNTIL_LEARNED = 5  # steps of a round that are not measured: a policy finds the pace again after the other arms' turns
NEVER_SLEEPS_US = 1_000_000
TRANSPORTS = ("ring", "zmq")
POLICIES: dict[str, dict[str, Any]] = {
    "spin-then-sleep": {"idle_policy": "spin-then-sleep"},
    "cadence": {"idle_policy": "cadence"},
}
SLEEPING: dict[str, dict[str, Any]] = {
    f"{transport}, {name}": {"transport": transport, **options}
    for transport in TRANSPORTS
    for name, options in POLICIES.items()
}
SPINNING: dict[str, dict[str, Any]] = {
    f"{transport}, spins": {"transport": transport, "spin_us": NEVER_SLEEPS_US} for transport in TRANSPORTS
}
ON_THE_RUNNERS_CORE = "ring, spins, same core"


@dataclass
class Costs:
    """Nanoseconds of each measured step: in the runner, and from the call until the step was published."""

    runner_ns: list[int] = field(default_factory=list)
    applied_ns: list[int] = field(default_factory=list)


class Runner:
    """All rows of a book, step by step."""

    def __init__(self, book: Book, num_rows: int) -> None:
        self._book = book
        self._rows = [book.admit(f"request-{row}", np.arange(NUM_PROMPT_TOKENS)) for row in range(num_rows)]
        self._batch = book.batch(self._rows)

    def step(self, sampled: np.ndarray, costs: Costs) -> None:
        """One step, applied and read."""
        start_ns = time.monotonic_ns()
        step = self._book.submit(self._batch, sampled)
        costs.runner_ns.append(time.monotonic_ns() - start_ns)
        self._book.wait_applied(step)
        costs.applied_ns.append(self._book.frame(step).published_ns - start_ns)
        self._book.poll_outputs()

    def history(self, row: int) -> np.ndarray:
        """Committed outputs."""
        return self._book.output_token_ids(self._rows[row])


def measure(num_rows: int, num_steps: int, interval_ms: float, arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By arm: what `submit` took, submit to published, and the share of a core that the sidecar used in its turns."""
    rounds = -(-num_steps // (STEPS_PER_ROUND - UNTIL_LEARNED))
    total = rounds * STEPS_PER_ROUND
    sampled = np.random.default_rng(num_rows).integers(0, EOS_TOKEN_ID, (total, num_rows, 1), np.int32)
    costs = {name: Costs() for name in arms}
    used_s, turns_s = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0.0)
    sizes: dict[str, Any] = {
        "max_num_reqs": num_rows,
        "max_model_len": NUM_PROMPT_TOKENS + total + 1,
        "vocab_size": VOCAB_SIZE,
    }
    with ExitStack() as stack:
        books = {name: stack.enter_context(asyncbook.spawn(BookConfig(**sizes, **arms[name]))) for name in arms}
        runners = {name: Runner(book, num_rows) for name, book in books.items()}
        for start in range(0, total, STEPS_PER_ROUND):
            for name, runner in runners.items():
                pid = books[name].sidecar_pid or 0
                measured = Costs()
                before_s, start_s = cpu_s(pid), time.monotonic()
                for ids in sampled[start : start + STEPS_PER_ROUND]:
                    due_s = time.monotonic() + interval_ms / 1e3
                    runner.step(ids, measured)
                    time.sleep(max(due_s - time.monotonic(), 0))
                used_s[name] += cpu_s(pid) - before_s
                turns_s[name] += time.monotonic() - start_s
                costs[name].runner_ns += measured.runner_ns[UNTIL_LEARNED:]
                costs[name].applied_ns += measured.applied_ns[UNTIL_LEARNED:]
        for name, runner in runners.items():
            assert all(np.array_equal(runner.history(row), sampled[:, row, 0]) for row in range(num_rows)), name
    return {
        name: {
            "submit_us": percentiles_us(costs[name].runner_ns),
            "published_us": percentiles_us(costs[name].applied_ns),
            "sidecar_core_share": round(used_s[name] / turns_s[name], 4),
        }
        for name in arms
    }


def measure_all(num_rows: int, num_steps: int, interval_ms: float) -> dict[str, Any]:
    """All arms; the last one spins on the very core that the runner is bound to."""
    results = measure(num_rows, num_steps, interval_ms, SLEEPING)
    for name, options in SPINNING.items():
        results |= measure(num_rows, num_steps, interval_ms, {name: options})
    cores = os.sched_getaffinity(0)
    core = min(cores)
    os.sched_setaffinity(0, {core})
    try:
        arm = {ON_THE_RUNNERS_CORE: SPINNING["ring, spins"] | {"sidecar_cpu": core}}
        return results | measure(num_rows, num_steps, interval_ms, arm)
    finally:
        os.sched_setaffinity(0, cores)


def _table(num_rows: int, interval_ms: float, results: dict[str, Any]) -> Any:
    from rich.table import Table

    title = f"{num_rows} rows, a step each {interval_ms:g} ms: runner's us, us until published, sidecar's CPU"
    table = Table(title=title, title_justify="left")
    for heading in ("arm", "submit", "p99", "published", "p99", "of a core"):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for name, arm in results.items():
        numbers = [arm[key][percent] for key in ("submit_us", "published_us") for percent in ("p50", "p99")]
        table.add_row(name, *(f"{number:,.0f}" for number in numbers), f"{100 * arm['sidecar_core_share']:.1f} %")
    return table


@click.command("policies")
@click.option("--rows", type=click.IntRange(1), default=256, show_default=True)
@click.option("--interval-ms", type=click.FloatRange(0.1), default=5.0, show_default=True, help="From step to step.")
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="To measure, for each arm.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Writes everything there.")
def policies_command(rows: int, interval_ms: float, steps: int, json_path: Path | None) -> None:
    """Idle policies side by side: what the runner pays, how soon a step is published, what the sidecar costs."""
    from rich.console import Console

    about = describe_run(f"asyncbook bench policies --rows {rows} --interval-ms {interval_ms:g} --steps {steps}")
    results = measure_all(rows, steps, interval_ms)
    if json_path is not None:
        json_path.write_text(json.dumps({"about": about, "arms": results}, indent=1))
    Console().print(_table(rows, interval_ms, results))
