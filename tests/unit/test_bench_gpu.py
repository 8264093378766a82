"""A tiny run of `asyncbook bench gpu` on the fake device: each part checks its own results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from asyncbook.__main__ import main
from asyncbook.bench.gpu import DECODE_ARMS


def test_a_tiny_run(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    arguments = ["bench", "gpu", "--device", "fake", "--tiny", "--json", str(path)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert [item["arm"] for item in report["decode"]] == list(DECODE_ARMS)
    assert all(item["pinned"] for item in report["registration"])
    assert report["random steps"]["wrong"] == 0
    for part in ("submit", "frame"):
        for item in report[part]:
            assert all(cost["p50_us"] > 0 for cost in item.values() if isinstance(cost, dict))
    assert "steps/s" in result.output
    assert "bench gpu" in report["about"]["command"]
