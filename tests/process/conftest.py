"""A folder of its own for the sockets of each test, so that what is left in it is this test's."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TIMEOUT_S
from tests.process.leftovers import WatchedProcess
from tests.process.runners import PROLOGUE, TELL, Runner, Start


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where books put their sockets. Not under `tmp_path`, which is too long for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="ab") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture
def start(runtime_dir: Path, tmp_path: Path) -> Iterator[Start]:
    """`start(program, transport="zmq")`: a runner that has a book with one step applied, then runs the program."""
    runners: list[Runner] = []

    def begin(program: str, transport: str = "zmq") -> Runner:
        if TELL not in program:
            program = f"{TELL}\n{program}"
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PROLOGUE.format(transport=transport) + program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            process_group=0,
        )
        assert process.stdout is not None
        first_line = process.stdout.readline()
        if not first_line:
            raise AssertionError(process.communicate(timeout=TIMEOUT_S))
        runners.append(Runner(process, WatchedProcess(int(first_line))))
        return runners[-1]

    yield begin
    for runner in runners:
        if runner.process.poll() is None:
            runner.process.kill()
        runner.process.communicate(timeout=TIMEOUT_S)
        runner.sidecar.close()
