"""`asyncbook bench critical-path`: a tiny run, which compares what its arms committed and delivered itself."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
from click.testing import CliRunner

from asyncbook.__main__ import main
from asyncbook.bench import critical_path, pacing
from asyncbook.bench.arms import ARMS, ArmsDiffer, LoopArm, Seen
from asyncbook.bench.pacing import LEAD_IN_STEPS, Costs, Measured, Pace, measure, percentiles_us, summary
from asyncbook.bench.per_row_loop import PerRowLists, PerRowLoop
from asyncbook.bench.story import Story
from asyncbook.bench.workloads import WORKLOADS, make_steps
from tests.unit.text_oracle import byte_level

TINY = ("bench", "critical-path", "--rows", "3", "--interval-ms", "0.5", "--steps", "6", "--workloads", "plain")
IN_PROCESS = {name: ARMS[name] for name in ("loop", "numpy (PR)", "embedded", "thread")}


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    path = tmp_path_factory.mktemp("story") / "tokenizer.json"
    byte_level().save(str(path))
    return Story.of(path)


def test_a_tiny_run_of_everything(tmp_path: Path, story: Story) -> None:
    path, picture = tmp_path / "critical-path.json", tmp_path / "critical-path.png"
    options = ("--workloads", "everything", "--tokenizer", str(story.tokenizer))
    result = run(*TINY, *options, "--json", str(path), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "numpy (PR) keeps logprobs in columns" in result.output
    assert picture.stat().st_size > 0
    report = json.loads(path.read_text())
    assert {"command", "started", "git_commit", "machine", "versions"} <= report.keys()
    assert report["complete"]
    (case,) = report["cases"]
    assert (case["workload"], case["rows"], case["interval_ms"]) == ("everything", 3, 0.5)
    assert tuple(case["arms"]) == critical_path.ARM_NAMES == tuple(ARMS)
    assert case["arms"]["loop"]["share_of_loop"]["p50"] == 1
    for arm in case["arms"].values():
        assert arm["steps"] == 6 == sum(arm["runner_histogram"]["counts"])
        for us in (arm["runner_us"], arm["corrected_us"], arm["published_us"], arm["read_us"]):
            assert 0 < us["p50"] <= us["p90"] <= us["p99"] <= us["max"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_arms_agree_on_every_workload(name: str, story: Story) -> None:
    measured = measure(WORKLOADS[name], 40, Pace(0.1, 10, round_steps=10), IN_PROCESS, story=story)
    assert measured.is_complete
    assert {len(cost.runner_ns) for cost in measured.costs.values()} == {10}


def test_workloads_bring_what_they_say() -> None:
    steps = make_steps(WORKLOADS["drafts+stops"], 100, 40)
    arm = LoopArm(steps, PerRowLoop)
    for step in range(steps.num_steps):
        arm.submit(step)
    stopped = sum(arm.finish_reason(row) for row in range(100))
    assert 0 < stopped < 30
    num_ids = (steps.sampled >= 0).sum(axis=2)
    assert set(np.unique(num_ids)) == {1, 2, 3, 4, 5}


def test_both_loops_keep_the_same_columns(story: Story) -> None:
    steps = make_steps(WORKLOADS["everything"], 30, 30, story=story)
    arms = [LoopArm(steps, kind) for kind in (PerRowLoop, PerRowLists)]
    for step in range(steps.num_steps):
        for arm in arms:
            arm.submit(step)
        for name in ("token_ids", "is_token_ids", "num_tokens", "num_tokens_no_spec", "num_computed_tokens"):
            first, second = (getattr(arm._loop, name) for arm in arms)
            np.testing.assert_array_equal(first, second, err_msg=name)


def test_arms_that_differ_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PerRowLists, "_until_stop", lambda self, row, ids: ([ids[0] + 1], 0))
    result = run(*TINY, "--arms", "loop,numpy (PR)")
    assert result.exit_code == 1
    assert "numpy (PR) delivered" in result.output
    with pytest.raises(ArmsDiffer):
        measure(WORKLOADS["plain"], 2, Pace(0.1, 2, round_steps=2), IN_PROCESS)


class FakeArm:
    """Takes the time that it is told to take."""

    def __init__(self, durations_ns: list[int], clock: list[int]) -> None:
        self._durations_ns, self._clock = durations_ns, clock

    def submit(self, step: int) -> None:
        self._clock[0] += self._durations_ns[step]

    def wait(self, step: int) -> None:
        pass

    def read(self, step: int) -> Seen:
        return Seen(self._clock[0], 0)


def test_missed_sends_are_counted_from_when_they_were_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stall of three intervals shows in the steps that it delayed, and a late timer in none."""
    clock = [0]
    monkeypatch.setattr(pacing.time, "monotonic_ns", lambda: clock[0])
    monkeypatch.setattr(pacing, "_sleep_until", lambda ns: clock.__setitem__(0, max(clock[0], ns) + 5))
    durations = [10] * LEAD_IN_STEPS + [10, 3000, 10, 10, 10, 10]
    costs = Costs()
    pacing._pace(FakeArm(durations, clock), range(len(durations)), 1000, costs)  # type: ignore[arg-type]
    assert costs.runner_ns == [10, 3000, 10, 10, 10, 10]
    assert costs.corrected_ns == [10, 3000, 2010, 1020, 30, 10]
    assert costs.num_late == 3


def test_steps_keep_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a timer that woke late by several intervals, too: what follows at once finds warm caches."""
    clock, starts = [0], []
    monkeypatch.setattr(pacing.time, "monotonic_ns", lambda: clock[0])
    monkeypatch.setattr(pacing, "_sleep_until", lambda ns: clock.__setitem__(0, max(clock[0], ns) + 3000))
    arm = FakeArm([10] * 9, clock)
    submit = arm.submit
    arm.submit = lambda step: (starts.append(clock[0]), submit(step))  # type: ignore[method-assign, return-value]
    costs = Costs()
    pacing._pace(arm, range(9), 1000, costs)  # type: ignore[arg-type]
    assert all(later - earlier >= 1000 for earlier, later in pairwise(starts))
    assert costs.corrected_ns == costs.runner_ns == [10] * 4


def test_ctrl_c_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    original = pacing._pace

    def interrupted(*arguments) -> None:
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append("")
        original(*arguments)

    monkeypatch.setattr(pacing, "_pace", interrupted)
    path = tmp_path / "critical-path.json"
    result = run(*TINY, "--arms", "loop,embedded", "--rows", "2,3", "--json", str(path))
    assert result.exit_code == 0
    assert "interrupted" in result.output
    report = json.loads(path.read_text())
    assert not report["complete"]
    assert [case["rows"] for case in report["cases"]] == [2]


def test_a_summary_without_the_loop() -> None:
    measured = Measured({"embedded": Costs([2000], [2000], [3000], [1000], [1000])}, is_complete=True)
    figures = summary(measured)["embedded"]
    assert "share_of_loop" not in figures
    assert figures["runner_us"] == {"p50": 2.0, "p90": 2.0, "p99": 2.0, "max": 2.0}
    assert percentiles_us([1000, 3000])["p50"] == 2.0


@pytest.mark.parametrize(
    "arguments", [("--rows", "0"), ("--workloads", "none"), ("--arms", "gpu"), ("--interval-ms", "x")]
)
def test_options_are_checked(arguments: tuple[str, str]) -> None:
    result = run(*TINY, *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output
