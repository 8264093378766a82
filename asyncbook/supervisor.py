"""Watches the sidecar, and starts another one where it ends without being asked to.

A thread waits for the process to end, so its end is noticed within milliseconds and costs nothing until then. It also
starts the next process, which takes long; all else is left to the book's own thread, in whatever call comes next:
the thread says `is_down`, and the book adopts the replacement once that is ready.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from typing import NamedTuple

from asyncbook.config import BookConfig
from asyncbook.ipc.channel import RunnerChannel
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
        self._stands_down = False
        self._close_event = os.eventfd(0, os.EFD_CLOEXEC)
        # Readable when something has become of the replacement.
        self.changed_descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._watch, name="asyncbook-supervisor", daemon=True)
        self._thread.start()

    # In the thread

    def _watch(self) -> None:
        process = self.link.process
        while self._wait_for_end(process):
            self.is_down = True
            try:
                link, reason = self._next(process)
            except Exception as error:  # no descriptors, no folder, no memory: whoever waits must hear of it
                link, reason = (
                    None,
                    f"the sidecar died, and no other one can be started: {type(error).__name__}: {error}",
                )
            if not self._announce(link, reason) or link is None:
                return
            process = link.process

    def _wait_for_end(self, process: SidecarProcess) -> bool:
        """False where its end is nothing to be noticed: the book is closed, or about to be."""
        with self._lock:
            if self._stands_down:
                return False
            poll = select.poll()
            poll.register(process.pidfd, select.POLLIN)
            poll.register(self._close_event, select.POLLIN)
        return self._close_event not in dict(poll.poll())

    def _next(self, process: SidecarProcess) -> tuple[Link | None, str]:
        """Another process in the place of one that ended, or why there is none."""
        self._deaths.append(time.monotonic())
        reason = f"the sidecar (pid {process.pid}) died: {process.describe_end()}"
        if self._config.restart == "fail":
            return None, reason
        if len(self._deaths) == MAX_DEATHS and self._deaths[-1] - self._deaths[0] < DEATHS_WINDOW_S:
            return None, f"{reason}; {MAX_DEATHS} died within {DEATHS_WINDOW_S:g} s"
        channel = RunnerChannel()
        try:
            process = SidecarProcess(self._config, self._segment_descriptor, channel, is_restart=True)
        except BaseException:
            channel.close()
            raise
        return Link(channel, process), ""

    def _announce(self, link: Link | None, reason: str) -> bool:
        """False where the book was closed meanwhile."""
        with self._lock:
            if self._is_closed:
                if link is not None:
                    link.end(wait=False)
                return False
            if self._replacement is not None:
                self._retired.append(self._replacement)
            self._replacement, self.reason = link, reason
            self.is_down = True  # the one that ended may have been adopted meanwhile
            self._noticed.set()
            os.eventfd_write(self.changed_descriptor, 1)
        return True

    # In the book's thread

    def wait_noticed(self) -> None:
        """The sidecar has ended: until the thread knows it, too, and has started the next one or given up."""
        self._noticed.wait(NOTICE_TIMEOUT_S)

    @property
    def replacement(self) -> Link | None:
        """The next sidecar, perhaps not ready yet; None where there is none yet."""
        return self._replacement

    def take_news(self) -> bool:
        """Whether there was something that `changed_descriptor` told."""
        try:
            os.eventfd_read(self.changed_descriptor)
        except BlockingIOError:
            return False
        return True

    def take_retired(self) -> list[Link]:
        """Sidecars that have ended, and whose descriptors are to be closed once nobody waits for them."""
        with self._lock:
            retired, self._retired = self._retired, []
        return retired

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

    def stand_down(self) -> None:
        """The sidecar's end is nothing to be noticed from now on: it is asked to end."""
        with self._lock:
            self._stands_down = True
            os.eventfd_write(self._close_event, 1)

    def end(self) -> None:
        """Ends the thread and every sidecar. Idempotent. In a forked child it does nothing: the parent has it all."""
        if self._is_closed or not self.link.process.is_ours():
            return
        with self._lock:
            self._is_closed = True
            links = [*self._retired, *([self._replacement] if self._replacement is not None else [])]
        self.stand_down()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for link in links:
            link.end(wait=False)
        self.link.end(wait=True)
        os.close(self._close_event)
        os.close(self.changed_descriptor)
