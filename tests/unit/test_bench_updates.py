"""`asyncbook bench updates`: a tiny run of everything, and what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
from click.testing import CliRunner

from asyncbook.__main__ import main
from asyncbook.bench import update_arms, update_run
from asyncbook.bench.update_arms import Arm
from asyncbook.bench.update_cells import Cell, make_cells, make_steps
from asyncbook.bench.update_run import ArmsDiffer, Settings

TINY = ("bench", "updates", "--seconds", "0", "--sizes", "10", "--shares", "one,all")
TIMES = {"p25_ns", "p50_ns", "p75_ns", "p99_ns", "speedup", "speedup_p25", "speedup_p75", "samples", "calls", "arm"}


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_a_tiny_run_of_everything(tmp_path: Path) -> None:
    """Arms compare their arrays in the run itself: one that differs is an error."""
    json_path, plot_path = tmp_path / "updates.json", tmp_path / "updates.png"
    result = run(*TINY, "--ids", "1,1..6", "--shuffled", "--json", str(json_path), "--plot", str(plot_path))
    assert result.exit_code == 0, result.output
    assert "the two 1-D arrays" in result.output
    assert plot_path.stat().st_size > 0
    report = json.loads(json_path.read_text())
    assert report["complete"]
    assert report["command"].startswith("asyncbook bench updates --sizes 10 --shares one,all --ids 1,1..6")
    assert {"command", "started", "git_commit", "machine", "versions", "budgets", "cells"} <= report.keys()
    assert {"processor", "cores", "system"} <= report["machine"].keys()
    assert {"python", "numpy", "numba"} <= report["versions"].keys()
    cells = {(c["work"], c["num_rows"], c["ids"]): c["arms"] for c in report["cells"]}
    assert set(cells) == {("columns", n, "1") for n in (1, 10)} | {
        (work, n, ids) for work in ("tokens", "mask", "tensor", "step") for n in (1, 10) for ids in ("1", "1..6")
    }
    for arms in cells.values():
        assert arms[0]["arm"] == "loop"
        assert arms[0]["speedup"] == 1.0
        assert all(arm.keys() == TIMES for arm in arms)
        assert all(0 < arm["p25_ns"] <= arm["p50_ns"] <= arm["p75_ns"] <= arm["p99_ns"] for arm in arms)


def test_ctrl_c_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_cell, done = update_run.run_cell, []

    def interrupted(cell: Cell, settings: Settings) -> update_run.Result:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(cell)
        return run_cell(cell, settings)

    monkeypatch.setattr(update_run, "run_cell", interrupted)
    json_path = tmp_path / "updates.json"
    result = run(*TINY, "--works", "columns", "--json", str(json_path))
    assert result.exit_code == 0
    assert "interrupted after 1 of 2 cells" in result.output
    report = json.loads(json_path.read_text())
    assert not report["complete"]
    assert len(report["cells"]) == 1


def test_an_arm_that_differs_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(state: update_arms.State) -> update_arms.Run:
        def run_wrong(step: update_arms.Step) -> None:
            state.num_tokens[step.rows] = step.ends
            state.num_tokens_no_spec[step.rows] = step.ends - (step.rows == 7)

        return run_wrong

    monkeypatch.setitem(update_arms._COLUMNS, update_arms.NUMPY, wrong)
    result = run(*TINY, "--works", "columns", "--shares", "all")
    assert result.exit_code == 1
    assert "numpy and loop differ in row 7 of num_tokens_no_spec" in result.output


def test_differences_are_found_in_every_array() -> None:
    cell = Cell("step", 4, "all", 4, "1")
    prompt_lengths = np.full(4, 16, np.int32)
    for name in ("num_tokens", "num_tokens_no_spec", "token_ids", "is_token_ids"):
        states = [update_arms.State(prompt_lengths) for _ in range(2)]
        arms = [Arm(str(index), state, lambda step: None) for index, state in enumerate(states)]
        update_run.check_equal(cell, arms)
        getattr(states[1], name)[2] = 1 if name != "is_token_ids" else False
        with pytest.raises(ArmsDiffer, match=f"row 2 of {name}"):
            update_run.check_equal(cell, arms)


def test_cells_that_say_the_same_are_measured_once() -> None:
    cells = make_cells(["columns", "step"], [10, 100], ["one", "1%", "10%", "all"], ["1", "6"])
    columns = [(cell.size, cell.num_rows) for cell in cells if cell.work == "columns"]
    assert columns == [(10, 1), (10, 10), (100, 1), (100, 10), (100, 100)]
    assert len([c for c in cells if c.work == "step"]) == 10


@pytest.mark.parametrize("ids", ["1", "6", "1..6"])
def test_steps_hold_the_same_in_every_form(ids) -> None:
    rng = np.random.default_rng(0)
    for step in make_steps(Cell("step", 50, "50%", 25, ids), rng, shuffled=True):
        assert step.row_list == step.rows.tolist()
        assert [len(id_list) for id_list in step.id_lists] == step.lengths.tolist()
        assert [[i for i in row if i != -1] for row in step.sampled.tolist()] == step.id_lists
        assert (step.starts + step.lengths).tolist() == step.ends.tolist() == step.end_list


@pytest.mark.parametrize(
    "arguments",
    [("--works", "rows"), ("--sizes", "0"), ("--sizes", "ten"), ("--shares", "2%"), ("--calls", "0")],
)
def test_options_are_checked(arguments) -> None:
    result = run(*TINY, *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_peer_that_is_not_there() -> None:
    pytest.importorskip("torch")
    try:
        import vllm  # noqa: F401
    except ImportError:
        result = run(*TINY, "--peer", "vllm")
        assert result.exit_code == 1
        assert "vllm is not importable here" in result.output


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [("click", [], "asyncbook[cli]"), ("rich", ["bench", "updates", "--quick"], "asyncbook[bench]")],
)
def test_names_the_extra_to_install(missing, arguments, extra) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; sys.argv[1:] = {arguments!r}\n"
    code += "from asyncbook.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert missing in result.stderr
    assert f'pip install "{extra}"' in result.stderr


def test_the_command_line_names_its_commands() -> None:
    result = run("--help")
    assert "bench" in result.output
    assert "demo" in result.output
    assert "updates" in run("bench", "--help").output
