"""restart="replay" as the runner meets it: whatever it does meanwhile, it gets on; and what it meets when there is no
other sidecar to come."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncbook
from asyncbook import Book, BookConfig, InFlightFull, RequestParams, SidecarDied
from tests.conftest import KINDS, SMALL, ids_of, step, tokens, wait_until
from tests.process.leftovers import children, nothing_left_behind
from tests.process.test_end import kill_sidecar, why_it_died

LIMIT_S = 150.0  # a busy machine starts a sidecar slowly
SIDECARS = [name for name in KINDS if name != "embedded"]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=SIDECARS)
def config(request: pytest.FixtureRequest) -> BookConfig:
    return BookConfig(**(SMALL | KINDS[request.param]))


@pytest.fixture
def one_config() -> BookConfig:
    """For tests in which the transport has no part."""
    return BookConfig(**SMALL)


@pytest.fixture
def book(config: BookConfig) -> Iterator[Book]:
    with asyncbook.spawn(config) as book:
        yield book


def submit_stopped(book: Book) -> Any:
    """A row with two steps in flight, of which the dead sidecar has seen nothing."""
    row = book.admit("a", [1], RequestParams(max_tokens=2))
    step(book, [], [])
    assert book.sidecar_pid is not None
    os.kill(book.sidecar_pid, signal.SIGSTOP)
    for token_id in (5, 6):
        book.submit(book.batch([row]), ids_of([token_id]))
    kill_sidecar(book)
    return row


async def _read_until_end(book: Book, came: list[int]) -> None:
    async for outputs in book.outputs():
        came += outputs.token_ids.tolist()
        if outputs.finish_reasons.any():
            return


def _poll_step(book: Book) -> None:
    deadline = time.monotonic() + LIMIT_S
    while book.applied_step < 3:
        assert time.monotonic() < deadline


def _read_outputs(book: Book) -> None:
    came: list[int] = []
    asyncio.run(asyncio.wait_for(_read_until_end(book, came), LIMIT_S))
    assert came == [5, 6]


async def _several(book: Book) -> None:
    """Waiters of every kind, and calls of the same loop that take the news away from them."""
    came: list[int] = []
    waiters = [book.applied(2), book.applied(3), book.applied(3), book.room(), _read_until_end(book, came)]
    tasks = [asyncio.ensure_future(waiter) for waiter in waiters]
    while not all(task.done() for task in tasks):
        assert book.applied_step >= 1
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert came == [5, 6]


GETS_ON: dict[str, Callable[[Book], Any]] = {
    "polls applied_step": _poll_step,
    "wait_applied": lambda book: book.wait_applied(3, LIMIT_S),
    "await applied": lambda book: asyncio.run(asyncio.wait_for(book.applied(3), LIMIT_S)),
    "reads outputs": _read_outputs,
    "several waiters": lambda book: asyncio.run(asyncio.wait_for(_several(book), LIMIT_S)),
}


@pytest.mark.parametrize("how", GETS_ON)
def test_a_runner_gets_on(book: Book, how: str) -> None:
    row = submit_stopped(book)
    with pytest.raises(InFlightFull):
        book.submit(book.batch([row]), ids_of([7]))
    GETS_ON[how](book)
    book.wait_applied(3, LIMIT_S)
    assert tokens(book, row) == [1, 5, 6]
    book.release(row)
    step(book, [], [])


def test_calls_are_taken_while_the_next_sidecar_starts(book: Book) -> None:
    kill_sidecar(book)
    rows = [book.admit(name, [1]) for name in "ab"]
    numbers = [book.submit(book.batch(rows), ids_of([5, 6])) for _ in range(2)]
    with pytest.raises(InFlightFull):
        book.submit(book.batch(rows), ids_of([5, 6]))
    book.wait_applied(numbers[-1], LIMIT_S)
    assert [tokens(book, row) for row in rows] == [[1, 5, 5], [1, 6, 6]]
    assert book._supervisor.num_restarts == 1  # type: ignore[attr-defined]


def test_close_starts_no_other_sidecar(config: BookConfig, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    book = asyncbook.spawn(config)
    monkeypatch.setattr("asyncbook.supervisor.SidecarProcess", lambda *args, **kwargs: started.append(args))
    step(book, [], [])
    book.close()
    assert started == []


def test_close_lets_the_next_sidecar_apply_what_was_sent(one_config: BookConfig, runtime_dir: Path) -> None:
    with nothing_left_behind(runtime_dir):
        book = asyncbook.spawn(one_config)
        row = submit_stopped(book)
        book.close()
        assert book.applied_step == 3
        assert tokens(book, row) == [1, 5, 6]
        del book


def test_a_book_that_is_forgotten_in_the_middle_leaves_nothing(one_config: BookConfig, runtime_dir: Path) -> None:
    with nothing_left_behind(runtime_dir):
        book = asyncbook.spawn(one_config)
        submit_stopped(book)
        del book
        gc.collect()
        wait_until(lambda: not list(runtime_dir.iterdir()), "the folders are gone")


def test_an_event_loop_that_is_closed_in_the_middle(one_config: BookConfig, runtime_dir: Path) -> None:
    with nothing_left_behind(runtime_dir):
        book = asyncbook.spawn(one_config)
        row = submit_stopped(book)
        loop = asyncio.new_event_loop()
        task = loop.create_task(book.applied(3))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()  # nobody has cancelled the task
        asyncio.run(asyncio.wait_for(book.applied(3), LIMIT_S))
        assert tokens(book, row) == [1, 5, 6]
        book.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            del task, book, loop
            gc.collect()


def test_the_third_death_ends_the_book(
    one_config: BookConfig, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho no room for me >&2\nexit 7\n")
    (tmp_path / "python").chmod(0o755)

    def die_three_times() -> None:
        with asyncbook.spawn(one_config) as book:
            batch = book.batch([book.admit("a", [1])])
            monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
            kill_sidecar(book)
            message = why_it_died(lambda: asyncio.run(asyncio.wait_for(_wait_for_ever(book), LIMIT_S)))
            for fragment in ("exit status 7", "no room for me", "3 died within 10 s"):
                assert fragment in message
            why_it_died(lambda: book.submit(batch, ids_of([5])))
            why_it_died(lambda: book.admit("b", [1]))

    with nothing_left_behind(runtime_dir):
        die_three_times()


async def _wait_for_ever(book: Book) -> None:
    async for _ in book.outputs():
        pass


@pytest.mark.parametrize("num_waiters", [3])
def test_every_waiter_hears_of_the_end(num_waiters: int, runtime_dir: Path) -> None:
    config = BookConfig(**SMALL, restart="fail")

    async def wait(book: Book) -> list[Any]:
        waiters = [book.applied(1), book.room(), _wait_for_ever(book)][:num_waiters]
        tasks = [asyncio.ensure_future(waiter) for waiter in waiters]
        await asyncio.sleep(0)
        kill_sidecar(book)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

    with asyncbook.spawn(config) as book:
        assert book.sidecar_pid is not None
        os.kill(book.sidecar_pid, signal.SIGSTOP)
        for _ in range(2):
            book.submit(book.batch([]), ids_of([]))
        ends = asyncio.run(wait(book))
        assert [type(end) for end in ends] == [SidecarDied] * num_waiters
        with pytest.raises(SidecarDied, match="SIGKILL"):
            book.admit("a", [1])


def test_no_descriptor_for_the_next_sidecar(one_config: BookConfig, runtime_dir: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with asyncbook.spawn(one_config) as book:
        step(book, [], [])
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # 0 to 2 are open, and no other number is given out
        try:
            assert book.sidecar_pid is not None
            os.kill(book.sidecar_pid, signal.SIGKILL)
            wait_until(lambda: book._supervisor.is_down, "it is noticed")  # type: ignore[attr-defined]
            wait_until(lambda: bool(book._supervisor.reason), "it is told")  # type: ignore[attr-defined]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert "no other one can be started" in why_it_died(lambda: book.admit("a", [1]))
    assert not [pid for pid, state in children().items() if state == "Z"]


def patiently(book: Book, call: Callable[[], Any]) -> Any:
    """The call's answer, once the sidecar has taken what was sent before."""
    while True:
        try:
            return call()
        except InFlightFull:
            book.poll_outputs()


def test_requests_without_a_step_are_forgotten(one_config: BookConfig) -> None:
    count = 20_000  # messages of more than fit the journal
    with asyncbook.spawn(one_config) as book:
        for number in range(count):
            row = patiently(book, lambda: book.admit("a", [1]))
            patiently(book, lambda row=row: book.release(row))
            if number % 1000 == 0:
                book.poll_outputs()
            if number == count // 2:
                kill_sidecar(book)
        step(book, [], [])
        assert book.stats().admitted_requests == count
        assert len(book._journal) < count  # type: ignore[attr-defined]
