"""Where other processes of the user find a book: a folder of its own, made by `runtime_dir.py`, with two entries.

    book           JSON: `Address`, whole from the moment it can be seen
    subscribers    the sidecar's socket for subscribers, see `ipc/channel.py`

The memory has no name. Who finds the folder opens it through its owner's descriptor, which the system allows to
processes of the same user, and only for reading. What it then has is known by a number that was drawn for this book: a
descriptor's number is used again.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import Any

import msgspec

from asyncbook.ipc import wire
from asyncbook.ipc.errors import BookClosed, HandshakeFailed, LayoutMismatch
from asyncbook.ipc.runtime_dir import SUBSCRIBERS_SOCKET, check_private, create_directory, folders, is_name, start_time
from asyncbook.ipc.segment import Segment, book_no_of

FILE_NAME = "book"
MAX_FILE_BYTES = 1 << 16


class Address(msgspec.Struct, kw_only=True):
    """What the file says. `token`: what a subscriber shows; `config`: the fields of the book's `BookConfig`."""

    pid: int
    start_time: int
    descriptor: int
    book_no: int
    token: bytes
    schema_hash: str
    is_embedded: bool
    config: dict[str, Any]

    @property
    def owner_lives(self) -> bool:
        """Whether the runner's process is there."""
        return start_time(self.pid) == self.start_time


def publish(segment: Segment, config: dict[str, Any], *, is_embedded: bool) -> tuple[Path, Address]:
    """Makes the folder of a book of this process. Raises `HandshakeFailed` where there is no place for one."""
    pid = os.getpid()
    started = start_time(pid)
    assert started is not None, "this process runs"
    address = Address(
        pid=pid,
        start_time=started,
        descriptor=segment.descriptor,
        book_no=segment.book_no,
        token=secrets.token_bytes(16),
        schema_hash=wire.schema_hash(),
        is_embedded=is_embedded,
        config=config,
    )
    folder = create_directory((SUBSCRIBERS_SOCKET,))
    unseen = folder / f".{FILE_NAME}"
    try:
        unseen.write_bytes(msgspec.json.encode(address))
        unseen.replace(folder / FILE_NAME)
    except OSError as error:  # a full disk
        shutil.rmtree(folder, ignore_errors=True)
        raise HandshakeFailed(f"cannot say in {folder} where the book is: {error.strerror}") from error
    return folder, address


def withdraw(folder: Path, owner_pid: int) -> None:
    """Removes the folder, unless this is a forked child of its owner. Idempotent."""
    if os.getpid() == owner_pid:
        shutil.rmtree(folder, ignore_errors=True)


def read(folder: str | os.PathLike[str]) -> Address:
    """Raises `BookClosed` where there is no book any more, `HandshakeFailed` for what is none, or another user's."""
    path = Path(folder) / FILE_NAME
    gone = BookClosed(f"there is no book at {folder}: it was closed, or never was")
    if not Path(folder).exists():
        raise gone
    try:
        check_private(Path(folder))
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
        address = msgspec.json.decode(data, type=Address)
    except (OSError, msgspec.DecodeError, HandshakeFailed) as error:
        # Whoever removes a book's folder removes the file first.
        if not Path(folder).exists() or (isinstance(error, FileNotFoundError) and is_name(Path(folder).name)):
            raise gone from None
        if isinstance(error, HandshakeFailed):
            raise
        raise HandshakeFailed(f"{path} says of no book where it is: {error}") from None
    if not address.owner_lives:
        raise BookClosed(f"the book at {folder} is gone: its runner, process {address.pid}, has ended")
    return address


def open_segment(address: Address) -> Segment:
    """The memory of another process's book, for reading. Raises `BookClosed`, `HandshakeFailed`, `LayoutMismatch`."""
    if address.schema_hash != wire.schema_hash():
        raise LayoutMismatch(f"the book has schema {address.schema_hash}, expected {wire.schema_hash()}")
    path = f"/proc/{address.pid}/fd/{address.descriptor}"
    try:
        # Were the descriptor another file's by now, opening that must neither wait for anybody nor become a terminal.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        raise BookClosed(f"the book of process {address.pid} is closed") from None
    except OSError as error:
        raise HandshakeFailed(
            f"the memory of process {address.pid} cannot be opened: {error.strerror}; expected a process of the same "
            f"user, in the same container, that may be inspected (see prctl PR_SET_DUMPABLE)"
        ) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or book_no_of(descriptor) != address.book_no:
            raise BookClosed(f"the book of process {address.pid} is closed")
        return Segment.inherit(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def folders_of_books() -> list[Path]:
    """The folders of all books of this user that this process can see."""
    return [folder for folder in folders() if (folder / FILE_NAME).exists()]
