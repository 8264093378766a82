"""A book that another process reads: what it sees, and what it cannot do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import asyncbook
from asyncbook import (
    Book,
    BookClosed,
    BookConfig,
    FrameExpired,
    HandshakeFailed,
    LayoutMismatch,
    NotApplied,
    RequestParams,
    Row,
    RunnerDied,
    SidecarTimeout,
    StaleRow,
)
from asyncbook.attached import AttachedBook
from asyncbook.ipc.layout import COLUMN_DTYPES
from asyncbook.sidecar import SidecarBook
from tests.conftest import TIMEOUT_S, MakeBook, step
from tests.process.kills import PROLOGUE, ROOT


@pytest.fixture
def attached(book: Book) -> Iterator[AttachedBook]:
    """The same book, as another process would see it."""
    with asyncbook.attach(book.address) as attached:
        yield attached


def test_it_says_what_the_book_says(book: Book, attached: AttachedBook) -> None:
    first = book.admit("a", [1, 2], RequestParams(max_tokens=3))
    second = book.admit("b", [3])
    for number in range(4):
        last = step(book, [first, second], [10 + number, 20 + number])
        frame, seen = book.frame(), attached.frame()
        assert seen.step == frame.step == attached.applied_step == attached.submitted_step == last
        for name in COLUMN_DTYPES:
            assert (getattr(seen, name) == getattr(frame, name)).all(), name
    assert attached.rows() == [first, second]
    assert attached.token_ids(first).tolist() == book.token_ids(first).tolist() == [1, 2, 10, 11, 12]
    assert attached.output_token_ids(second).tolist() == [20, 21, 22, 23]
    theirs, ours = attached.stats(), book.stats()
    assert theirs.committed_tokens == ours.committed_tokens
    assert (theirs.num_rows_held, theirs.num_rows_free) == (ours.num_rows_held, ours.num_rows_free) == (2, 2)
    assert theirs.finished_requests == ours.finished_requests
    assert theirs.submit_us.count == ours.submit_us.count > 0
    assert attached.spec_decode_stats() == book.spec_decode_stats()
    assert attached.spec_decode_stats(first) == book.spec_decode_stats(first)
    assert (attached.sidecar_pid, attached.runner_pid) == (book.sidecar_pid, os.getpid())
    assert attached.address == book.address


def test_it_cannot_change_anything(book: Book, attached: AttachedBook) -> None:
    row = book.admit("a", [1])
    step(book, [row], [5])
    frame = attached.frame()
    for name in COLUMN_DTYPES:
        with pytest.raises(ValueError, match="read-only"):
            getattr(frame, name)[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        attached.token_ids(row)[0] = 1
    with pytest.raises(PermissionError):
        attached._segment.writable()
    assert not hasattr(attached, "submit")


def test_frames_expire_one_step_earlier_than_for_the_runner(make_book: MakeBook) -> None:
    book = make_book(max_in_flight=2, fresh=True)
    with asyncbook.attach(book.address) as attached:
        for _ in range(5):
            last = step(book, [], [])
        # Four slots: the next step's may be being written by now.
        for good in range(last - 2, last + 1):
            attached.frame(good).check()
        with pytest.raises(FrameExpired, match=rf"step {last - 3} is gone: step {last} was applied"):
            attached.frame(last - 3)
        with pytest.raises(NotApplied, match=f"step {last + 1}"):
            attached.frame(last + 1)
        frame = attached.frame()
        for _ in range(3):
            step(book, [], [])
        with pytest.raises(FrameExpired):
            frame.check()


def test_a_row_that_was_released_or_renamed_is_stale_even_before_the_next_frame(
    book: Book, attached: AttachedBook
) -> None:
    first, second = book.admit("a", [1, 2]), book.admit("b", [3])
    with pytest.raises(NotApplied, match=f"row {first.index} has no generation {first.generation} yet"):
        attached.token_ids(first)
    last = step(book, [first, second], [5, 6])
    renamed = book.rewind(second, 1)
    book.release(first)
    step(book, [], []) if book.sidecar_pid is None else None  # applied at once; a sidecar's may still be on its way
    book.wait_applied(book.submit(book.batch([]), np.zeros(0, np.int32)))
    assert attached.applied_step > last
    for stale in (first, second):
        with pytest.raises(StaleRow, match=f"row {stale.index}"):
            attached.token_ids(stale)
    assert attached.token_ids(renamed).tolist() == [3, 6]
    for nonsense in (Row(99, 1), Row(-1, 1)):
        with pytest.raises(StaleRow, match="names no row"):
            attached.token_ids(nonsense)


def test_tokens_that_go_while_they_are_copied_are_not_given_out(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    row = book.admit("a", [1, 2])
    last = step(book, [row], [5])
    with asyncbook.attach(book.address) as attached:
        assert attached.token_ids(row).tolist() == [1, 2, 5]
        book.release(row)
        sent_seq = book._seq if isinstance(book, SidecarBook) else 0
        with asyncbook.attach(book.address) as other:
            while other._applied_seq.load_acquire() < sent_seq:
                os.sched_yield()
        assert attached.applied_step == last  # no frame tells of it yet
        with pytest.raises(StaleRow, match="released"):
            attached.token_ids(row)


def test_waiting_for_steps(book: Book, attached: AttachedBook) -> None:
    last = step(book, [], [])
    attached.wait_applied(last)
    with pytest.raises(SidecarTimeout, match=f"step {last + 1} is not applied in time"):
        attached.wait_applied(last + 1, timeout_s=0.01)

    thread = threading.Thread(target=attached.wait_applied, args=(last + 1, TIMEOUT_S))
    thread.start()
    step(book, [], [])
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    asyncio.run(asyncio.wait_for(attached.applied(last + 1), TIMEOUT_S))


def test_a_closed_book_can_be_read_by_who_has_it_and_not_be_found(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    row = book.admit("a", [1])
    last = step(book, [row], [5])
    address = book.address
    attached = asyncbook.attach(address)
    book.close()
    assert not os.path.exists(address)
    assert attached.token_ids(row).tolist() == [1, 5]
    with pytest.raises(BookClosed, match="closed the book"):
        attached.wait_applied(last + 1)
    with pytest.raises(BookClosed, match="there is no book at"):
        asyncbook.attach(address)
    attached.close()
    attached.close()


def test_a_book_whose_folder_is_being_removed(make_book: MakeBook) -> None:
    """The file goes first."""
    book = make_book(fresh=True)
    (Path(book.address) / "book").unlink()
    with pytest.raises(BookClosed, match="there is no book at"):
        asyncbook.attach(book.address)
    with pytest.raises(BookClosed, match="there is no book at"):
        asyncbook.subscribe(book.address)


def test_what_is_no_address(tmp_path: Path, book: Book) -> None:
    folder = tmp_path / "asyncbook-1"
    folder.mkdir(mode=0o755)
    with pytest.raises(HandshakeFailed, match=r"expected user .* and mode 700"):
        asyncbook.attach(folder)
    folder.chmod(0o700)
    with pytest.raises(HandshakeFailed, match="says of no book"):
        asyncbook.attach(folder)
    file = folder / "book"
    file.write_text("{}")
    with pytest.raises(HandshakeFailed, match="says of no book"):
        asyncbook.attach(folder)
    right = json.loads((Path(book.address) / "book").read_text())
    for change, error, words in (
        ({"schema_hash": "0"}, LayoutMismatch, "has schema 0"),
        ({"book_no": 1}, BookClosed, "is closed"),
        ({"descriptor": 1 << 20}, BookClosed, "is closed"),
        ({"descriptor": 0}, BookClosed, "is closed"),
        ({"start_time": 1}, BookClosed, "its runner, process .* has ended"),
        ({"config": {"max_num_reqs": 0}}, LayoutMismatch, "another version"),
    ):
        file.write_text(json.dumps(right | change))
        with pytest.raises(error, match=words):
            asyncbook.attach(folder)
    file.write_text(json.dumps(right))
    asyncbook.attach(folder).close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can look with another user's eyes")
def test_another_user_does_not_get_in(book: Book) -> None:
    # All imported first: the other user may not be able to.
    program = (
        "import os, sys\nfrom asyncbook import HandshakeFailed, attach, attached\n"
        "os.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\n"
        "try:\n    attach(sys.argv[1])\nexcept HandshakeFailed as error:\n    print(error)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, book.address], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert "expected user 65534 and mode 700" in shown


@pytest.mark.parametrize("kind", ["embedded", "sidecar"])
def test_a_runner_that_was_killed(kind: str) -> None:
    how = "spawn()" if kind == "sidecar" else "asyncbook.open(asyncbook.BookConfig(**SIZE))"
    program = PROLOGUE + (
        f"SIZE = dict(max_num_reqs=4, max_model_len=1000, vocab_size=100)\nbook = {how}\n"
        "row = book.admit('a', [1, 2])\nbook.wait_applied(book.submit(book.batch([row]), np.array([5], np.int32)))\n"
        "print(book.address, flush=True)\nthreading.Event().wait()"
    )
    runner = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert runner.stdout is not None
        address = runner.stdout.readline().strip()
        with asyncbook.attach(address) as attached:
            assert attached.runner_pid == runner.pid
            (row,) = attached.rows()
            runner.send_signal(signal.SIGKILL)
            runner.wait(TIMEOUT_S)
            with pytest.raises(RunnerDied, match=f"process {runner.pid}"):
                attached.wait_applied(2, TIMEOUT_S)
            assert attached.token_ids(row).tolist() == [1, 2, 5]
            with pytest.raises(BookClosed):
                asyncbook.attach(address)
    finally:
        runner.kill()
        runner.wait()
        assert runner.stdout is not None
        runner.stdout.close()


def test_a_book_without_a_place_works_and_says_why_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncbook.ipc.runtime_dir.places", lambda: iter([Path("/proc/nowhere")]))
    with asyncbook.open(BookConfig(max_num_reqs=1, max_model_len=4, vocab_size=9)) as book:
        step(book, [book.admit("a", [1])], [2])
        with pytest.raises(HandshakeFailed, match="no folder for the sockets"):
            _ = book.address
