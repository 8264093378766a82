"""The short form of `stress/test_doorbell.py`; and a sidecar with nothing to do, which must cost nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import asyncbook
from asyncbook import BookConfig
from asyncbook.config import IDLE_POLICIES
from tests.conftest import KINDS, SMALL, step
from tests.doorbell import CONFIG, run_doorbell

IDLE_S = 10.0
MOST_SHARE = 0.01


@pytest.mark.parametrize("idle_policy", IDLE_POLICIES)
def test_steps_around_the_sleep(idle_policy: str) -> None:
    with asyncbook.spawn(BookConfig(**CONFIG, max_model_len=20_002, idle_policy=idle_policy)) as book:
        run_doorbell(book, 5000, seed=1)


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, all of its threads: user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_sidecar_costs_nothing() -> None:
    """All kinds at once: 10 s. What is counted is CPU time, which does not depend on how busy the machine is."""
    kinds: list[dict[str, Any]] = [options for name, options in KINDS.items() if name != "embedded"]
    books = [
        asyncbook.spawn(BookConfig(**(SMALL | options), idle_policy=policy))
        for options in kinds
        for policy in IDLE_POLICIES
    ]
    try:
        for book in books:
            for _ in range(50):  # a pace that a policy may have learned
                step(book, [], [])
        time.sleep(0.5)  # longer than any policy looks out for a next step
        before = [cpu_s(book.sidecar_pid or 0) for book in books]
        time.sleep(IDLE_S)
        used = [cpu_s(book.sidecar_pid or 0) - start for book, start in zip(books, before, strict=True)]
    finally:
        for book in books:
            book.close()
    assert max(used) < MOST_SHARE * IDLE_S, used
