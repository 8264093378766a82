"""The room for steps and messages in flight: exactly as much as was asked for, and refusals that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import asyncbook
from asyncbook import Book, FinishReason, FrameExpired, InFlightFull, NotApplied, RequestParams, SidecarTimeout
from tests.conftest import TIMEOUT_S, MakeBook, delivered, have, ids_of, step, stopped_sidecar, tokens


def test_steps_in_flight_are_bounded(make_book: MakeBook, kind: str) -> None:
    book = make_book()
    row = book.admit("a", [1, 2])
    first = step(book, [row], [5])
    if kind == "embedded":  # never has a step in flight
        for number in range(5):
            assert book.submit(book.batch([row]), ids_of([6])) == first + 1 + number
        return
    batch = book.batch([row])
    with stopped_sidecar(book):
        assert [book.submit(batch, ids_of([6])), book.submit(batch, ids_of([7]))] == [first + 1, first + 2]
        held = book.stats().messages
        for _ in range(3):
            with pytest.raises(InFlightFull) as caught:
                book.submit(batch, ids_of([99]))
            for fragment in (f"step {first + 3}", f"step {first} is applied", "at most 2"):
                assert fragment in str(caught.value)
        assert book.stats().messages == held
        assert book.applied_step == first
        waits: list[Callable[[], None]] = [lambda: book.wait_applied(first + 1, 0.01), lambda: book.wait_room(0.01)]
        for wait in waits:
            with pytest.raises(SidecarTimeout) as late:
                wait()
            assert f"step {first + 1}" in str(late.value)
            assert f"step {first}" in str(late.value)
        assert issubclass(SidecarTimeout, TimeoutError)
        with pytest.raises(NotApplied):
            book.frame(first + 1)
        assert book.token_ids(row).tolist() == [1, 2, 5]
    book.wait_room(TIMEOUT_S)
    assert book.submit(batch, ids_of([8])) == first + 3
    book.wait_applied(first + 3, TIMEOUT_S)
    assert tokens(book, row) == [1, 2, 5, 6, 7, 8]
    assert delivered(book)["a"].token_ids == [5, 6, 7, 8]


@pytest.mark.parametrize("kind", ["sidecar", "ring"])  # nothing is ever in flight in an embedded one
@pytest.mark.parametrize("max_in_flight", [1, 5])
def test_exactly_max_in_flight_steps_fit(make_book: MakeBook, kind: str, max_in_flight: int) -> None:
    book = make_book(max_in_flight=max_in_flight)
    row = book.admit("a", [1], RequestParams(max_tokens=9))
    batch = book.batch([row])
    step(book, batch, [5])
    with stopped_sidecar(book):
        for _ in range(max_in_flight):
            book.submit(batch, ids_of([6]))
        with pytest.raises(InFlightFull, match=f"at most {max_in_flight} "):
            book.submit(batch, ids_of([7]))
        book.frame(book.applied_step).check()  # no frame that can be read is given to a step in flight
    number = book.submitted_step
    book.wait_applied(number, TIMEOUT_S)
    assert tokens(book, row) == [1, 5, *[6] * max_in_flight]
    with pytest.raises(FrameExpired):
        book.frame(number - max_in_flight - 2)


@pytest.mark.parametrize("kind", ["sidecar", "ring"])  # nothing is ever in flight in an embedded one
def test_other_messages_are_bounded_too_and_refused_whole(make_book: MakeBook, kind: str) -> None:
    book = make_book(fresh=True)
    keeper = book.admit("keeper", [1])
    step(book, [keeper], [5])
    row, refusal = None, ""
    with stopped_sidecar(book):
        for number in range(200_000):  # far beyond what any queue may hold
            try:
                if row is None:
                    row = book.admit(f"r{number}", [1])
                else:
                    book.release(row)
                    row = None
            except InFlightFull as error:
                refusal = str(error)
                break
        before = book.stats()
        assert f"message {before.messages + 1}" in refusal
        batch = book.batch([keeper])
        calls: list[Callable[[], Any]] = [
            lambda: book.abort(keeper),
            lambda: book.preempt(keeper),
            lambda: book.rewind(keeper, 0),
            lambda: book.release(keeper),
            lambda: book.admit("one more", [1]),
            lambda: book.submit(batch, ids_of([9])),
        ]
        for call in 2 * calls:
            with pytest.raises(InFlightFull):
                call()
        after = book.stats()
        assert (after.messages, after.num_rows_held) == (before.messages, before.num_rows_held)
    # Everything that was taken arrives, and nothing of what was refused.
    number = _submit_when_there_is_room(book, keeper, 6)
    book.wait_applied(number, TIMEOUT_S)
    assert tokens(book, keeper) == [1, 5, 6]
    assert have(book, keeper, finish_reason=FinishReason.NONE)
    assert number == 2
    stats = book.stats()
    assert (stats.bad_messages, stats.stale_messages) == (0, 0)
    assert stats.admitted_requests - stats.released_requests == stats.num_rows_held == 1 + (row is not None)


def _submit_when_there_is_room(book: Book, row: asyncbook.Row, token_id: int) -> int:
    for _ in range(1_000_000):
        try:
            return book.submit(book.batch([row]), ids_of([token_id]))
        except InFlightFull:
            continue
    raise AssertionError("no room, although the sidecar runs")
