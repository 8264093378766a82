"""Ends the sidecar with its runner, whatever the sidecar is at. Imports next to nothing: it is there first."""

from __future__ import annotations

import os
import select
import shutil
import threading

GRACE_S = 0.2  # for a duty cycle to end by itself
EXIT_TIMEOUT_MS = 500  # from the end of a process's descriptors to its own


class RunnerWatch:
    """A thread that waits for the runner's end: the end of the lifetime pipe, or of the process itself, as a process
    that the runner forked may hold the pipe's other end. `descriptors` are readable then.

    A duty cycle sees them too and has a moment to end by itself. All else is ended by the thread: imports,
    compilations, a wait for room to send.
    """

    def __init__(self, lifetime: int, runner_pid: int, directory: str) -> None:
        self._directory = directory
        self.is_serving = False
        self._lifetime = lifetime
        self._runner = os.pidfd_open(os.getppid())
        self.descriptors = (lifetime, self._runner)
        if os.getppid() != runner_pid:  # it was gone before it could be watched
            self.end()
        threading.Thread(target=self._watch, name="runner-watch", daemon=True).start()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._lifetime, 0)  # its end only: it brings the set-up first
        poll.register(self._runner, select.POLLIN)
        poll.poll()
        if self.is_serving:
            threading.Event().wait(GRACE_S)
        self.end()

    def end(self) -> None:
        """Ends this process. What the runner would have removed is left to its sidecar: the folder of this one, and
        of those before it."""
        from asyncbook.ipc.runtime_dir import remove_stale

        shutil.rmtree(self._directory, ignore_errors=True)
        poll = select.poll()
        poll.register(self._runner, select.POLLIN)
        poll.poll(EXIT_TIMEOUT_MS)
        remove_stale()
        os._exit(0)
