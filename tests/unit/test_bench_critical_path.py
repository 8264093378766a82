"""A tiny run of `asyncbook bench critical-path`: it compares what its arms committed and delivered itself."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from asyncbook.__main__ import main
from asyncbook.bench import critical_path


def test_a_tiny_run(tmp_path: Path) -> None:
    path = tmp_path / "critical-path.json"
    arguments = ["bench", "critical-path", "--rows", "3", "--interval-ms", "0.5", "--steps", "10", "--json", str(path)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    arms = report["rows"]["3"]
    assert tuple(arms) == critical_path.ARMS
    assert arms["loop"]["share_of_loop_p50"] == 1
    for arm in arms.values():
        assert 0 < arm["runner_us"]["p50"] <= arm["runner_us"]["p99"] <= arm["runner_us"]["max"]
    assert "critical-path" in report["about"]["command"]
