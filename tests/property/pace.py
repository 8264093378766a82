"""The pace of a sidecar, in the hands of a test."""

from __future__ import annotations

import os
import signal

from asyncbook import Book


class SidecarPace:
    """Lets a book's sidecar stand still, so that whatever is submitted stays in flight. Without a sidecar, nothing."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.is_paused = False

    def pause(self) -> None:
        """Returns when the process has stopped."""
        pid = self._book.sidecar_pid
        if pid is not None and not self.is_paused:
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED)
            self.is_paused = True

    def wake(self) -> None:
        """It goes on."""
        if self.is_paused:
            assert self._book.sidecar_pid is not None
            os.kill(self._book.sidecar_pid, signal.SIGCONT)
            self.is_paused = False

    @property
    def is_full(self) -> bool:
        """Whether it stands still with as many steps in flight as there may be."""
        in_flight = self._book.submitted_step - self._book.applied_step
        return self.is_paused and in_flight == self._book.config.max_in_flight
