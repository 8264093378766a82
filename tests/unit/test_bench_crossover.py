"""`asyncbook bench crossover`: a tiny run, and where one arm starts to beat another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
from click.testing import CliRunner

from asyncbook.__main__ import main
from asyncbook.bench.crossover import PAIRS, crossovers


def test_a_tiny_run(tmp_path: Path) -> None:
    path, picture = tmp_path / "crossover.json", tmp_path / "crossover.png"
    arguments = ("--workloads", "drafts", "--rows", "1,3", "--steps", "5", "--interval-ms", "0.5")
    command = ["bench", "crossover", *arguments, "--json", str(path), "--plot", str(picture)]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "cheaper for the runner" in result.output
    assert picture.stat().st_size > 0
    report = json.loads(path.read_text())
    assert report["complete"]
    assert report["command"].startswith("asyncbook bench crossover --workloads drafts --rows 1,3")
    assert [(line["arm"], line["beats"]) for line in report["crossovers"]] == list(PAIRS)


def case(rows: int, **medians_us: float) -> dict:
    arms = {name.replace("_", " "): {"runner_us": {"p50": us}} for name, us in medians_us.items()}
    return {"workload": "plain", "rows": rows, "arms": arms}


def test_from_where_on_an_arm_is_cheaper() -> None:
    """From there on at every larger size, too: what wins once, by chance, and loses again, has not won there."""
    cases = [
        case(1, loop=10, embedded=9, sidecar_zmq=50, sidecar_ring=30),
        case(8, loop=40, embedded=45, sidecar_zmq=60, sidecar_ring=35),
        case(64, loop=300, embedded=80, sidecar_zmq=90, sidecar_ring=40),
        case(256, loop=1000, embedded=200, sidecar_zmq=210, sidecar_ring=45),
    ]
    found = {(line["arm"], line["beats"]): line["from_rows"] for line in crossovers(cases)}
    assert found == {
        ("embedded", "loop"): 64,
        ("sidecar zmq", "loop"): 64,
        ("sidecar ring", "loop"): 8,
        ("sidecar zmq", "embedded"): None,
        ("sidecar ring", "embedded"): 8,
    }
