"""The sidecar dies at every point that matters, under load: outputs, frames, tables and counters stay those of a book
that was left in peace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.faults import KilledTrio, config_of, faulty_sidecars, run_points
from tests.process.faulty_sidecar import points
from tests.process.leftovers import nothing_left_behind

NUM_PARTS = 4


# Each point by one of the transports; `tests/stress/test_kill_campaign.py` has both.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("transport", "part"), [("zmq", 0), ("ring", 1), ("ring", 2), ("zmq", 3)])
def test_every_point(tmp_path: Path, runtime_dir: Path, transport: str, part: int) -> None:
    with nothing_left_behind(runtime_dir), faulty_sidecars(tmp_path / "faults"):
        trio = KilledTrio(config_of(transport))
        try:
            missed = run_points(trio, tmp_path / "faults", points()[part::NUM_PARTS], seed=part)
        finally:
            trio.close()
        del trio
    assert missed == []
