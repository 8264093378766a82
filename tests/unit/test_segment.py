"""The shared segment: sealed, sparse, read-only where it is not one's own, and gone with its last descriptor."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import asyncbook
from asyncbook import BookConfig, BookFull, LayoutMismatch
from asyncbook.ipc.layout import LAYOUT_VERSION, MAGIC, NO_LOGPROBS, PAGE_BYTES, Layout, Owner
from asyncbook.ipc.limits import Limit
from asyncbook.ipc.segment import Segment, give_back
from tests.conftest import step

LAYOUT = Layout(max_num_reqs=8, max_model_len=100_000, num_spec_tokens=2, max_in_flight=2)


@pytest.fixture(params=["memfd", "posix"])
def segment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Segment]:
    """A segment of both kinds of memory."""
    if request.param == "posix":
        monkeypatch.delattr(os, "memfd_create")
    with Segment.create(LAYOUT) as made:
        yield made


def used_bytes(segment: Segment) -> int:
    """Memory that the segment costs by now."""
    return os.fstat(segment.descriptor).st_blocks * 512


def test_a_new_segment_is_zero_but_for_its_owner_page(segment: Segment) -> None:
    memory = segment.readable()
    assert len(memory) == LAYOUT.total_bytes == os.fstat(segment.descriptor).st_size
    owner = LAYOUT.owner.view(memory)[: len(Owner)].tolist()
    sizes = [8, 100_000, 2, 2, NO_LOGPROBS]
    assert owner == [MAGIC, LAYOUT_VERSION, *sizes, LAYOUT.total_bytes, os.getpid(), segment.book_no]
    assert not np.frombuffer(memory, np.uint8, offset=8 * len(Owner), count=LAYOUT.table_offset - 8 * len(Owner)).any()


def test_only_the_table_is_sparse() -> None:
    with Segment.create(LAYOUT) as segment:
        assert LAYOUT.table_offset <= used_bytes(segment) < LAYOUT.table_offset + 16 * PAGE_BYTES
        before = used_bytes(segment)
        LAYOUT.token_ids.view(segment.writable())[3, :PAGE_BYTES] = 1
        assert 0 < used_bytes(segment) - before < 8 * PAGE_BYTES


def test_posix_memory_is_reserved_whole_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file system may be full when the table grows, which would be a SIGBUS."""
    monkeypatch.delattr(os, "memfd_create")
    with Segment.create(LAYOUT) as segment:
        assert used_bytes(segment) >= LAYOUT.total_bytes
        give_back(segment.writable(), LAYOUT.token_ids.offset, LAYOUT.token_ids.end - LAYOUT.token_ids.offset)
        assert used_bytes(segment) >= LAYOUT.total_bytes


def test_a_memfd_is_sealed_against_every_change_of_size() -> None:
    with Segment.create(LAYOUT) as segment:
        seals = fcntl.fcntl(segment.descriptor, fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        for size in (0, PAGE_BYTES, LAYOUT.total_bytes + PAGE_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(segment.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert os.fstat(segment.descriptor).st_size == LAYOUT.total_bytes


def test_a_segment_has_no_name_and_is_not_inherited(segment: Segment) -> None:
    assert [name for name in os.listdir("/dev/shm") if "asyncbook" in name] == []
    assert os.readlink(f"/proc/self/fd/{segment.descriptor}").endswith("(deleted)")
    assert not os.get_inheritable(segment.descriptor)
    assert os.fstat(segment.descriptor).st_uid == os.getuid()


def test_posix_memory_is_for_its_user_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with Segment.create(LAYOUT) as segment:
        assert stat.S_IMODE(os.fstat(segment.descriptor).st_mode) == 0o600
        assert "/dev/shm/asyncbook-" in os.readlink(f"/proc/self/fd/{segment.descriptor}")


def test_names_of_posix_memory_cannot_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with Segment.create(LAYOUT) as one, Segment.create(LAYOUT) as other:
        names = {os.readlink(f"/proc/self/fd/{made.descriptor}") for made in (one, other)}
    assert len(names) == 2


# Rights


def test_readable_memory_refuses_writes(segment: Segment) -> None:
    memory = segment.readable()
    view = LAYOUT.token_ids.view(memory)
    assert memory.readonly
    with pytest.raises(TypeError):
        memory[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    with pytest.raises(TypeError):
        memory.obj.write(b"x")  # type: ignore[attr-defined]


def test_a_runner_may_write_its_own_part_and_nothing_else(segment: Segment) -> None:
    part = segment.runner_part()
    assert len(part) == LAYOUT.runner_end - LAYOUT.runner_offset
    np.frombuffer(part, np.uint8)[:] = 255
    memory = np.frombuffer(segment.readable(), np.uint8)[: LAYOUT.table_offset]
    assert memory[LAYOUT.runner_offset : LAYOUT.runner_end].all()
    assert not memory[LAYOUT.bookkeeper_offset : LAYOUT.runner_offset].any()
    assert not memory[LAYOUT.runner_end :].any()


def test_what_is_written_is_seen_by_every_mapping(segment: Segment) -> None:
    before, writable = segment.readable(), segment.writable()
    with Segment.inherit(os.dup(segment.descriptor)) as inherited:
        tables = [LAYOUT.token_ids.view(memory) for memory in (before, segment.readable(), inherited.readable())]
        LAYOUT.token_ids.view(writable)[7, 99_999] = 42
        assert [int(table[7, 99_999]) for table in tables] == [42] * 3
        assert inherited.layout == LAYOUT


def test_views_outlive_the_descriptor(segment: Segment) -> None:
    view = LAYOUT.token_ids.view(segment.readable())
    LAYOUT.token_ids.view(segment.writable())[0, 0] = 5
    segment.close()
    segment.close()
    assert segment.descriptor == -1
    assert view[0, 0] == 5


# Segments that are none of ours


@pytest.mark.parametrize(
    ("word", "value", "fragments"),
    [
        (Owner.MAGIC, 0, ["0x0", f"{MAGIC:#x}"]),
        (Owner.MAGIC, MAGIC + 1, [f"{MAGIC + 1:#x}"]),
        (Owner.LAYOUT_VERSION, LAYOUT_VERSION + 1, [f"layout {LAYOUT_VERSION + 1}", f"expected {LAYOUT_VERSION}"]),
        (Owner.TOTAL_BYTES, LAYOUT.total_bytes + PAGE_BYTES, [str(LAYOUT.total_bytes)]),
        (Owner.MAX_NUM_REQS, 9, [str(LAYOUT.total_bytes)]),
        (Owner.MAX_MODEL_LEN, 1, [str(LAYOUT.total_bytes)]),
        (Owner.MAX_IN_FLIGHT, 9, [str(LAYOUT.total_bytes)]),
        (Owner.MAX_LOGPROBS, 0, [str(LAYOUT.total_bytes)]),
    ],
)
def test_another_layout_is_told(segment: Segment, word: Owner, value: int, fragments: list[str]) -> None:
    LAYOUT.owner.view(segment.writable())[word] = value
    with pytest.raises(LayoutMismatch) as caught:
        Segment.inherit(segment.descriptor)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("word", "value"),
    [(Owner.MAX_NUM_REQS, 0), (Owner.MAX_MODEL_LEN, -1), (Owner.MAX_IN_FLIGHT, 2**40), (Owner.MAX_LOGPROBS, -2)],
)
def test_impossible_sizes_are_told_as_a_mismatch(segment: Segment, word: Owner, value: int) -> None:
    LAYOUT.owner.view(segment.writable())[word] = value
    with pytest.raises(LayoutMismatch):
        Segment.inherit(segment.descriptor)


@pytest.mark.parametrize("size", [0, 1, PAGE_BYTES - 1])
def test_a_file_that_is_too_small(size: int) -> None:
    descriptor = os.memfd_create("other")
    try:
        os.ftruncate(descriptor, size)
        with pytest.raises(LayoutMismatch, match=f"{size} bytes"):
            Segment.inherit(descriptor)
    finally:
        os.close(descriptor)


def test_a_cut_segment_is_told() -> None:
    """Its first page says how much there was to be."""
    with Segment.create(LAYOUT) as segment:
        first_page = bytes(segment.readable()[:PAGE_BYTES])
    descriptor = os.memfd_create("cut")
    try:
        os.write(descriptor, first_page)
        with pytest.raises(LayoutMismatch, match=f"{PAGE_BYTES} bytes"):
            Segment.inherit(descriptor)
    finally:
        os.close(descriptor)


# No memory


@pytest.mark.parametrize("call", ["ftruncate", "posix_fallocate"])
def test_lack_of_memory_is_an_error_at_creation_that_names_the_need(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*arguments: Any) -> None:
        descriptors.append(arguments[0])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    descriptors: list[int] = []
    monkeypatch.setattr(os, call, full)
    with pytest.raises(BookFull) as caught:
        Segment.create(LAYOUT)
    for fragment in (str(LAYOUT.table_offset), str(LAYOUT.total_bytes), "8 rows", "No space left", "max_num_reqs"):
        assert fragment in str(caught.value)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])
    with pytest.raises(BookFull):
        asyncbook.open(BookConfig(max_num_reqs=8, max_model_len=16, vocab_size=100))


@pytest.mark.parametrize(
    ("kind", "name"), [("memfd", "memory.max of /a"), ("memfd", "RLIMIT_AS"), ("posix", "file system")]
)
def test_what_does_not_fit_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    """A control group has no error for the page that is one too many: it has the end of a process."""
    tight = Limit(name, LAYOUT.table_offset - 1, "the remedy")
    if kind == "posix":
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.setattr("asyncbook.ipc.segment.space_limit", lambda path: tight)
    else:
        monkeypatch.setattr("asyncbook.ipc.segment.memory_limits", lambda: [tight])
    monkeypatch.setattr("asyncbook.ipc.segment._create_descriptor", lambda: pytest.fail("it was made"))
    with pytest.raises(BookFull) as caught:
        Segment.create(LAYOUT)
    for fragment in (str(LAYOUT.table_offset), f"{tight.available} available", name, "the remedy", "max_model_len"):
        assert fragment in str(caught.value)


def test_a_sparse_table_larger_than_what_is_left_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = Limit("memory.max of /a", LAYOUT.table_offset, "")
    monkeypatch.setattr("asyncbook.ipc.segment.memory_limits", lambda: [limit])
    Segment.create(LAYOUT).close()


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_a_process_with_a_limit_is_told(limit: str) -> None:
    """In a process of its own: a limit cannot be taken back."""
    program = f"""
import resource, asyncbook
config = asyncbook.BookConfig(max_num_reqs=1000, max_model_len=1_000_000, vocab_size=100)
asyncbook.open(asyncbook.BookConfig(max_num_reqs=1, max_model_len=10, vocab_size=100)).close()
resource.setrlimit(resource.{limit}, (4 << 30, 4 << 30))
try:
    asyncbook.open(config)
except asyncbook.BookFull as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    for fragment in (limit, "are needed", "available", "ulimit", "max_num_reqs"):
        assert fragment in ran.stdout


def test_a_book_stands_on_posix_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    config = BookConfig(max_num_reqs=8, max_model_len=16, vocab_size=100)
    for make in (asyncbook.open, asyncbook.spawn):
        with make(config) as book:
            row = book.admit("a", [1])
            step(book, [row], [5])
            assert book.token_ids(row).tolist() == [1, 5]


# What the table costs


def test_a_big_table_costs_what_is_in_use_and_a_released_row_gives_it_back() -> None:
    config = BookConfig(max_num_reqs=64, max_model_len=1 << 20, vocab_size=100)  # 320 MiB, were it all in use
    with asyncbook.open(config) as book:
        descriptor = book._segment.descriptor
        small = os.fstat(descriptor).st_blocks * 512
        assert small < 4 << 20
        row = book.admit("a", np.ones(1 << 19, np.int32))
        step(book, [row], [5])
        used = os.fstat(descriptor).st_blocks * 512 - small
        assert (1 << 19) * 5 <= used < (1 << 19) * 5 + 64 * PAGE_BYTES
        book.release(row)
        step(book, [], [])
        assert os.fstat(descriptor).st_blocks * 512 - small < 64 * PAGE_BYTES
