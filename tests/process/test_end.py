"""How a book ends: closed, forgotten, interrupted, or with one of its two processes killed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import asyncbook
from asyncbook import Batch, Book, BookConfig, Row, SidecarDied
from asyncbook.ipc.channel import RunnerChannel
from tests.conftest import KINDS, SMALL, TIMEOUT_S, columns, ids_of, step, tokens
from tests.process.leftovers import WatchedProcess, nothing_left_behind

SIDECARS = [name for name in KINDS if name != "embedded"]


@pytest.fixture(params=SIDECARS)
def config(request: pytest.FixtureRequest) -> BookConfig:
    return BookConfig(**(SMALL | KINDS[request.param]), restart="fail")


@pytest.fixture
def one_config() -> BookConfig:
    """For tests in which the transport has no part."""
    return BookConfig(**SMALL, restart="fail")


def sidecar_of(book: Book) -> WatchedProcess:
    """The process, to watch its end."""
    assert book.sidecar_pid is not None
    return WatchedProcess(book.sidecar_pid)


def is_gone(process: WatchedProcess) -> bool:
    """It has ended within the limit, and it has been waited for."""
    ended = process.wait_end() and not Path(f"/proc/{process.pid}").exists()
    process.close()
    return ended


# Closed


def use(book: Book) -> None:
    """A step."""
    row = book.admit("a", [1])
    step(book, [row], [5])
    assert tokens(book, row) == [1, 5]


async def use_in_context(book: Book) -> None:
    """A step in an `async with` block."""
    async with book:
        use(book)


def close_by(how: str, book: Book) -> None:
    """Uses the book and closes it."""
    match how:
        case "async with":
            asyncio.run(use_in_context(book))
        case "aclose":
            asyncio.run(book.aclose())
        case _:
            use(book)
            book.close()
            book.close()


@pytest.mark.parametrize("how", ["close twice", "async with", "aclose"])
def test_nothing_is_left_after_close(one_config: BookConfig, runtime_dir: Path, how: str) -> None:
    with nothing_left_behind(runtime_dir):
        book = asyncbook.spawn(one_config)
        sidecar = sidecar_of(book)
        close_by(how, book)
        assert is_gone(sidecar)
        del book


def test_close_while_an_error_passes(one_config: BookConfig, runtime_dir: Path) -> None:
    sidecars: list[WatchedProcess] = []

    def fail() -> None:
        with asyncbook.spawn(one_config) as book:
            sidecars.append(sidecar_of(book))
            raise KeyError("mine")

    with nothing_left_behind(runtime_dir):
        with pytest.raises(KeyError, match="mine"):
            fail()
        assert is_gone(sidecars[0])


def test_what_was_sent_before_close_is_applied(config: BookConfig) -> None:
    book = asyncbook.spawn(config)
    row = book.admit("a", [1])
    batch = book.batch([row])
    book.submit(batch, ids_of([5]))
    book.submit(batch, ids_of([6]))
    book.close()
    assert book.applied_step == 2
    assert columns(book, row)["num_output_tokens"] == 2
    assert tokens(book, row) == [1, 5, 6]


def test_a_forgotten_book_ends_its_sidecar(one_config: BookConfig, runtime_dir: Path) -> None:
    with nothing_left_behind(runtime_dir):
        book = asyncbook.spawn(one_config)
        sidecar = sidecar_of(book)
        use(book)
        columns = book.frame().num_tokens
        del book
        gc.collect()
        assert is_gone(sidecar)
        assert int(columns[0]) == 2  # an array keeps its memory
        del columns


def test_a_book_outlives_the_thread_that_spawned_it(one_config: BookConfig) -> None:
    books: list[Book] = []
    thread = threading.Thread(target=lambda: books.append(asyncbook.spawn(one_config)))
    thread.start()
    thread.join()
    (book,) = books
    with book:
        row = book.admit("a", [1])
        step(book, [row], [5])
        assert tokens(book, row) == [1, 5]


def test_a_sidecar_that_does_not_end_is_killed(
    one_config: BookConfig, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncbook.process.STOP_TIMEOUT_S", 0.1)
    with nothing_left_behind(runtime_dir):
        book = asyncbook.spawn(one_config)
        sidecar = sidecar_of(book)
        os.kill(sidecar.pid, signal.SIGSTOP)
        book.close()
        assert is_gone(sidecar)
        del book


# The sidecar is killed


def kill_sidecar(book: Book) -> None:
    """SIGKILL, and its end."""
    process = sidecar_of(book)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait_end()
    process.close()


WAITS: dict[str, Callable[[Book, int], Any]] = {
    "wait_applied": lambda book, number: book.wait_applied(number),
    "wait_room": lambda book, number: book.wait_room(),
    "applied": lambda book, number: asyncio.run(_in_loop(book.applied(number))),
    "room": lambda book, number: asyncio.run(_in_loop(book.room())),
    "outputs": lambda book, number: asyncio.run(_in_loop(_next_outputs(book))),
}


async def _in_loop(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, TIMEOUT_S)


async def _next_outputs(book: Book) -> None:
    async for _ in book.outputs():
        raise AssertionError("nothing was delivered")


def killed_in_the_wait(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar is killed by the waiting runner itself, at the moment when it begins to wait."""

    def sync_wait(self: RunnerChannel, *arguments: Any) -> None:
        kill_sidecar(book)
        monkeypatch.undo()
        self.wait_event(*arguments)

    monkeypatch.setattr(RunnerChannel, "wait_event", sync_wait)

    async def readable(self: Any, *descriptors: int) -> None:
        monkeypatch.undo()
        waiting = asyncio.ensure_future(self.readable(*descriptors))
        await asyncio.sleep(0)
        kill_sidecar(book)
        await waiting

    monkeypatch.setattr("asyncbook.waiting.DescriptorWaiters.readable", readable)


def killed_and_waited_for(config: BookConfig, wait: str, when: str) -> None:
    """One wait that the sidecar's end ends, then all the others."""
    book = asyncbook.spawn(config)
    batch = book.batch([book.admit("a", [1])])
    step(book, [], [])
    pid = book.sidecar_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    numbers = [book.submit(batch, ids_of([5])), book.submit(batch, ids_of([6]))]
    with pytest.MonkeyPatch.context() as patch:
        if when == "before":
            kill_sidecar(book)
        else:
            killed_in_the_wait(book, patch)
        message = why_it_died(lambda: WAITS[wait](book, numbers[0]))
    for fragment in (f"pid {pid}", "SIGKILL", "step 1 is applied", "step 3 was submitted"):
        assert fragment in message
    for other_wait in WAITS.values():  # the end is known now, so nobody waits for it once more
        why_it_died(partial(other_wait, book, numbers[1]))
    book.close()


@pytest.mark.parametrize("wait", ["wait_applied", "applied", "outputs"])
def test_a_wait_ends_when_the_sidecar_is_killed(one_config: BookConfig, runtime_dir: Path, wait: str) -> None:
    with nothing_left_behind(runtime_dir):
        killed_and_waited_for(one_config, wait, "while")


def test_no_wait_begins_after_the_sidecar_was_killed(config: BookConfig, runtime_dir: Path) -> None:
    with nothing_left_behind(runtime_dir):
        killed_and_waited_for(config, "wait_applied", "before")


def why_it_died(call: Callable[[], Any]) -> str:
    """The message of the error. Its traceback, which keeps everything alive, ends here."""
    with pytest.raises(SidecarDied) as caught:
        call()
    return str(caught.value)


SENDS: dict[str, Callable[[Book, Row, Batch], Any]] = {
    "submit": lambda book, row, batch: book.submit(batch, ids_of([7])),
    "admit": lambda book, row, batch: book.admit("b", [1]),
    "abort": lambda book, row, batch: book.abort(row),
    "preempt": lambda book, row, batch: book.preempt(row),
    "rewind": lambda book, row, batch: book.rewind(row, 0),
    "release": lambda book, row, batch: book.release(row),
}


def test_every_call_that_sends_says_that_the_sidecar_died(config: BookConfig) -> None:
    with asyncbook.spawn(config) as book:
        row = book.admit("a", [1])
        batch = book.batch([row])
        number = step(book, batch, [5])
        kill_sidecar(book)
        why_it_died(lambda: asyncio.run(_in_loop(_drain(book))))  # from here on the book knows
        held = book.stats().num_rows_held
        other: dict[str, str] = {}
        for name, send in SENDS.items():
            try:
                send(book, row, batch)
            except SidecarDied:
                continue
            except Exception as error:
                other[name] = repr(error)
            else:
                other[name] = "was taken"
        assert other == {}
        assert book.stats().num_rows_held == held
        assert book.submitted_step == number


async def _drain(book: Book) -> None:
    async for _ in book.outputs():
        pass


def test_what_was_committed_stays_readable(config: BookConfig) -> None:
    with asyncbook.spawn(config) as book:
        row = book.admit("a", [1])
        number = step(book, [row], [5])
        pid = book.sidecar_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        book.submit(book.batch([row]), ids_of([6]))
        kill_sidecar(book)
        with book.frame(number) as frame:
            assert int(frame.last_token_id[row.index]) == 5
        assert book.token_ids(row).tolist() == [1, 5]
        assert book.applied_step == number
        why_it_died(lambda: book.wait_applied(number + 1))


def test_close_after_the_sidecar_was_killed(one_config: BookConfig, runtime_dir: Path) -> None:
    with nothing_left_behind(runtime_dir):
        book = asyncbook.spawn(one_config)
        step(book, [], [])
        kill_sidecar(book)
        book.close()
        book.close()
        del book
