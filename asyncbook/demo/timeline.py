"""What happened when: spans of the runner's thread and of the bookkeeper, on the clock that all processes share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

COST = ("admit", "batch", "submit", "frame", "outputs", "release")  # what bookkeeping takes of the runner's thread
WAIT = "wait"  # for a step that is not applied yet
FORWARD = "forward"  # the pass itself
LAUNCH = "launch"  # what the runner's thread has to do with it where a device runs it


@dataclass(frozen=True, slots=True)
class Span:
    """`start_ns` and `end_ns` are `time.monotonic_ns()`."""

    name: str
    step: int
    start_ns: int
    end_ns: int


@dataclass
class Timeline:
    """One way's spans. `step` is the step that the runner is at."""

    step: int = 1
    runner: list[Span] = field(default_factory=list)
    bookkeeper: list[Span] = field(default_factory=list)
    device: list[Span] = field(default_factory=list)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times a call of the runner's thread."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.runner.append(Span(name, self.step, start_ns, time.monotonic_ns()))

    def applied(self, step: int, published_ns: int, apply_ns: int) -> None:
        """The bookkeeper published `step` at `published_ns`, after `apply_ns` of work."""
        self.bookkeeper.append(Span("apply", step, published_ns - apply_ns, published_ns))

    def per_step_us(self, names: tuple[str, ...]) -> NDArray[np.float64]:
        """Microseconds that the runner's thread spent in spans of these names, float64 [turns of its loop]."""
        total = np.zeros(1 + max((span.step for span in self.runner), default=0))  # steps count from 1
        for span in self.runner:
            if span.name in names:
                total[span.step] += (span.end_ns - span.start_ns) / 1000
        return total[1:]


class DeviceClock:
    """Times forward passes: on the CPU as the runner's thread sees them, on CUDA by events, put on the host's clock."""

    def __init__(self, timeline: Timeline, device: torch.device) -> None:
        self._timeline, self._on_cuda = timeline, device.type == "cuda"
        self._passes: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        if self._on_cuda:
            self._origin = self._event()
            self._origin.synchronize()
            self._origin_ns = time.monotonic_ns()

    @staticmethod
    def _event() -> torch.cuda.Event:
        import torch

        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Around the launch of a pass."""
        if not self._on_cuda:
            with self._timeline.span(FORWARD):
                yield
            return
        with self._timeline.span(LAUNCH):
            start = self._event()
            yield
            self._passes.append((step, start, self._event()))

    def collect(self) -> None:
        """Brings the device's spans into the timeline, once the passes have ended."""
        for step, start, end in self._passes:
            end.synchronize()
            start_ns, end_ns = (self._origin_ns + int(self._origin.elapsed_time(e) * 1e6) for e in (start, end))
            self._timeline.device.append(Span(FORWARD, step, start_ns, end_ns))
        self._passes.clear()
