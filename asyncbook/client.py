"""Where a book comes from."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from asyncbook.book import Book
from asyncbook.config import BookConfig

if TYPE_CHECKING:
    from asyncbook.embedded import EmbeddedBook
    from asyncbook.sidecar import SidecarBook


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
    from asyncbook.process import SidecarProcess

    config.check_supported()
    with ExitStack() as undo:
        segment = Segment.create(config.layout)
        undo.callback(segment.close)
        channel = RunnerChannel()
        undo.callback(channel.close)
        process = SidecarProcess(config, segment.descriptor, channel)
        undo.callback(process.kill)
        # Imports numba, which takes as long as the sidecar needs to start: both at the same time.
        from asyncbook.sidecar import SidecarBook

        book = SidecarBook(config, segment, channel, process)
        undo.pop_all()
    return book


def attach(address: str) -> Book:
    """A read-only book of another process of this user."""
    raise NotImplementedError("attach is not part of this version of asyncbook yet")


def subscribe(address: str) -> Any:
    """The outputs of another process's book."""
    raise NotImplementedError("subscribe is not part of this version of asyncbook yet")
