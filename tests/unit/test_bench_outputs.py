"""A tiny run of `asyncbook bench outputs`: it compares what was read itself."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from asyncbook.__main__ import main
from asyncbook.bench import outputs


def test_a_tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: outputs.ARMS[name] for name in ("the runner", "another process")}
    monkeypatch.setattr(outputs, "ARMS", few)
    path = tmp_path / "outputs.json"
    arguments = ["--rows", "3", "--steps", "50", "--paced-steps", "5", "--interval-ms", "0.5", "--tokens", "300"]
    result = CliRunner().invoke(main, ["bench", "outputs", *arguments, "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    results = json.loads(path.read_text())
    for name, arm in results["throughput"].items():
        assert arm["steps_per_s"] > 0
        assert len(arm["reader_us"]) == outputs.ARMS[name].num_processes
    assert all(0 < arm["submit_us"]["p50"] <= arm["submit_us"]["p99"] for arm in results["paced"].values())
    assert results["memory"]["the runner"]["num_tokens"] == 300


def test_a_reader_that_got_something_else_is_found() -> None:
    load = outputs.Load.__new__(outputs.Load)
    load.num_ids, load.sum_of_ids, load._reads = 10, 45, False
    load.check([{"num_ids": 10, "sum_of_ids": 45}])
    with pytest.raises(click.ClickException, match=r"\(10, 44\).*expected \(10, 45\)"):
        load.check([{"num_ids": 10, "sum_of_ids": 44}])
