"""The runner is killed at a random moment: its sidecar goes, and nothing is left. For long: `tests/stress`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.process.kills import MOMENTS, kill_runner


@pytest.mark.parametrize("moment", MOMENTS)
def test_nothing_is_left_of_a_killed_runner(moment: str, runtime_dir: Path) -> None:
    killed = kill_runner(moment, random.Random(moment), runtime_dir)
    assert (killed.num_left, killed.num_files) == (0, 0)
    if moment not in (
        "starting",
        "a sidecar restarts",
    ):  # between a folder and its sidecar, nobody is there to remove it
        assert killed.num_stale == 0
