"""Copies of frames to the book's device that are on their way: no step is submitted that would write over one.

Step s is written into the slot of step s - num_frames, and the bookkeeper may do so as soon as s is submitted. So the
runner, who alone knows the device, looks at the marks of its copies before it submits: a look, never a wait, and only
while there are any.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from asyncbook.frame import FrameViews
from asyncbook.ipc.errors import InFlightFull, SidecarTimeout

if TYPE_CHECKING:
    from asyncbook.device.columns import TensorColumns
    from asyncbook.device.link import DeviceLink

LOOK_S = 0.000_1  # between two looks at a mark: a device wakes nobody


class FrameCopies:
    """`pending`: step, and the mark behind its copy, oldest call first. `link`: None for a book without a device."""

    def __init__(self, views: FrameViews) -> None:
        self._views = views
        self.link: DeviceLink | None = None
        self.pending: list[tuple[int, Any]] = []

    def copy(self, step: int, stream: Any) -> TensorColumns:
        """The frame of a step that holds, on the device."""
        if self.link is None:
            return self._views.tensors(step % self._views.num_frames).clone()
        columns, event = self.link.copy_frame(step, stream)
        if event is not None:
            self.pending.append((step, event))
        return columns

    def _in_the_way(self, step: int) -> int | None:
        """A step whose frame is still being copied, and would be written over by `step`. Forgets what is done."""
        assert self.link is not None
        is_done = self.link.device.is_done
        self.pending = [(copied, event) for copied, event in self.pending if not is_done(event)]
        return next((copied for copied, _ in self.pending if copied <= step - self._views.num_frames), None)

    def check_room(self, step: int) -> None:
        """Raises `InFlightFull` where `step` must not be submitted yet."""
        copied = self._in_the_way(step)
        if copied is not None:
            raise InFlightFull(
                f"step {step} does not fit: it would be written over the frame of step {copied}, "
                f"which is still being copied to the device"
            )

    def wait_room(self, step: int, deadline: float | None) -> None:
        """Until `step` may be submitted. Raises `SidecarTimeout`; `deadline` by `time.monotonic`, None: no limit."""
        while (copied := self._in_the_way(step)) is not None:
            if deadline is not None and time.monotonic() >= deadline:
                raise SidecarTimeout(f"the frame of step {copied} is still being copied to the device")
            time.sleep(LOOK_S)

    async def room(self, step: int) -> None:
        """`wait_room` for an event loop."""
        import asyncio

        while self._in_the_way(step) is not None:
            await asyncio.sleep(LOOK_S)

    def events(self) -> list[Any]:
        """The marks of all that is pending."""
        return [event for _, event in self.pending]
