"""A tiny run of `asyncbook bench policies`: it compares what its arms committed itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

from click.testing import CliRunner

from asyncbook.__main__ import main
from asyncbook.bench import policies


def test_a_tiny_run(tmp_path: Path) -> None:
    path, cores = tmp_path / "policies.json", os.sched_getaffinity(0)
    arguments = ["bench", "policies", "--rows", "3", "--interval-ms", "0.5", "--steps", "10", "--json", str(path)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    arms = json.loads(path.read_text())["arms"]
    assert list(arms) == [*policies.SLEEPING, *policies.SPINNING, policies.ON_THE_RUNNERS_CORE]
    for arm in arms.values():
        assert 0 < arm["submit_us"]["p50"] <= arm["submit_us"]["p99"]
        assert 0 < arm["published_us"]["p50"] <= arm["published_us"]["p99"]
        assert arm["sidecar_core_share"] >= 0
    assert os.sched_getaffinity(0) == cores
