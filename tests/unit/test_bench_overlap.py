"""`asyncbook bench overlap`: a tiny run of everything, and what its figures mean."""

from __future__ import annotations

import json
import os
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
from click.testing import CliRunner

from asyncbook.__main__ import main
from asyncbook.bench import engine_loop, overlap
from asyncbook.bench.arms import ARMS
from asyncbook.bench.engine_loop import FORWARDS, LIMIT, LoopRun, cpu_s_of, measure, summary
from asyncbook.bench.workloads import WORKLOADS, make_steps
from tests.unit.text_oracle import byte_level

TINY = ("bench", "overlap", "--rows", "3", "--steps", "12", "--forward-ms", "0.5", "--workload", "drafts+stops")
IN_PROCESS = {name: ARMS[name] for name in ("loop", "embedded", "thread")}


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_a_tiny_run_of_everything(tmp_path: Path) -> None:
    path, picture, trace = (tmp_path / name for name in ("overlap.json", "overlap.png", "overlap.trace.json"))
    byte_level().save(str(tmp_path / "tokenizer.json"))
    options = ("--workload", "everything", "--tokenizer", str(tmp_path / "tokenizer.json"))
    result = run(*TINY, *options, "--json", str(path), "--plot", str(picture), "--trace", str(trace))
    assert result.exit_code == 0, result.output
    assert picture.stat().st_size > 0
    report = json.loads(path.read_text())
    assert {"command", "started", "git_commit", "machine", "versions"} <= report.keys()
    assert [(case["lag"], tuple(case["arms"])) for case in report["cases"]] == [
        (0, (LIMIT, *ARMS)),
        (1, (LIMIT, *ARMS)),
    ]
    for case in report["cases"]:
        for name, arm in case["arms"].items():
            assert 0 < arm["steps_per_s"] < 2000
            assert arm["forward_us"]["p50"] >= 500
            assert (arm["sidecar_cpu_us"] > 0) == name.startswith("sidecar")
            assert (arm["hidden"] is None) == (name == LIMIT)
    traced = json.loads(trace.read_text())
    assert traced["otherData"]["command"] == report["command"]
    names = {event["name"] for event in traced["traceEvents"]}
    assert {"forward", "submit", "apply", "outputs", "wait"} <= names
    processes = {event["args"]["name"] for event in traced["traceEvents"] if event["name"] == "process_name"}
    assert {"loop, lag 0, 3 rows", "sidecar ring, lag 1, 3 rows"} <= processes


def test_every_kind_of_forward_pass_is_named() -> None:
    assert tuple(FORWARDS) == overlap.FORWARD_KINDS


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kind", FORWARDS)
def test_passes_run_one_after_the_other(kind: str, lag: int) -> None:
    if kind == "model":
        pytest.importorskip("torch")
    steps = make_steps(WORKLOADS["drafts+stops"], 5, 12)
    runs, is_complete = measure(steps, IN_PROCESS, partial(FORWARDS[kind], 0.2), lag, stretch_steps=6)
    assert is_complete
    for loop_run in runs:
        passes = loop_run.timeline.device
        assert [span.step for span in passes] == list(range(7, 13)), "the first stretch warms up"
        assert all(first.end_ns <= second.start_ns for first, second in pairwise(passes))
        assert loop_run.num_steps == 6 == len(loop_run.gap_ns) + 1
        if loop_run.way != LIMIT:
            assert [span.step for span in loop_run.timeline.bookkeeper] == list(range(7, 13))


def test_what_is_hidden() -> None:
    """The gap beyond the limit's is exposed; work elsewhere counts as work."""
    limit = LoopRun(LIMIT, 1.0, 10, 10, gap_ns=[2_000], forward_ns=[1], book_ns=[0], wait_ns=[0])
    ring = LoopRun("ring", 1.0, 10, 20, gap_ns=[32_000], forward_ns=[1], book_ns=[40_000], wait_ns=[0],
                   apply_ns=[60_000], lags=[0, 1])  # fmt: skip
    figures = summary([limit, ring])["ring"]
    assert (figures["exposed_us"], figures["work_us"], figures["hidden"]) == (30, 100, 0.7)
    assert (figures["tokens_per_s"], figures["lag_mean"], figures["lag_max"]) == (20, 0.5, 1)


def test_cpu_time_is_of_the_whole_process() -> None:
    before = cpu_s_of(os.getpid())
    sum(range(2_000_000))
    assert cpu_s_of(os.getpid()) > before > 0
    assert cpu_s_of(None) == 0


def test_ctrl_c_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, done = engine_loop.EngineLoop.stretch, []

    def interrupted(self, numbers: range) -> None:
        if len(done) == 8:
            raise KeyboardInterrupt
        done.append("")
        original(self, numbers)

    monkeypatch.setattr(engine_loop.EngineLoop, "stretch", interrupted)
    path = tmp_path / "overlap.json"
    result = run(*TINY, "--arms", "loop,embedded", "--json", str(path))
    assert result.exit_code == 0
    assert "interrupted" in result.output
    report = json.loads(path.read_text())
    assert not report["complete"]
    assert report["cases"][0]["lag"] == 0
