"""How a sidecar ends with its runner: killed, interrupted, or at the end of its interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.leftovers import WatchedProcess
from tests.process.runners import TELL, WAITS_FOR_EVER, WORKS_FOR_EVER, Start, nothing_left

# The runner is killed


@pytest.mark.parametrize(
    ("program", "transport"), [(WAITS_FOR_EVER, "zmq"), (WORKS_FOR_EVER, "ring")], ids=["idle", "busy"]
)
def test_the_sidecar_ends_with_a_killed_runner(start: Start, program: str, transport: str) -> None:
    runner = start(program, transport)
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
