"""Signals that reach runner and sidecar alike: they are the runner's to answer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.process.runners import TELL, Start, nothing_left

GROUP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", GROUP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_to_the_group_is_the_runner_s_to_answer(start: Start, runtime_dir: Path, number: int) -> None:
    runner = start(
        f"""
came = threading.Event()
signal.signal({int(number)}, lambda *_: came.set())
{TELL}
while not came.wait(0.01):
    pass
pid = book.sidecar_pid
for _ in range(3):
    last = step()
say(last, book.sidecar_pid == pid)
book.close()
"""
    )
    os.killpg(runner.process.pid, number)
    assert runner.end() == (0, "4 True\n", "")
    assert nothing_left(runtime_dir)


def test_sigterm_that_nobody_answers(start: Start, runtime_dir: Path) -> None:
    runner = start("threading.Event().wait()")
    os.killpg(runner.process.pid, signal.SIGTERM)
    status, _, errors = runner.end()
    assert (status, errors) == (-signal.SIGTERM, "")
    assert nothing_left(runtime_dir)


def test_sigterm_twice_the_second_in_the_middle_of_close(start: Start, runtime_dir: Path) -> None:
    runner = start(
        f"""
def leave(*_):
    say("asked to leave")
    raise SystemExit(7)
signal.signal(signal.SIGTERM, leave)
stop_sidecar = book._stop_sidecar
def interrupted():
    os.killpg(0, signal.SIGTERM)
    stop_sidecar()
book._stop_sidecar = interrupted
with book:
    {TELL}
    threading.Event().wait()
"""
    )
    os.killpg(runner.process.pid, signal.SIGTERM)
    status, output, errors = runner.end()
    assert (status, output, errors) == (7, "asked to leave\nasked to leave\n", "")
    assert nothing_left(runtime_dir)


def test_signals_while_the_sidecar_starts(start: Start, runtime_dir: Path) -> None:
    """They come when it is an interpreter that has not read its first line yet."""
    runner = start(
        f"""
from asyncbook.process import SidecarProcess
{TELL}
came = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: came.append(number))
hand_over = SidecarProcess._hand_over_setup
def interrupted(*arguments):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.killpg(0, number)
    hand_over(*arguments)
SidecarProcess._hand_over_setup = interrupted
with asyncbook.spawn(config) as other:
    other.wait_applied(other.submit(other.batch([]), np.zeros(0, np.int32)))
    say(other.applied_step, sorted(set(came)))
book.close()
"""
    )
    assert runner.end() == (0, "1 [1, 2, 15]\n", "")
    assert nothing_left(runtime_dir)


def test_a_forked_child_does_not_keep_the_sidecar_of_a_killed_runner(start: Start, runtime_dir: Path) -> None:
    """It holds the other end of the lifetime pipe open."""
    runner = start(
        f"""
child = os.fork()
if child == 0:
    signal.pause()
{TELL}
say(child)
threading.Event().wait()
"""
    )
    assert runner.process.stdout is not None
    child = int(runner.process.stdout.readline())
    runner.process.kill()
    try:
        assert runner.sidecar.wait_end()
        assert nothing_left(runtime_dir)
    finally:
        os.kill(child, signal.SIGKILL)
    runner.end()
