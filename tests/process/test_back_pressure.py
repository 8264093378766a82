"""One side does not keep up: the other is told, nobody waits without a limit, memory is bounded, nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncbook
from asyncbook import Book, BookConfig, InFlightFull, SidecarTimeout
from tests.conftest import KINDS, SMALL, TIMEOUT_S, MakeBook, delivered, ids_of, step, stopped_sidecar, tokens
from tests.process import load

SIDECARS = ["sidecar", "ring"]


@pytest.mark.parametrize("kind", SIDECARS)
def test_a_stopped_sidecar_is_waited_for_no_longer_than_allowed(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    row = book.admit("a", [1])
    batch = book.batch([row])
    step(book, batch, [4])
    assert delivered(book)["a"].token_ids == [4]
    with stopped_sidecar(book):
        numbers = [book.submit(batch, ids_of([5])), book.submit(batch, ids_of([6]))]
        for _ in range(3):
            with pytest.raises(InFlightFull, match="at most 2"):
                book.submit(batch, ids_of([7]))
        with pytest.raises(SidecarTimeout):
            book.wait_room(0.05)
        with pytest.raises(SidecarTimeout):
            book.wait_applied(numbers[0], 0.05)
        for wait in (lambda: book.room(), lambda: book.applied(numbers[1])):
            with pytest.raises(asyncio.TimeoutError):
                asyncio.run(asyncio.wait_for(wait(), 0.05))
        assert book.poll_outputs() == []
    book.wait_room(TIMEOUT_S)
    book.wait_applied(numbers[1], TIMEOUT_S)
    assert tokens(book, row) == [1, 4, 5, 6]
    assert delivered(book)["a"].token_ids == [5, 6]


def send_until_full(book: Book, prompt: np.ndarray, most: int) -> tuple[int, str]:
    """Admits and releases until a message does not fit: how many were admitted, and the error."""
    for number in range(most):
        try:
            book.release(book.admit(str(number), prompt))
        except InFlightFull as error:
            return number, str(error)
    raise AssertionError(f"{most} requests and no error")


WAITS_FOR_ROOM: dict[str, Callable[[Book, float], None]] = {
    "wait_room": lambda book, limit_s: book.wait_room(limit_s),
    "room": lambda book, limit_s: asyncio.run(asyncio.wait_for(book.room(), limit_s)),
}


def wait_for_room(book: Book, how: str) -> None:
    """Not before the sidecar has taken messages."""
    with pytest.raises(TimeoutError):  # SidecarTimeout is one
        WAITS_FOR_ROOM[how](book, 0.05)


@pytest.mark.parametrize("kind", SIDECARS)
@pytest.mark.parametrize("how", WAITS_FOR_ROOM)
def test_small_messages_to_a_stopped_sidecar_end_in_an_error_and_none_is_lost(make_book: MakeBook, how: str) -> None:
    book = make_book(fresh=True)
    step(book, [], [])
    with stopped_sidecar(book):
        before = load.memory(book)
        num_sent, error = send_until_full(book, np.ones(1, np.int32), 100_000)
        after = load.memory(book)
        wait_for_room(book, how)
    assert "does not fit" in error
    assert 100 < num_sent < 20_000
    assert after.runner - before.runner < 64
    assert after.sidecar - before.sidecar < 1
    WAITS_FOR_ROOM[how](book, TIMEOUT_S)
    step(book, [], [])
    stats = book.stats()
    assert stats.bad_messages == stats.replayed_messages == 0
    assert stats.admitted_requests == num_sent + stats.num_rows_held


@pytest.mark.parametrize("kind", SIDECARS)
def test_large_messages_to_a_stopped_sidecar_are_bounded_in_bytes(make_book: MakeBook) -> None:
    book: Any = make_book(fresh=True, max_num_reqs=2, max_model_len=1 << 20)
    prompt = np.ones(1 << 20, np.int32)
    step(book, [], [])
    with stopped_sidecar(book):
        before = load.memory(book)
        num_sent, error = send_until_full(book, prompt, 1000)
        after = load.memory(book)
        wait_for_room(book, "wait_room")
    assert "bytes at most" in error
    assert 2 < num_sent < 30
    # Once in the socket's queue, once in the journal; and what Python keeps of freed memory.
    assert after.runner - before.runner < 2 * book._backlog.max_bytes / load.MIB + 16
    book.wait_room(TIMEOUT_S)
    step(book, [], [])
    assert book.stats().admitted_requests == num_sent + book.stats().num_rows_held
    row = book.admit("again", prompt[:-1])
    step(book, [row], [5])
    assert book.token_ids(row).size == 1 << 20


@pytest.mark.parametrize("transport", ["zmq", "ring"])
def test_a_reader_that_never_reads_costs_no_more_than_the_book(transport: str) -> None:
    config = BookConfig(max_num_reqs=64, max_model_len=512, vocab_size=100, transport=transport)
    with asyncbook.spawn(config) as book:
        early, late, engine = load.run_unread(book, seed=1, num_tokens=200_000)
        assert late.runner - early.runner < 24
        assert late.sidecar - early.sidecar < 24
        assert late.shared < book._layout.total_bytes / load.MIB
        # What it did not read is there, whole.
        read: Counter[str] = Counter()
        while more := load.read_all(book):
            read += more
        assert read == engine.expected
        assert book.stats().outputs_dropped_requests == 0


def test_a_released_row_gives_its_memory_back() -> None:
    config = BookConfig(**(SMALL | KINDS["ring"]) | {"max_num_reqs": 16, "max_model_len": 100_000})
    with asyncbook.spawn(config) as book:
        *seen, last = load.run_mixed(book, seed=2, num_requests=1500, max_prompt=90_000)
        whole = book._layout.total_bytes / load.MIB
    assert max(memory.shared for memory in seen) < whole / 2
    assert last.shared < book._layout.table_offset / load.MIB + 4
    for name in ("runner", "sidecar"):
        early, late = getattr(seen[4], name), getattr(last, name)
        assert late - early < 16, name
