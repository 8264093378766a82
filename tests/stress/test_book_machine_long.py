"""The random calls of `tests/property`, for long: `make stress`.

ASYNCBOOK_STRESS_OPERATIONS is how many calls are made, a million where nothing is said; ASYNCBOOK_STRESS_SEED is the
first seed, a new one each time where nothing is said. What was run is printed.
"""

from __future__ import annotations

import os
import secrets

import pytest
from hypothesis import settings

from asyncbook import BookConfig
from tests.conftest import KINDS, open_book
from tests.property.operations import CONFIGS, drive
from tests.property.test_book_machine import SHORT, run_machine
from tests.property.test_lagging_runner import CONFIG, run
from tests.property.trio import Trio, TrioPool

NUM_OPERATIONS = int(os.environ.get("ASYNCBOOK_STRESS_OPERATIONS", "1000000"))
SEED = int(os.environ.get("ASYNCBOOK_STRESS_SEED", secrets.randbelow(1_000_000)))
CALLS_A_SEED = 20_000  # a seed starts with new books: it is tried again in seconds

pytestmark = [pytest.mark.stress, pytest.mark.timeout(7200)]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_million_random_calls(name: str) -> None:
    num_calls = num_refused = num_steps = num_tokens = 0
    seed = first_seed = SEED + 1000 * list(CONFIGS).index(name)
    while num_calls < NUM_OPERATIONS / len(CONFIGS):
        trio = Trio(CONFIGS[name])
        try:
            drive(trio, seed, min(CALLS_A_SEED, NUM_OPERATIONS))
        finally:
            trio.close()
        seed += 1
        num_calls += trio.num_calls
        num_refused += trio.num_refused
        num_steps += trio.reference.step
        num_tokens += trio.reference.num_submitted_tokens
    print(
        f"\n{name}: {num_calls:,} calls ({num_refused:,} refused), {num_steps:,} steps, {num_tokens:,} ids, "
        f"seeds {first_seed} to {seed - 1}"
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_many_short_random_calls(name: str) -> None:
    max_examples = max(10, NUM_OPERATIONS // 5000)
    pool = TrioPool()
    try:
        run_machine(pool, name, settings(SHORT, max_examples=max_examples, derandomize=False), SEED)
    finally:
        pool.close()
    print(f"\n{name}: {max_examples} examples of Hypothesis, seed {SEED}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lag", [0, 1, 2, 8])
def test_many_lagging_runs(kind: str, lag: int) -> None:
    num_runs = max(2, NUM_OPERATIONS // 10_000)
    options = CONFIG | KINDS[kind] | {"num_spec_tokens": 3, "max_in_flight": max(1, lag)}
    with open_book(kind, BookConfig(**options)) as book:
        for seed in range(SEED, SEED + num_runs):
            run(book, seed, lag)
        print(f"\n{kind}, lag {lag}: {book.submitted_step:,} steps, seeds {SEED} to {SEED + num_runs - 1}")
