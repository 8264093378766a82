"""Watches the sidecar, and starts another one where it ends without being asked to.

A thread waits for the process to end, so its end is noticed within milliseconds and costs nothing until then. It also
starts the next process, which takes long; all else is left to the book's own thread, in whatever call comes next:
the thread says `is_down`, and the book adopts the replacement once that is ready.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from typing import NamedTuple

from asyncbook.config import BookConfig
from asyncbook.ipc.channel import RunnerChannel
from asyncbook.ipc.errors import PeerError
from asyncbook.process import SidecarProcess

MAX_DEATHS = 3
DEATHS_WINDOW_S = 10.0
NOTICE_TIMEOUT_S = 1.0


class Link(NamedTuple):
    """A sidecar and the sockets to it."""

    channel: RunnerChannel
    process: SidecarProcess

    def end(self, *, wait: bool) -> None:
        """Ends the process, at once or after it had time to end by itself, and closes the sockets."""
        if wait:
            self.process.stop()
        else:
            self.process.kill()
        self.channel.close()


class Supervisor:
    """One a book. `is_down` is False while `link` is in use, and everything but the flag costs nothing then."""

    def __init__(self, config: BookConfig, segment_descriptor: int, link: Link) -> None:
        self.link = link
        self.is_down = False
        self.num_restarts = 0
        self.reason = ""  # why there is no other sidecar to come, once that is so
        self._config = config
        self._segment_descriptor = segment_descriptor
        self._replacement: Link | None = None
        self._retired: list[Link] = []
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._lock = threading.RLock()  # a collected book ends in whatever thread collects it
        self._noticed = threading.Event()
        self._is_closed = False
        self._close_event = os.eventfd(0, os.EFD_CLOEXEC)
        # Readable when something has become of the replacement.
        self.changed_descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._watch, name="asyncbook-supervisor", daemon=True)
        self._thread.start()

    # In the thread

    def _watch(self) -> None:
        process = self.link.process
        while self._wait_for_end(process):
            link = self._replace(process)
            if link is None:
                return
            process = link.process

    def _wait_for_end(self, process: SidecarProcess) -> bool:
        """False where the book is closed first."""
        poll = select.poll()
        poll.register(process.pidfd, select.POLLIN)
        poll.register(self._close_event, select.POLLIN)
        return self._close_event not in dict(poll.poll())

    def _replace(self, process: SidecarProcess) -> Link | None:
        """Another process in the place of one that ended; None where there will be none."""
        self.is_down = True
        self._deaths.append(time.monotonic())
        link, reason = None, f"the sidecar (pid {process.pid}) died: {process.describe_end()}"
        if self._config.restart == "replay":
            if len(self._deaths) == MAX_DEATHS and self._deaths[-1] - self._deaths[0] < DEATHS_WINDOW_S:
                reason = f"{reason}; it was the third to die within {DEATHS_WINDOW_S:g} s"
            else:
                link, reason = self._start()
        with self._lock:
            if self._replacement is not None:
                self._retired.append(self._replacement)
            self._replacement, self.reason = link, reason
            if self._is_closed and link is not None:
                link.end(wait=False)
                self._replacement = link = None
            self._noticed.set()
            if not self._is_closed:
                os.eventfd_write(self.changed_descriptor, 1)
        return link

    def _start(self) -> tuple[Link | None, str]:
        channel = RunnerChannel()
        try:
            process = SidecarProcess(self._config, self._segment_descriptor, channel, is_restart=True)
        except (PeerError, OSError) as error:
            channel.close()
            return None, f"the sidecar died, and no other one can be started: {error}"
        return Link(channel, process), ""

    # In the book's thread

    def wait_noticed(self) -> None:
        """The sidecar has ended: until the thread knows it, too, and has started the next one or given up."""
        self._noticed.wait(NOTICE_TIMEOUT_S)

    @property
    def replacement(self) -> Link | None:
        """The next sidecar, perhaps not ready yet; None where there is none yet."""
        return self._replacement

    def take_news(self) -> None:
        """Takes notice of what `changed_descriptor` told, and lets go of replacements that ended before their time."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.changed_descriptor)
            retired, self._retired = self._retired, []
        for link in retired:
            link.end(wait=False)

    def adopt(self, link: Link) -> bool:
        """The replacement is the sidecar from now on, unless it has ended meanwhile."""
        with self._lock:
            if self._replacement is not link:
                return False
            self._retired.append(self.link)
            self.link, self._replacement = link, None
            self.num_restarts += 1
            self.is_down = False
            self._noticed.clear()
        return True

    def end(self) -> None:
        """Ends the thread and every sidecar. Idempotent. In a forked child it does nothing: the parent has it all."""
        if self._is_closed or not self.link.process.is_ours():
            return
        with self._lock:
            self._is_closed = True
            links = [*self._retired, *([self._replacement] if self._replacement is not None else [])]
        os.eventfd_write(self._close_event, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for link in links:
            link.end(wait=False)
        self.link.end(wait=True)
        os.close(self._close_event)
        os.close(self.changed_descriptor)
