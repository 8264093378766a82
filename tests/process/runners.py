"""A runner that is a program of its own. It tells of its sidecar on standard output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.conftest import TIMEOUT_S
from tests.process.leftovers import WatchedProcess

PROLOGUE = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
import numpy as np
import asyncbook
config = asyncbook.BookConfig(max_num_reqs=4, max_model_len=100_000, vocab_size=100, transport={transport!r})
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


def nothing_left(runtime_dir: Path) -> bool:
    """No directory, no socket file, no memory with a name."""
    assert [str(path) for path in runtime_dir.rglob("*")] == []
    assert not [name for name in os.listdir("/dev/shm") if "asyncbook" in name]
    return True
