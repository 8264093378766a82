"""Runners that are killed, at chosen or random moments, and what is then left of them.

Every process of a runner carries a mark in its environment, which its sidecars inherit: so they are found whenever they
were started, and however briefly they lived.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from asyncbook.ipc import runtime_dir
from tests.conftest import TIMEOUT_S

MARK = "ASYNCBOOK_TEST_RUNNER"
ROOT = Path(__file__).resolve().parents[2]
PROLOGUE = """
import os, signal, sys, threading
import numpy as np
import asyncbook

def spawn(transport="zmq"):
    size = dict(max_num_reqs=4, max_model_len=1000, vocab_size=100)
    return asyncbook.spawn(asyncbook.BookConfig(**size, transport=transport))

def work(book):
    batch = book.batch([book.admit("a", [1])])
    ids = np.array([5], np.int32)
    print("ready", flush=True)
    while True:
        book.wait_room()
        book.submit(batch, ids)
        book.poll_outputs()
"""
# What the runner is at when it is killed: its program, and whether it says when it is there.
MOMENTS: dict[str, tuple[str, bool]] = {
    "idle": ('book = spawn()\nprint("ready", flush=True)\nthreading.Event().wait()', True),
    "busy, zmq": ("work(spawn())", True),
    "busy, ring": ('work(spawn("ring"))', True),
    "starting": ("spawn()", False),
    "a sidecar restarts": (
        'book = spawn()\nos.kill(book.sidecar_pid, signal.SIGKILL)\nprint("ready", flush=True)\n'
        "try:\n    work(book)\nexcept asyncbook.AsyncbookError:\n    threading.Event().wait()",
        True,
    ),
    "spawned in a thread": (
        "books = []\nthread = threading.Thread(target=lambda: books.append(spawn()))\nthread.start()\nthread.join()\n"
        "work(books[0])",
        True,
    ),
}
START_S = 1.5  # importing and spawning take about this long: when to kill a runner that starts


class Killed(NamedTuple):
    """What became of a killed runner."""

    gone_s: float  # from the kill until no process of it was there
    num_left: int  # processes that did not go
    num_stale: int  # folders that only the next start removed
    num_files: int  # files that are there even then


def marked_processes(mark: str) -> set[int]:
    """Live processes whose environment has the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in environ.read_bytes().split(b"\0"):
                found.add(int(environ.parent.name))
        except (OSError, ValueError):
            continue
    return found


def kill_runner(moment: str, pick: random.Random, folder: Path) -> Killed:
    """Starts a runner with its sockets in `folder`, kills it at the moment, waits until its processes are gone."""
    program, is_told = MOMENTS[moment]
    mark = uuid.uuid4().hex
    runner = subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + program],
        env={**os.environ, MARK: mark, "XDG_RUNTIME_DIR": str(folder)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert runner.stdout is not None
    if is_told:
        assert runner.stdout.readline() == b"ready\n"
    time.sleep(pick.uniform(0, 0.3 if is_told else START_S))  # the random moment, not a wait for something
    start = time.monotonic()
    runner.send_signal(signal.SIGKILL)
    runner.wait(TIMEOUT_S)
    while (left := marked_processes(mark)) and time.monotonic() - start < TIMEOUT_S:
        time.sleep(0.002)
    gone_s = time.monotonic() - start
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    runner.stdout.close()
    stale = [path for path in runtime_dir.stale_directories() if path.parent == folder]
    runtime_dir.remove_stale()
    return Killed(gone_s, len(left), len(stale), len(list(folder.rglob("*"))))
