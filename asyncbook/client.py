"""Where a book comes from."""

from __future__ import annotations

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
    from asyncbook.sidecar import SidecarBook

    return SidecarBook(config)


def attach(address: str) -> Book:
    """A read-only book of another process of this user."""
    raise NotImplementedError("attach is not part of this version of asyncbook yet")


def subscribe(address: str) -> Any:
    """The outputs of another process's book."""
    raise NotImplementedError("subscribe is not part of this version of asyncbook yet")
