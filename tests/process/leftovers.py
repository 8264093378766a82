"""What a book may not leave behind: processes, directories, descriptors."""

from __future__ import annotations

import gc
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import TIMEOUT_S


def children() -> dict[int, str]:
    """Processes of ours, ended ones that nobody waited for among them, with their state."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name_and_before, _, after = stat.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = after.split()[:2]
        if int(parent) == os.getpid():
            found[int(name_and_before.split()[0])] = state
    return found


def descriptors() -> dict[int, str]:
    """Open descriptors and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed them
            continue
    return found


@contextmanager
def nothing_left_behind(directory: Path) -> Iterator[None]:
    """The block leaves no new process, no new descriptor and nothing in the directory for sockets."""
    gc.collect()
    children_before, descriptors_before = children(), descriptors()
    yield
    gc.collect()  # a mapping ends with its last view, and its descriptor with it
    left = {
        "processes": {pid: state for pid, state in children().items() if pid not in children_before},
        "descriptors": {fd: what for fd, what in descriptors().items() if descriptors_before.get(fd) != what},
        "files": [str(path) for path in directory.iterdir()],
    }
    assert not any(left.values()), f"left behind: {left}"


class WatchedProcess:
    """Any process by its pid, watched from now on; its number cannot be mistaken for a later process's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def wait_end(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Whether it has ended, after at most this long."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """Lets go of it."""
        os.close(self._pidfd)


def sockets_folder(runtime_dir: Path) -> Path:
    """The folder in which the one sidecar there is meets its runner; the other one is the book's address."""
    folders = [folder for folder in runtime_dir.iterdir() if (folder / "commands").exists()]
    assert len(folders) == 1
    return folders[0]
