"""`asyncbook doctor`: what it finds on machines that are as they should be, and on others."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from asyncbook import BookConfig, doctor
from asyncbook.__main__ import main
from asyncbook.doctor import Finding, Level
from asyncbook.ipc import jit, runtime_dir
from asyncbook.ipc.limits import Limit


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def findings(*arguments: str) -> dict[str, list[Finding]]:
    """By check, from the JSON."""
    found: dict[str, list[Finding]] = {}
    for fields in json.loads(run("--json", *arguments).stdout):
        finding = Finding(**{**fields, "level": Level(fields["level"])})
        found.setdefault(finding.check, []).append(finding)
    return found


def test_this_machine_is_good_enough_for_the_tests() -> None:
    result = run()
    assert result.exit_code == 0
    for word in ("python", "numpy", "shared memory", "cores", "kernel cache", "sockets", "torch", "ok"):
        assert word in result.stdout
    found = findings("--rows", "16", "--model-len", "100")
    assert {finding.level for finding in found["book"]} == {Level.OK}
    assert all(finding.remedy for several in found.values() for finding in several if finding.level is Level.FAIL)


@pytest.mark.parametrize(
    "arguments", [["--rows", "5"], ["--model-len", "5"], ["--rows", "99999999", "--model-len", "1"]]
)
def test_a_size_that_is_none(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


LAYOUT = BookConfig(max_num_reqs=256, max_model_len=131072, vocab_size=1).layout


@pytest.mark.parametrize(
    ("available", "level", "status"),
    [
        (LAYOUT.table_offset - 1, Level.FAIL, 1),
        (LAYOUT.table_offset + 1, Level.NOTE, 0),
        (LAYOUT.total_bytes, Level.OK, 0),
    ],
)
def test_a_book_that_fits_or_does_not(
    monkeypatch: pytest.MonkeyPatch, available: int, level: Level, status: int
) -> None:
    for module in ("asyncbook.doctor", "asyncbook.ipc.segment"):
        monkeypatch.setattr(f"{module}.memory_limits", lambda: [Limit("memory.max of /a", available, "raise it")])
    size = ("--rows", "256", "--model-len", "131072")
    (finding,) = findings(*size)["book"]
    assert finding.level is level
    assert ("raise it" in finding.remedy) == (level is not Level.OK)
    assert run(*size).exit_code == status


def fail(check: Callable[[], object]) -> Finding:
    """The only finding of a check that is not good."""
    (finding,) = [finding for finding in check() if finding.level is not Level.OK]  # type: ignore[attr-defined]
    assert finding.remedy
    return finding


def test_what_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"numba": "0.50.1"}

    def version(name: str) -> str:
        if name == "msgspec":
            raise importlib.metadata.PackageNotFoundError
        return versions.get(name, "99")

    monkeypatch.setattr(importlib.metadata, "version", version)
    bad = [finding for finding in doctor.check_versions() if finding.level is Level.FAIL]
    assert [finding.what.split()[0] for finding in bad] == ["msgspec", "numba"]
    assert all("pip install" in finding.remedy for finding in bad)
    assert run().exit_code == 1


def test_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert fail(doctor.check_shared_memory).level is Level.NOTE


def test_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert fail(doctor.check_cores).level is Level.NOTE


def test_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (64, 64))
    assert fail(doctor.check_descriptors).level is Level.FAIL


@pytest.mark.parametrize(("is_cached", "level"), [(True, Level.NOTE), (False, Level.FAIL)])
def test_a_kernel_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, is_cached: bool, level: Level) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(jit, "is_cached", lambda: is_cached)
    finding = fail(doctor.check_kernel_cache)
    assert finding.level is level
    assert "NUMBA_CACHE_DIR" in finding.remedy


def test_no_folder_for_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(runtime_dir, "places", lambda: iter([tmp_path / "nowhere", long]))
    finding = fail(doctor.check_runtime_directory)
    assert finding.level is Level.FAIL
    assert "nowhere" in finding.what
    assert "bytes" in finding.what
    assert "TMPDIR" in finding.remedy


def test_what_dead_processes_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime_dir, "places", lambda: iter([tmp_path]))
    monkeypatch.setattr(runtime_dir, "why_unusable", lambda place, names: "")
    (tmp_path / f"asyncbook-{os.getpid()}-1-{runtime_dir._world()}-abc").mkdir()
    assert fail(doctor.check_runtime_directory).check == "leftovers"


def test_a_check_that_fails_itself_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no such file")

    monkeypatch.setattr(doctor, "check_cores", broken)
    result = run("--json")
    assert result.exit_code == 1
    assert "RuntimeError: no such file" in result.stdout
