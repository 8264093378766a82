"""`asyncbook bench critical-path`: what the runner pays a step, paced as an engine is, all arms in one run.

In each round every arm does a few steps at the given interval, so that a busy moment of the machine hits all of them.
What an arm was given is drawn from one seed; what it committed and delivered is compared at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

import asyncbook
from asyncbook import Book, BookConfig, RequestParams
from asyncbook.bench.per_row_loop import PerRowLoop

VOCAB_SIZE = 128_000
EOS_TOKEN_ID = VOCAB_SIZE - 1
NUM_PROMPT_TOKENS = 32
STEPS_PER_ROUND = 25
WARM_UP_STEPS = 25
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

    def __init__(self, book: Book, num_rows: int) -> None:
        self._book = book
        params = RequestParams(eos_token_id=EOS_TOKEN_ID)
        prompt = np.arange(NUM_PROMPT_TOKENS)
        self._rows = [book.admit(f"request-{row}", prompt, params) for row in range(num_rows)]
        self._batch = book.batch(self._rows)
        self.num_delivered = 0

    def step(self, sampled: np.ndarray, costs: Costs) -> None:
        start_ns = time.monotonic_ns()
        step = self._book.submit(self._batch, sampled)
        costs.runner_ns.append(time.monotonic_ns() - start_ns)
        self._book.wait_applied(step)
        costs.applied_ns.append(self._book.frame(step).published_ns - start_ns)
        self.num_delivered += sum(outputs.token_ids.size for outputs in self._book.poll_outputs())

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
