"""A tiny run of `asyncbook bench logprobs`: it checks itself that every arm delivered all, and nothing was missing."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from asyncbook.__main__ import main
from asyncbook.bench import logprobs


def test_a_tiny_run(tmp_path: Path) -> None:
    path = tmp_path / "logprobs.json"
    arguments = ["bench", "logprobs", "--rows", "3", "--interval-ms", "0.5", "--steps", "10", "--json", str(path)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    kinds = json.loads(path.read_text())["kinds"]
    assert tuple(kinds) == tuple(logprobs.KINDS)
    for arms in kinds.values():
        assert tuple(arms) == tuple(logprobs.ARMS)
        assert arms["no logprobs in the book"]["runner_us_times"] == 1
        for arm in arms.values():
            assert 0 < arm["runner_us"]["p50"] <= arm["runner_us"]["p99"] <= arm["runner_us"]["max"]
