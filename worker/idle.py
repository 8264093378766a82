"""What the sidecar does when there is nothing to do: objects with names, chosen in the config (`idle_policy`).

A policy is told of every step and asked after every look that found nothing. It answers with what to do before the next
look. It reads the clock that it is given, so a test can give it another.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from time import monotonic_ns
from typing import Protocol

Clock = Callable[[], int]


class Idle(IntEnum):
    """What to do before the next look."""

    SPIN = 0  # give the core away once and look again
    NAP = 1  # wait for a message, for about a millisecond; a step in the ring does not end it, and rings no bell
    SLEEP = 2  # say that the bookkeeper sleeps, look once more, wait until something comes


class IdlePolicy(Protocol):
    """How to wait for work."""

    def worked(self) -> None:
        """A message was applied."""

    def idle(self) -> Idle:
        """A look found nothing."""


class SpinThenSleep:
    """Looks again for `spin_us` after the last message, giving the core away between looks; then sleeps.

    The runner pays for waking it: tens of microseconds a step, wherever steps are further apart than `spin_us`.
    """

    def __init__(self, spin_us: int, clock: Clock = monotonic_ns) -> None:
        self._spin_ns = spin_us * 1000
        self._clock = clock
        self._worked_ns = clock()

    def worked(self) -> None:
        self._worked_ns = self._clock()

    def idle(self) -> Idle:
        return Idle.SPIN if self._clock() - self._worked_ns < self._spin_ns else Idle.SLEEP


class Cadence:
    """Knows when the next step is due: engines step at a pace. Naps until shortly before, looks until it comes, and
    sleeps when it does not. So the runner wakes nobody while it runs, and an idle book costs nothing.

    The interval between steps is averaged over the last few; the look-out starts a quarter of it early (at least
    `MIN_MARGIN_NS`), and ends when the step is `PATIENCE` intervals late or `MAX_LOOKOUT_NS` have passed.
    """

    NAP_NS = 1_000_000  # a nap is a wait on the socket, whose clock ticks in milliseconds
    MIN_MARGIN_NS = 500_000
    PATIENCE = 2
    MAX_LOOKOUT_NS = 50_000_000
    WEIGHT = 8  # of the average, against one of the newest interval

    def __init__(self, spin_us: int, clock: Clock = monotonic_ns) -> None:
        self._spin_ns = spin_us * 1000
        self._clock = clock
        self._worked_ns = clock()
        self._interval_ns = 0

    def worked(self) -> None:
        now_ns = self._clock()
        interval_ns = now_ns - self._worked_ns
        self._worked_ns = now_ns
        if interval_ns > self.MAX_LOOKOUT_NS:
            self._interval_ns = 0  # a pause says nothing of the pace
        elif self._interval_ns == 0:
            self._interval_ns = interval_ns
        else:
            self._interval_ns += (interval_ns - self._interval_ns) // self.WEIGHT

    def idle(self) -> Idle:
        since_ns = self._clock() - self._worked_ns
        if since_ns < self._spin_ns:
            return Idle.SPIN
        interval_ns = self._interval_ns
        if interval_ns == 0 or since_ns > min((1 + self.PATIENCE) * interval_ns, interval_ns + self.MAX_LOOKOUT_NS):
            return Idle.SLEEP
        margin_ns = max(interval_ns // 4, self.MIN_MARGIN_NS)
        return Idle.NAP if since_ns + self.NAP_NS < interval_ns - margin_ns else Idle.SPIN


POLICIES: dict[str, Callable[[int], IdlePolicy]] = {"spin-then-sleep": SpinThenSleep, "cadence": Cadence}
