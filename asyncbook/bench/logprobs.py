"""`asyncbook bench logprobs`: what logprobs add to a step, for the runner and until it is published.

Paced as `critical-path` is; the arms of one kind of book side by side in one run, which compares what they deliver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

import asyncbook
from asyncbook import Logprobs, RequestParams
from asyncbook.bench.arms import Arm, BookArm
from asyncbook.bench.pacing import Measured, Pace, measure, percentiles_us
from asyncbook.bench.workloads import VOCAB_SIZE, WORKLOADS, Steps

MAX_LOGPROBS = 20
KINDS: dict[str, dict[str, Any] | None] = {
    "embedded": None,
    "sidecar zmq": {"transport": "zmq"},
    "sidecar ring": {"transport": "ring", "idle_policy": "cadence"},
}
# arm: whether the book has logprobs, whether steps bring them, what every request asks for
ARMS: dict[str, tuple[bool, bool, int | None]] = {
    "no logprobs in the book": (False, False, None),
    "none given": (True, False, None),
    "20 given, nobody asks": (True, True, None),
    "20 given, all ask for 0": (True, True, 0),
    "20 given, all ask for 5": (True, True, 5),
    "20 given, all ask for 20": (True, True, 20),
}


@dataclass(frozen=True)
class AskingSteps(Steps):
    """Steps for requests that all ask for `k`."""

    k: int | None = None

    def params(self) -> RequestParams:
        return replace(super().params(), logprobs=self.k)


class LogprobsArm(BookArm):
    """A book whose requests all ask for the same."""

    def __init__(self, book: asyncbook.Book, steps: Steps, brings: bool, k: int | None) -> None:
        super().__init__(book, AskingSteps(steps.workload, steps.sampled, steps.drafts, k=k))
        self._brings = brings
        rng = np.random.default_rng(steps.num_rows)
        self._given = Logprobs(
            rng.integers(0, VOCAB_SIZE, (steps.num_rows, 1 + MAX_LOGPROBS), np.int32),
            -rng.random((steps.num_rows, 1 + MAX_LOGPROBS), np.float32),
            np.ones(steps.num_rows, np.int32),
        )

    def submit(self, step: int) -> None:
        sampled = self._steps.sampled[step]
        if not self._brings:
            self.book.submit(self._batch, sampled)
            return
        self._given.logprob_token_ids[:, :1] = sampled
        self.book.submit(self._batch, sampled, logprobs=self._given)


@contextmanager
def open_arm(steps: Steps, kind: str, arm: str) -> Iterator[Arm]:
    """An arm by its name in `ARMS`, on a kind of book."""
    has_logprobs, brings, k = ARMS[arm]
    config = steps.config(max_logprobs=MAX_LOGPROBS if has_logprobs else None, **(KINDS[kind] or {}))
    with asyncbook.open(config) if KINDS[kind] is None else asyncbook.spawn(config) as book:
        yield LogprobsArm(book, steps, brings, k)
        missing = book.stats().missing_logprobs
        assert missing == 0 or not brings, f"{arm}: {missing} outputs without their logprobs"


def summary(measured: Measured) -> dict[str, dict[str, Any]]:
    """By arm: percentiles in microseconds, and medians as multiples of the first arm's."""
    arms = {
        name: {"runner_us": percentiles_us(cost.runner_ns), "published_us": percentiles_us(cost.published_ns)}
        for name, cost in measured.costs.items()
        if cost.runner_ns
    }
    if not arms:
        return {}
    first = next(iter(arms.values()))
    return {
        name: {**arm, **{f"{what}_times": round(arm[what]["p50"] / first[what]["p50"], 3) for what in arm}}
        for name, arm in arms.items()
    }


@click.command("logprobs")
@click.option("--rows", type=click.IntRange(1), default=256, show_default=True)
@click.option("--interval-ms", type=click.FloatRange(0.1), default=5.0, show_default=True, help="From step to step.")
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="To count, for each arm.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Writes everything there.")
def logprobs_command(rows: int, interval_ms: float, steps: int, json_path: Path | None) -> None:
    """What logprobs add to a step: medians in microseconds, and as multiples of a book without."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    results = {}
    for kind in KINDS:
        openers = {name: partial(open_arm, kind=kind, arm=name) for name in ARMS}
        results[kind] = summary(measure(WORKLOADS["plain"], rows, Pace(interval_ms, steps), openers))
        table = Table(title=f"{kind}, {rows} rows, a step each {interval_ms:g} ms: us", title_justify="left")
        for heading in ("arm", "runner", "p99", "times", "published", "times"):
            table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
        for name, arm in results[kind].items():
            runner, published = arm["runner_us"], arm["published_us"]
            table.add_row(
                name, f"{runner['p50']:,.0f}", f"{runner['p99']:,.0f}", f"{arm['runner_us_times']:.2f}",
                f"{published['p50']:,.0f}", f"{arm['published_us_times']:.2f}",
            )  # fmt: skip
        console.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps({"rows": rows, "interval_ms": interval_ms, "kinds": results}, indent=1))
