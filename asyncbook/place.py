"""Where a book of this process can be found by others."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from asyncbook.config import BookConfig
from asyncbook.ipc import address
from asyncbook.ipc.errors import HandshakeFailed, LayoutMismatch
from asyncbook.ipc.segment import Segment


class Place:
    """The folder of one book, from its making to `withdraw`. A book can do without: then `path` says why."""

    def __init__(self, config: BookConfig, segment: Segment, *, is_embedded: bool) -> None:
        self._owner_pid = os.getpid()
        self._folder: Path | None = None
        self._error: HandshakeFailed | None = None
        self.token = b""
        # The core is this process's affair, and a device of its own.
        fields = asdict(config) | {"tokenizer": config.tokenizer_path, "sidecar_cpu": None, "device": None}
        try:
            self._folder, published = address.publish(segment, fields, is_embedded=is_embedded)
            self.token = published.token
        except HandshakeFailed as error:
            self._error = error

    @property
    def path(self) -> str:
        """Of the folder. Raises `HandshakeFailed` where there was no room for one."""
        if self._error is not None:
            raise self._error
        return str(self._folder)

    def withdraw(self) -> None:
        """The book is closed. Idempotent; does nothing in a forked child."""
        if self._folder is not None:
            address.withdraw(self._folder, self._owner_pid)


def config_at(found: address.Address) -> BookConfig:
    """Of another process's book. Raises `LayoutMismatch` for what is no configuration of this version."""
    try:
        return BookConfig(**found.config)
    except (TypeError, ValueError) as error:
        raise LayoutMismatch(
            f"the book of process {found.pid} has a configuration of another version: {error}"
        ) from None
