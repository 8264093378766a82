"""SIGKILLs of the sidecar under load with steps in flight: nothing may be lost, and nothing come twice.

Half of the kills come from outside at a random moment, half happen at the points of `tests/process/faulty_sidecar.py`.
All that the book shows is compared with the reference and an embedded book. ASYNCBOOK_STRESS_KILLS is how many there
are, 1,000 where nothing is said; ASYNCBOOK_STRESS_SEED is the seed. What was measured is printed.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import numpy as np
import pytest

from tests.process.faults import CALLS_A_ROUND, KilledTrio, config_of, faulty_sidecars
from tests.process.faulty_sidecar import points
from tests.property.operations import SeededChoices

NUM_KILLS = int(os.environ.get("ASYNCBOOK_STRESS_KILLS", "1000"))
SEED = int(os.environ.get("ASYNCBOOK_STRESS_SEED", secrets.randbelow(1_000_000)))
TRANSPORTS = ("zmq", "ring")
MOST_US_BEFORE = 400  # a step takes about as long


def spin(duration_us: int) -> None:
    """Lets the sidecar get so much further, without giving it the core."""
    end_ns = time.monotonic_ns() + 1000 * duration_us
    while time.monotonic_ns() < end_ns:
        pass


def submit_two(trio: KilledTrio) -> None:
    """Steps for every row that runs: they are in flight when the sidecar is killed."""
    for _ in range(trio.config.max_in_flight):
        rows = trio.held()
        trio.step(rows, np.zeros(len(rows), np.int32) + trio.reference.step % trio.config.vocab_size)


def campaign(transport: str, num_kills: int, seed: int, plan: Path) -> tuple[list[float], int]:
    """Recovery times in seconds, and the number of deaths at points."""
    choices = SeededChoices(seed)
    times: list[float] = []
    deaths = plan.with_suffix(".deaths")
    deaths.write_text("")
    with faulty_sidecars(plan):
        trio = KilledTrio(config_of(transport))
        all_points = points()
        try:
            while len(times) + len(deaths.read_text().splitlines()) < num_kills:
                # The next sidecar has a fault or not; one that never gets to it is killed like any other.
                if choices.integer(0, 1):
                    point = all_points[choices.integer(0, len(all_points) - 1)]
                    plan.write_text(f"{point} {choices.integer(1, 4)}")
                if choices.integer(0, 3) == 0:
                    trio.change_subscriber()
                trio.make_calls(choices, CALLS_A_ROUND)
                trio.recover()
                submit_two(trio)
                spin(choices.integer(0, MOST_US_BEFORE))
                num_restarts = trio.num_restarts
                trio.kill()
                seconds = trio.recover()
                if trio.num_restarts == num_restarts + 1:  # else it was applied before, or another one died meanwhile
                    times.append(seconds)
            trio.empty()
        except Exception as error:
            error.add_note(f"seed {seed}, died at {deaths.read_text().splitlines()}, then:\n{trio.script()}")
            raise
        finally:
            trio.close()
    return times, len(deaths.read_text().splitlines())


def told(transport: str, times: list[float], num_at_points: int, seed: int) -> str:
    """The figures."""
    return (
        f"\n{transport}: {len(times)} kills at random moments, {num_at_points} at points, 0 losses, 0 repeats; "
        f"recovery p50 {np.median(times):.2f} s, max {max(times):.2f} s; seed {seed}"
    )


@pytest.mark.timeout(900)
def test_a_few_kills(tmp_path: Path) -> None:
    times, num_at_points = campaign("ring", 8, 1, tmp_path / "faults")
    assert len(times) + num_at_points >= 8
    print(told("ring", times, num_at_points, 1))


@pytest.mark.stress
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_thousand_kills(tmp_path: Path, transport: str) -> None:
    times, num_at_points = campaign(transport, NUM_KILLS // len(TRANSPORTS), SEED, tmp_path / "faults")
    assert times
    print(told(transport, times, num_at_points, SEED))
