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
from types import TracebackType
from typing import Self

import numpy as np

from asyncbook.ipc.errors import BookFull, LayoutMismatch
from asyncbook.ipc.layout import LAYOUT_VERSION, MAGIC, PAGE_BYTES, Layout, Owner


def _create_descriptor() -> int:
    if hasattr(os, "memfd_create"):
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
    """Returns the whole pages in a part of a segment to the system; they read as zeros. `memory` from `writable`."""
    start = -(-offset // PAGE_BYTES) * PAGE_BYTES
    end = (offset + length) // PAGE_BYTES * PAGE_BYTES
    if start < end and isinstance(memory.obj, mmap.mmap) and hasattr(mmap, "MADV_REMOVE"):
        with contextlib.suppress(OSError):  # memory of another kind: it is zeroed, and stays
            memory.obj.madvise(mmap.MADV_REMOVE, start, end - start)


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
        descriptor = _create_descriptor()
        try:
            os.ftruncate(descriptor, layout.total_bytes)
            # The table is sparse and costs what is in use; all else is reserved now, so that lack of memory is an error
            # here and not a SIGBUS later.
            os.posix_fallocate(descriptor, 0, layout.table_offset)
        except OSError as error:
            os.close(descriptor)
            raise BookFull(
                f"cannot reserve {layout.table_offset} bytes of shared memory for a book of {layout.max_num_reqs} "
                f"rows (the table may grow to {layout.total_bytes} bytes): {error.strerror}; "
                f"lower max_num_reqs or max_in_flight, or raise the memory limit"
            ) from error
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

    def _map(self, offset: int, length: int, *, writable: bool) -> memoryview:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return memoryview(mmap.mmap(self.descriptor, length, mmap.MAP_SHARED, protection, offset=offset))

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
