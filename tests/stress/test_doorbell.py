"""A million steps around the moment at which the sidecar goes to sleep. ASYNCBOOK_STRESS_STEPS: how many a policy."""

from __future__ import annotations

import os
import secrets
import time

import pytest

import asyncbook
from asyncbook import BookConfig
from asyncbook.config import IDLE_POLICIES
from tests.doorbell import CONFIG, run_doorbell

NUM_STEPS = int(os.environ.get("ASYNCBOOK_STRESS_STEPS", "1000000"))
SEED = int(os.environ.get("ASYNCBOOK_STRESS_SEED", secrets.randbelow(1_000_000)))


@pytest.mark.stress
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("idle_policy", IDLE_POLICIES)
def test_a_million_steps_around_the_sleep(idle_policy: str) -> None:
    config = BookConfig(**CONFIG, max_model_len=NUM_STEPS + 2, idle_policy=idle_policy)
    start_s = time.monotonic()
    with asyncbook.spawn(config) as book:
        run_doorbell(book, NUM_STEPS, SEED)
    print(f"\n{idle_policy}: {NUM_STEPS:,} steps, none lost or torn, seed {SEED}, {time.monotonic() - start_s:.0f} s")
