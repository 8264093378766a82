"""`asyncbook bench logprobs`: what logprobs add to a step, for the runner and until it is published.

Paced as `critical-path` is; the arms of one kind of book side by side in one run, whatever they deliver counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

import asyncbook
from asyncbook import BookConfig, Logprobs, RequestParams
from asyncbook.bench.critical_path import (
    EOS_TOKEN_ID,
    NUM_PROMPT_TOKENS,
    STEPS_PER_ROUND,
    VOCAB_SIZE,
    WARM_UP_STEPS,
    BookArm,
    Costs,
    _pace,
    _percentiles_us,
)

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


class LogprobsArm(BookArm):
    """A book whose requests all ask for the same."""

    def __init__(self, book: asyncbook.Book, num_rows: int, brings: bool, k: int | None) -> None:
        super().__init__(book, num_rows, RequestParams(eos_token_id=EOS_TOKEN_ID, logprobs=k))
        self._brings = brings
        rng = np.random.default_rng(num_rows)
        self._given = Logprobs(
            rng.integers(0, VOCAB_SIZE, (num_rows, 1 + MAX_LOGPROBS), np.int32),
            -rng.random((num_rows, 1 + MAX_LOGPROBS), np.float32),
            np.ones(num_rows, np.int32),
        )

    def _logprobs(self, sampled: np.ndarray) -> Logprobs | None:
        self._given.logprob_token_ids[:, :1] = sampled
        return self._given if self._brings else None


@contextmanager
def open_arm(kind: str, arm: str, num_rows: int, max_model_len: int) -> Iterator[LogprobsArm]:
    """An arm by its name in `ARMS`, on a kind of book."""
    has_logprobs, brings, k = ARMS[arm]
    config = BookConfig(
        max_num_reqs=num_rows,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        max_logprobs=MAX_LOGPROBS if has_logprobs else None,
        **(KINDS[kind] or {}),
    )
    with asyncbook.open(config) if KINDS[kind] is None else asyncbook.spawn(config) as book:
        yield LogprobsArm(book, num_rows, brings, k)
        missing = book.stats().missing_logprobs
        assert missing == 0, f"{arm}: {missing} outputs without their logprobs"


def measure(kind: str, num_rows: int, num_steps: int, interval_ms: float) -> dict[str, Costs]:
    """Costs by arm. Raises `AssertionError` where an arm does not deliver all it was given."""
    rng = np.random.default_rng(num_rows)
    total = WARM_UP_STEPS + num_steps
    sampled = rng.integers(0, EOS_TOKEN_ID, (total, num_rows, 1), np.int32)
    costs = {name: Costs() for name in ARMS}
    with ExitStack() as stack:
        arms = {
            name: stack.enter_context(open_arm(kind, name, num_rows, NUM_PROMPT_TOKENS + total + 1)) for name in ARMS
        }
        for start in range(0, total, STEPS_PER_ROUND):
            for name, arm in arms.items():
                _pace(sampled[start : start + STEPS_PER_ROUND], arm, costs[name], int(interval_ms * 1e6))
        for name, arm in arms.items():
            assert arm.num_delivered == sampled.size, f"{name} delivered {arm.num_delivered} of {sampled.size} ids"
    for cost in costs.values():
        del cost.runner_ns[:WARM_UP_STEPS], cost.applied_ns[:WARM_UP_STEPS]
    return costs


def summary(costs: dict[str, Costs]) -> dict[str, dict[str, Any]]:
    """By arm: percentiles in microseconds, and medians as multiples of the first arm's."""
    arms = {
        name: {"runner_us": _percentiles_us(cost.runner_ns), "published_us": _percentiles_us(cost.applied_ns)}
        for name, cost in costs.items()
    }
    first = next(iter(arms.values()))
    return {
        name: {**arm, **{f"{what}_times": round(arm[what]["p50"] / first[what]["p50"], 3) for what in arm}}
        for name, arm in arms.items()
    }


@click.command("logprobs")
@click.option("--rows", type=click.IntRange(1), default=256, show_default=True)
@click.option("--interval-ms", type=click.FloatRange(0.1), default=5.0, show_default=True, help="From step to step.")
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="To measure, for each arm.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Writes everything there.")
def logprobs_command(rows: int, interval_ms: float, steps: int, json_path: Path | None) -> None:
    """What logprobs add to a step: medians in microseconds, and as multiples of a book without."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    results = {}
    for kind in KINDS:
        results[kind] = summary(measure(kind, rows, steps, interval_ms))
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
