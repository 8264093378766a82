"""What the sidecar does when there is no message: an object with a name, so that it can be chosen and tested."""

from __future__ import annotations

import os
import time
from typing import Protocol


class IdlePolicy(Protocol):
    """Told of every look at the socket; says when it is time to sleep on it."""

    def worked(self) -> None:
        """A message came."""

    def should_sleep(self) -> bool:
        """No message came. True: wait on the socket. False: look again."""


class SpinThenSleep:
    """Looks again for `spin_us` after the last message, giving the core away between looks; then sleeps."""

    def __init__(self, spin_us: int) -> None:
        self._spin_ns = spin_us * 1000
        self._deadline_ns = 0

    def worked(self) -> None:
        self._deadline_ns = 0

    def should_sleep(self) -> bool:
        now_ns = time.monotonic_ns()
        if self._deadline_ns == 0:
            self._deadline_ns = now_ns + self._spin_ns
        if now_ns >= self._deadline_ns:
            return True
        os.sched_yield()
        return False
