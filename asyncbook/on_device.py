"""What a book has to do with a device, without torch until there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncbook.copies import FrameCopies
from asyncbook.frame import FrameViews
from asyncbook.ipc.segment import Segment

if TYPE_CHECKING:
    from asyncbook.device.link import DeviceLink


class DeviceSide:
    """A book's device: the one in its config, else that of the first tensor on a device that is submitted."""

    def __init__(self, name: str | None, segment: Segment, views: FrameViews, *, has_ring: bool) -> None:
        self.copies = FrameCopies(views)
        self._segment = segment
        self._has_ring = has_ring
        if name is not None:
            self._open(name)

    def _open(self, name: str) -> None:
        from asyncbook.device.link import open_link

        self.copies.link = open_link(name, self._segment, has_ring=self._has_ring)

    @property
    def link(self) -> DeviceLink | None:
        """The connection, None without a device."""
        return self.copies.link

    def holds(self, ids: Any) -> bool:
        """Whether the ids lie on a device."""
        if type(ids).__module__.partition(".")[0] != "torch":
            return False
        return ids.device.type == "cuda" or (self.link is not None and self.link.device.owns(ids))

    def link_to(self, *all_ids: Any) -> DeviceLink | None:
        """The connection with the device that some of the ids are on, made now if need be; None: all are the CPU's."""
        for ids in all_ids:
            if self.holds(ids):
                if self.link is None:
                    self._open(str(ids.device))
                return self.link
        return None

    def close(self) -> None:
        """Waits for copies that are pending, and lets the pages go. The sidecar has taken by now what it will."""
        if self.link is not None:
            self.link.close(self.copies.events())
