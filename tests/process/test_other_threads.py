"""A book where it is not expected: closed from another thread, used in a second event loop, in a forked child."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncbook
from asyncbook import Book, BookClosed, BookConfig
from tests.conftest import (
    KINDS,
    SMALL,
    TIMEOUT_S,
    MakeBook,
    ids_of,
    open_book,
    step,
    stopped_sidecar,
    tokens,
    wait_until,
)
from tests.process.leftovers import nothing_left_behind


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs the call in a thread; what it returned or raised comes into the list."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(call())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


# Closed from another thread


def test_close_from_another_thread(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    step(book, [book.admit("a", [1])], [5])
    thread, ended = in_thread(book.close)
    thread.join(TIMEOUT_S)
    assert ended == [None]
    with pytest.raises(BookClosed):
        book.admit("b", [1])
    assert book.poll_outputs() == [] or book.sidecar_pid is None
    book.close()


@pytest.mark.parametrize("transport", ["zmq", "ring"])
def test_close_ends_a_wait_in_another_thread(
    transport: str, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncbook.process.STOP_TIMEOUT_S", 0.2)
    with nothing_left_behind(runtime_dir):
        close_in_a_wait(BookConfig(**SMALL, transport=transport))


def close_in_a_wait(config: BookConfig) -> None:
    """Three threads close the book while a fourth waits for a step that a stopped sidecar will never apply."""
    book = asyncbook.spawn(config)
    pid = book.sidecar_pid
    step(book, [], [])
    os.kill(pid, signal.SIGSTOP)
    number = book.submit(book.batch([]), ids_of([]))
    waiter, ended = in_thread(lambda: book.wait_applied(number))
    wait_until(lambda: bool(book._awaited_steps), "a thread waits")
    closers = [in_thread(book.close) for _ in range(3)]
    for closer, _ in closers:
        closer.join(TIMEOUT_S)
    waiter.join(TIMEOUT_S)
    assert [came for _, came in closers] == [[None]] * 3
    assert isinstance(ended[0], BookClosed)
    assert not Path(f"/proc/{pid}").exists()
    ended.clear()


def test_close_ends_a_wait_in_another_thread_s_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncbook.process.STOP_TIMEOUT_S", 0.2)
    book = asyncbook.spawn(BookConfig(**SMALL))
    step(book, [], [])

    async def read() -> str:
        async for _ in book.outputs():
            raise AssertionError
        return "over"

    thread, ended = in_thread(lambda: asyncio.run(asyncio.wait_for(read(), TIMEOUT_S)))
    wait_until(lambda: bool(book._waiters._waiters), "the loop waits")
    book.close()
    thread.join(TIMEOUT_S)
    assert ended == ["over"] or isinstance(ended[0], BookClosed)


# Event loops, one after the other


@pytest.mark.parametrize("kind", KINDS)
def test_a_book_in_two_event_loops(make_book: MakeBook) -> None:
    book = make_book()
    row = book.admit("a", [1])
    batch = book.batch([row])

    async def use(token_id: int) -> list[int]:
        number = book.submit(batch, ids_of([token_id]))
        await book.applied(number)
        await book.room()
        async for outputs in book.outputs():
            return outputs.token_ids.tolist()
        raise AssertionError

    assert asyncio.run(use(5)) == [5]
    assert asyncio.run(use(6)) == [6]
    assert tokens(book, row) == [1, 5, 6]


# Views


@pytest.mark.parametrize("kind", KINDS)
def test_views_outlive_the_book(kind: str) -> None:
    book = open_book(kind, BookConfig(**(SMALL | KINDS[kind])))
    row = book.admit("a", [1])
    step(book, [row], [5])
    frame, token_ids, output_ids = book.frame(), book.token_ids(row), book.output_token_ids(row)
    (outputs,) = book.poll_outputs()
    book.close()
    del book
    gc.collect()
    assert token_ids.tolist() == [1, 5]
    assert output_ids.tolist() == [5]
    assert int(frame.num_tokens[row.index]) == 2
    assert outputs.token_ids.tolist() == [5]
    with pytest.raises(ValueError, match="read-only"):
        token_ids[0] = 3


# Forked


def in_child(call: Callable[[], Any]) -> str:
    """What the call says in a forked child: its result, or its error."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork with threads
        child = os.fork()
    if child == 0:
        try:
            try:
                said = repr(call())
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0
    return said


CALLS: dict[str, Callable[[Book, Any, Any], Any]] = {
    "submit": lambda book, row, batch: book.submit(batch, ids_of([7]), draft_token_ids=ids_of([8])),
    "admit": lambda book, row, batch: book.admit("b", [1]),
    "release": lambda book, row, batch: book.release(row),
    "poll_outputs": lambda book, row, batch: book.poll_outputs(),
    "outputs": lambda book, row, batch: asyncio.run(asyncio.wait_for(anext(aiter(book.outputs())), TIMEOUT_S)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_forked_child_is_refused_and_the_parent_goes_on(make_book: MakeBook, call: str) -> None:
    book = make_book(fresh=True)
    row = book.admit("a", [1])
    batch = book.batch([row])
    step(book, batch, [5])
    said = in_child(lambda: CALLS[call](book, row, batch))
    assert said.startswith("BookClosed: the book belongs to process")
    assert str(os.getpid()) in said
    step(book, batch, [6])
    assert tokens(book, row) == [1, 5, 6]
    assert [outputs.token_ids.tolist() for outputs in book.poll_outputs()] == [[5], [6]]


@pytest.mark.parametrize("kind", ["sidecar", "ring"])
def test_a_forked_child_that_waits_is_refused(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    batch = book.batch([book.admit("a", [1])])
    with stopped_sidecar(book):
        number = book.submit(batch, ids_of([5]))
        for wait in (book.wait_applied, lambda number: asyncio.run(book.applied(number))):
            assert in_child(lambda wait=wait: wait(number)).startswith("BookClosed")  # type: ignore[misc]
    book.wait_applied(number, TIMEOUT_S)


def test_a_forked_child_may_read_and_close(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    row = book.admit("a", [1])
    step(book, [row], [5])

    def read_and_close() -> list[int]:
        seen = book.token_ids(row).tolist()
        book.close()
        book.close()
        return seen

    assert in_child(read_and_close) == "[1, 5]"
    step(book, [row], [6])
    assert tokens(book, row) == [1, 5, 6]


def test_a_forked_child_may_have_a_book_of_its_own(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    step(book, [], [])

    def other() -> list[int]:
        with asyncbook.open(BookConfig(**SMALL)) as own:
            row = own.admit("a", [1])
            own.submit(own.batch([row]), np.array([9], np.int32))
            return own.token_ids(row).tolist()

    assert in_child(other) == "[1, 9]"
    step(book, [], [])
