"""Where a book comes from."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from asyncbook.config import BookConfig

if TYPE_CHECKING:
    from asyncbook.attached import AttachedBook
    from asyncbook.embedded import EmbeddedBook
    from asyncbook.sidecar import SidecarBook
    from asyncbook.subscription import Subscription


def open(config: BookConfig) -> EmbeddedBook:
    """A book in this process: calls are applied before they return."""
    from asyncbook.embedded import EmbeddedBook

    return EmbeddedBook(config)


def spawn(config: BookConfig) -> SidecarBook:
    """A book in a sidecar process, started and ready when this returns (about half a second).

    Raises `HandshakeFailed` or `LayoutMismatch` where the sidecar cannot start; nothing is left behind then.
    """
    from asyncbook.ipc.channel import RunnerChannel
    from asyncbook.ipc.segment import Segment
    from asyncbook.place import Place
    from asyncbook.process import SidecarProcess

    config.check_supported()
    with ExitStack() as undo:
        segment = Segment.create(config.layout)
        undo.callback(segment.close)
        place = Place(config, segment, is_embedded=False)
        undo.callback(place.withdraw)
        channel = RunnerChannel()
        undo.callback(channel.close)
        process = SidecarProcess(config, segment.descriptor, channel, place)
        undo.callback(process.kill)
        # Imports numba, which takes as long as the sidecar needs to start: both at the same time.
        from asyncbook.sidecar import SidecarBook

        book = SidecarBook(config, segment, place, channel, process)
        undo.pop_all()
    return book


def attach(address: str | os.PathLike[str]) -> AttachedBook:
    """Another process's book, to read: frames, tokens, statistics. `address`: that book's `Book.address`.

    Raises `BookClosed` where there is none (any more), `HandshakeFailed` where it is another user's or out of reach,
    `LayoutMismatch` where it is of another version.
    """
    from asyncbook.attached import AttachedBook

    return AttachedBook(address)


def subscribe(address: str | os.PathLike[str], *, prefix: str = "", timeout_s: float = 10.0) -> Subscription:
    """The outputs of another process's book from now on, of the requests whose ids begin with `prefix`.

    The book must have a sidecar. Raises `BookClosed`, `HandshakeFailed`, `LayoutMismatch` as `attach` does, and
    `SidecarTimeout` where the sidecar does not answer within `timeout_s`.
    """
    from asyncbook.subscription import Subscription

    return Subscription(address, prefix=prefix, timeout_s=timeout_s)
