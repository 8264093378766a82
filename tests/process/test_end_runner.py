"""How a sidecar ends with its runner: killed, interrupted, or at the end of its interpreter. The runner of these tests
is a program of its own, which tells of its sidecar on standard output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import TIMEOUT_S
from tests.process.leftovers import WatchedProcess

PROLOGUE = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
import numpy as np
import asyncbook
options = {options!r}
config = asyncbook.BookConfig(max_num_reqs=4, max_model_len=100_000, vocab_size=100, **options)
book = asyncbook.spawn(config)
row = book.admit("a", [1])
batch = book.batch([row])
ids = np.array([5], np.int32)

def step():
    book.wait_room()
    number = book.submit(batch, ids)
    book.wait_applied(number)
    return number

def say(*words):
    print(*words, flush=True)

step()
"""
TELL = "say(book.sidecar_pid)"  # from here on the test knows the sidecar, and may do what it is about
WAITS_FOR_EVER = "threading.Event().wait()"
WORKS_FOR_EVER = "while True: step()"


class Runner(NamedTuple):
    """A runner's program and its sidecar."""

    process: subprocess.Popen[str]
    sidecar: WatchedProcess

    def end(self) -> tuple[int, str, str]:
        """Its exit status and what it said since its sidecar was told, once it and its sidecar have ended."""
        output, errors = self.process.communicate(timeout=TIMEOUT_S)
        assert self.sidecar.wait_end(), "the sidecar lives on"
        return self.process.returncode, output, errors


Start = Callable[..., Runner]


@pytest.fixture
def start(runtime_dir: Path, tmp_path: Path) -> Iterator[Start]:
    """`start(program, transport="zmq", device=None)`: a runner; one step is applied, then it runs the program."""
    runners: list[Runner] = []

    def begin(program: str, transport: str = "zmq", device: str | None = None) -> Runner:
        options = {"transport": transport, "device": device}
        if TELL not in program:
            program = f"{TELL}\n{program}"
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PROLOGUE.format(options=options) + program],
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


def nothing_left(runtime_dir: Path) -> bool:
    """No directory, no socket file, no memory with a name."""
    assert [str(path) for path in runtime_dir.rglob("*")] == []
    assert not [name for name in os.listdir("/dev/shm") if "asyncbook" in name]
    return True


# The runner is killed


@pytest.mark.parametrize(
    ("program", "transport"), [(WAITS_FOR_EVER, "zmq"), (WORKS_FOR_EVER, "ring")], ids=["idle", "busy"]
)
def test_the_sidecar_ends_with_a_killed_runner(start: Start, program: str, transport: str) -> None:
    runner = start(program, transport)
    runner.process.kill()
    status, _, _ = runner.end()
    assert status == -signal.SIGKILL


def test_the_sidecar_ends_while_it_waits_for_ids_that_will_never_come(start: Start) -> None:
    pytest.importorskip("torch")
    program = """
import torch
book._device.link.device.launch(threading.Event().wait)
book.submit(batch, torch.tensor([5]))
book.abort(row)
say(book.sidecar_pid)
threading.Event().wait()
"""
    runner = start(program, device="fake")
    runner.process.kill()
    status, _, _ = runner.end()
    assert status == -signal.SIGKILL


def test_a_killed_runner_leaves_no_file(start: Start, runtime_dir: Path) -> None:
    runner = start(WAITS_FOR_EVER)
    runner.process.kill()
    runner.end()
    assert nothing_left(runtime_dir)


def test_a_runner_killed_while_its_sidecar_starts(runtime_dir: Path, tmp_path: Path) -> None:
    program = """
import os, signal
import asyncbook, asyncbook.process
def killed(process, timeout_s):
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncbook.process.SidecarProcess.shake_hands = killed
asyncbook.spawn(asyncbook.BookConfig(max_num_reqs=4, max_model_len=16, vocab_size=100))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            sidecar = WatchedProcess(pid)
        except ProcessLookupError:  # it has ended already
            return
    assert sidecar.wait_end()
    sidecar.close()


# The runner is interrupted


def test_ctrl_c_is_the_runner_s_to_answer(start: Start, runtime_dir: Path) -> None:
    runner = start(
        f"""
try:
    {TELL}
    threading.Event().wait()
except KeyboardInterrupt:
    say("interrupted")
for _ in range(3):
    number = step()  # the sidecar goes on until the runner says so
say(number, len(book.token_ids(row)))
book.close()
say(book.applied_step)
"""
    )
    os.killpg(runner.process.pid, signal.SIGINT)
    assert runner.end() == (0, "interrupted\n4 5\n4\n", "")
    assert nothing_left(runtime_dir)


def test_ctrl_c_that_nobody_answers(start: Start, runtime_dir: Path) -> None:
    runner = start(f"with book:\n    {TELL}\n    {WAITS_FOR_EVER}")
    os.killpg(runner.process.pid, signal.SIGINT)
    status, _, errors = runner.end()
    assert status == -signal.SIGINT
    assert errors.count("Traceback (most recent call last)") == 1  # the runner's own
    assert "KeyboardInterrupt" in errors
    assert "asyncbook.worker" not in errors
    assert nothing_left(runtime_dir)


# The runner's interpreter ends


@pytest.mark.parametrize(
    ("program", "status", "fragment"),
    [
        ("", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("book.submit(batch, ids)", 0, ""),
        ("other = asyncbook.spawn(config)", 0, ""),
        ("threading.Thread(target=step).start()", 0, ""),
    ],
    ids=["the end", "an error", "a step in flight", "two books", "a thread"],
)
def test_an_interpreter_ends_without_close(
    start: Start, runtime_dir: Path, program: str, status: int, fragment: str
) -> None:
    ended, _, errors = start(program).end()
    assert ended == status
    assert fragment in errors
    assert bool(errors) == bool(fragment)
    assert nothing_left(runtime_dir)


def test_a_forked_child_that_exits_takes_nothing_along(start: Start, runtime_dir: Path) -> None:
    runner = start(
        """
child = os.fork()
if child == 0:
    sys.exit(5)
_, status = os.waitpid(child, 0)
say(os.waitstatus_to_exitcode(status))
say(step())
say(os.listdir(os.environ["XDG_RUNTIME_DIR"]) != [])
book.close()
"""
    )
    status, output, _ = runner.end()  # (the child may be told that it forgets a process which is not its own)
    assert (status, output) == (0, "5\n2\nTrue\n")
    assert nothing_left(runtime_dir)
