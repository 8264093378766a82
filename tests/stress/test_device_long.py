"""A hundred thousand steps from a fake device: none torn, late or lost. ASYNCBOOK_STRESS_STEPS says how many."""

from __future__ import annotations

import os
import secrets

import pytest

pytest.importorskip("torch")

from asyncbook import BookConfig
from tests.conftest import KINDS, open_book
from tests.device import CONFIG, run_device_steps

NUM_STEPS = int(os.environ.get("ASYNCBOOK_STRESS_STEPS", "100000"))
SEED = int(os.environ.get("ASYNCBOOK_STRESS_SEED", secrets.randbelow(1_000_000)))


@pytest.mark.stress
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("idle_policy", ["spin-then-sleep", "cadence"])
def test_many_steps_from_a_device(kind: str, idle_policy: str) -> None:
    num_steps = NUM_STEPS if kind == "ring" and idle_policy == "cadence" else NUM_STEPS // 10
    options = CONFIG | KINDS[kind] | {"max_model_len": 3 * num_steps + 2, "device": f"fake:{SEED}"}
    with open_book(kind, BookConfig(**options, idle_policy=idle_policy)) as book:
        run_device_steps(book, num_steps, SEED)
        wait = book.stats().wait_for_tokens_us
        print(f"\n{kind}, {idle_policy}: {num_steps:,} steps, seed {SEED}, waited {wait.us_p50:.0f} us for ids (p50)")
