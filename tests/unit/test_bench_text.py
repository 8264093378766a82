"""A tiny run of `asyncbook bench text`: it compares what its arms delivered with the library's text itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from asyncbook.__main__ import main
from asyncbook.bench import text
from tests.unit.text_oracle import byte_level, metaspace


@pytest.mark.parametrize("tokenizer", [byte_level, metaspace])
def test_a_tiny_run(tmp_path: Path, tokenizer: Callable[[], Tokenizer]) -> None:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "text.json"
    arguments = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--rows", "3", "--steps", "10", "--json", str(path)]
    result = CliRunner().invoke(main, ["bench", "text", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    arms = report["rows"]["3"]
    assert list(arms)[:3] == [text.TABLE, text.STRINGS, text.STREAMS]
    for arm in arms.values():
        assert arm["tokens_per_s"] > 0
        assert 0 < arm["step_us_p50"] <= arm["step_us_p99"]
    assert "bench text" in report["about"]["command"]


def test_an_arm_that_delivers_another_text_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(text.RowsArm, "texts", property(lambda arm: ["something else"] * 2))
    with pytest.raises(AssertionError, match="another text in row 0"):
        text.measure(tmp_path / "tokenizer.json", 2, 3)
