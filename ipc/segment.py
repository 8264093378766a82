"""The shared segment: one owner creates it, one bookkeeper writes it, everybody else maps it read-only.

It is a sealed memfd: it has no name that could be guessed, left behind or collide, it does not count against the size
of /dev/shm, and it cannot shrink under a reader. Where there is no memfd it is a POSIX shared memory object that is
unlinked the moment it exists. Either way the descriptor is the only way in, and the last close frees the memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from asyncbook.ipc.errors import BookFull, LayoutMismatch
from asyncbook.ipc.layout import LAYOUT_VERSION, MAGIC, PAGE_BYTES, Layout, Owner
from asyncbook.ipc.limits import PROCESS_LIMITS, Limit, memory_limits, space_limit

_SMALLER = "lower max_num_reqs, max_model_len or max_in_flight"
_SHM = Path("/dev/shm")


def _has_memfd() -> bool:
    return hasattr(os, "memfd_create")


def _need(layout: Layout) -> str:
    return (
        f"cannot reserve {layout.table_offset} bytes of shared memory for a book of {layout.max_num_reqs} rows "
        f"(the table may grow to {layout.total_bytes} bytes)"
    )


def _check_room(layout: Layout) -> None:
    """Raises `BookFull` where the book cannot be had: what is reserved at once by what is left now, the whole of it by
    limits on addresses and files, which nothing that is given back helps to keep."""
    for limit in memory_limits():
        need = layout.total_bytes if limit.name in PROCESS_LIMITS else layout.table_offset
        _check_limit(layout, limit, need)
    if not _has_memfd():
        _check_limit(layout, space_limit(_SHM), layout.total_bytes)


def _check_limit(layout: Layout, limit: Limit, need: int) -> None:
    if need > limit.available:
        raise BookFull(
            f"{_need(layout)}: {need} bytes are needed, {limit.available} available ({limit.name}); "
            f"{limit.remedy}, or {_SMALLER}"
        )


def _create_descriptor() -> int:
    if _has_memfd():
        return os.memfd_create("asyncbook", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    import _posixshmem  # what multiprocessing.shared_memory stands on; it offers no unlink-at-once itself

    name = f"/asyncbook-{secrets.token_hex(8)}"
    descriptor: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    _posixshmem.shm_unlink(name)
    os.set_inheritable(descriptor, False)
    return descriptor


def _seal(descriptor: int) -> None:
    if hasattr(fcntl, "F_ADD_SEALS"):
        # Not a memfd: POSIX shared memory has no seals, and no name any more by which a stranger could resize it.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def give_back(memory: memoryview, offset: int, length: int) -> None:
    """Returns the whole pages in a part of a segment to the system; they read as zeros. `memory` from `writable`.

    What a file system has room for now it may not have later: memory with a name is kept."""
    if not _has_memfd():
        return
    start = -(-offset // PAGE_BYTES) * PAGE_BYTES
    end = (offset + length) // PAGE_BYTES * PAGE_BYTES
    if start < end and isinstance(memory.obj, mmap.mmap) and hasattr(mmap, "MADV_REMOVE"):
        with contextlib.suppress(OSError):  # memory of another kind: it is zeroed, and stays
            memory.obj.madvise(mmap.MADV_REMOVE, start, end - start)


def book_no_of(descriptor: int) -> int | None:
    """The number of the book whose memory a descriptor is of, None where it is of no book."""
    data = os.pread(descriptor, 8 * len(Owner), 0)
    if len(data) < 8 * len(Owner):
        return None
    words = np.frombuffer(data, np.int64)
    return int(words[Owner.BOOK_NO]) if words[Owner.MAGIC] == MAGIC else None


class Segment:
    """The descriptor, its size, and numpy views of the declared regions.

    `readable` maps the whole segment read-only; `writable` maps what this process may write: everything for a
    bookkeeper, the RUNNER part for a runner that only reads the rest. Views keep their mapping alive; `close` lets go
    of the descriptor and of the mappings' owner, and a mapping ends with its last view.
    """

    def __init__(self, descriptor: int, layout: Layout) -> None:
        self.descriptor = descriptor
        self.layout = layout

    @classmethod
    def create(cls, layout: Layout) -> Self:
        """A new segment, zeroed, its OWNER page filled in. Raises `BookFull` where memory for the small parts lacks."""
        _check_room(layout)
        descriptor = _create_descriptor()
        try:
            os.ftruncate(descriptor, layout.total_bytes)
            # The table is sparse and costs what is in use; all else is reserved now, so that lack of memory is an error
            # here and not a SIGBUS later. In a file system that may be small the table is reserved as well.
            os.posix_fallocate(descriptor, 0, layout.table_offset if _has_memfd() else layout.total_bytes)
        except OSError as error:
            os.close(descriptor)
            raise BookFull(f"{_need(layout)}: {error.strerror}; {_SMALLER}, or raise the memory limit") from error
        _seal(descriptor)
        segment = cls(descriptor, layout)
        owner = layout.owner.view(segment._map(0, PAGE_BYTES, writable=True))
        owner[Owner.MAX_NUM_REQS] = layout.max_num_reqs
        owner[Owner.MAX_MODEL_LEN] = layout.max_model_len
        owner[Owner.NUM_SPEC_TOKENS] = layout.num_spec_tokens
        owner[Owner.MAX_IN_FLIGHT] = layout.max_in_flight
        owner[Owner.MAX_LOGPROBS] = layout.max_logprobs
        owner[Owner.TOTAL_BYTES] = layout.total_bytes
        owner[Owner.OWNER_PID] = os.getpid()
        owner[Owner.BOOK_NO] = secrets.randbits(63)
        owner[Owner.LAYOUT_VERSION] = LAYOUT_VERSION
        owner[Owner.MAGIC] = MAGIC
        return segment

    @classmethod
    def inherit(cls, descriptor: int) -> Self:
        """The segment behind an inherited descriptor. Raises `LayoutMismatch` where it is not laid out as here."""
        size = os.fstat(descriptor).st_size
        if size < PAGE_BYTES:
            raise LayoutMismatch(f"the segment has {size} bytes, expected at least {PAGE_BYTES}")
        page = mmap.mmap(descriptor, PAGE_BYTES, access=mmap.ACCESS_READ)
        owner = [int(value) for value in np.frombuffer(page, np.int64, len(Owner))]
        if owner[Owner.MAGIC] != MAGIC:
            raise LayoutMismatch(f"the segment starts with {owner[Owner.MAGIC]:#x}, expected {MAGIC:#x}")
        if owner[Owner.LAYOUT_VERSION] != LAYOUT_VERSION:
            raise LayoutMismatch(f"the segment has layout {owner[Owner.LAYOUT_VERSION]}, expected {LAYOUT_VERSION}")
        sizes = owner[Owner.MAX_NUM_REQS : Owner.MAX_LOGPROBS + 1]
        try:
            layout = Layout(*sizes)
        except AssertionError:
            raise LayoutMismatch(f"the segment says that its sizes are {sizes}, which no book has") from None
        if not layout.total_bytes == owner[Owner.TOTAL_BYTES] == size:
            raise LayoutMismatch(
                f"the segment has {size} bytes and says {owner[Owner.TOTAL_BYTES]}, expected {layout.total_bytes}"
            )
        return cls(descriptor, layout)

    @property
    def book_no(self) -> int:
        """A number that only this book has."""
        book_no = book_no_of(self.descriptor)
        assert book_no is not None, "it was checked or written when the segment was opened"
        return book_no

    def _map(self, offset: int, length: int, *, writable: bool) -> memoryview:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            mapped = mmap.mmap(self.descriptor, length, mmap.MAP_SHARED, protection, offset=offset)
        except PermissionError:  # a descriptor for reading
            raise
        except OSError as error:  # limits on addresses
            raise BookFull(f"cannot map {length} bytes of a book: {error.strerror}; raise RLIMIT_AS") from error
        return memoryview(mapped)

    def readable(self) -> memoryview:
        """The whole segment, read-only: a write through it, or through any view of it, is refused."""
        return self._map(0, self.layout.total_bytes, writable=False)

    def writable(self) -> memoryview:
        """The whole segment, for its bookkeeper."""
        return self._map(0, self.layout.total_bytes, writable=True)

    def runner_part(self) -> memoryview:
        """The RUNNER part, writable: all that a runner with a sidecar may write. Starts at `layout.runner_offset`."""
        start, end = self.layout.runner_offset, self.layout.runner_end
        return self._map(start, end - start, writable=True)

    def device_part(self) -> memoryview:
        """The RUNNER part and the frames, writable and shared, for the runner's device and nobody else: starts at
        `layout.runner_offset`, ends at `layout.table_offset`.

        Pages that a process has mapped read-only can be pinned on some platforms only (`cudaHostRegisterReadOnly` is
        an error where the device does not support it), and a private writable mapping would be pinned as a copy that
        never sees what the bookkeeper writes. So the pages are mapped once more, and this mapping is never handed out.
        """
        start, end = self.layout.runner_offset, self.layout.table_offset
        return self._map(start, end - start, writable=True)

    def close(self) -> None:
        """Lets go of the descriptor. Idempotent. Views taken before stay valid until they are dropped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
