"""The life of a row: abort, preempt, resume, rewind, release, and what they refuse. On every kind of book."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncbook import Book, FinishReason, InvalidRequest, RequestParams, Row, StaleRow
from tests.conftest import (
    Delivered,
    MakeBook,
    columns,
    delivered,
    empty,
    grown,
    have,
    refused,
    step,
    tokens,
    wait_until,
)

CALLS: dict[str, Callable[[Book, Row], Any]] = {
    "batch": lambda book, row: book.batch([row]),
    "token_ids": lambda book, row: book.token_ids(row),
    "output_token_ids": lambda book, row: book.output_token_ids(row),
    "abort": lambda book, row: book.abort(row),
    "preempt": lambda book, row: book.preempt(row),
    "preempt, drop in flight": lambda book, row: book.preempt(row, drop_in_flight=True),
    "resume": lambda book, row: book.resume(row),
    "rewind": lambda book, row: book.rewind(row, 0),
    "release": lambda book, row: book.release(row),
}


def resumed(book: Book, row: Row) -> Row:
    """The row's next handle, by way of a preemption."""
    book.preempt(row)
    return book.resume(row)


# What makes a handle stale, and the handle that is good from then on (None: nobody's).
MAKES_STALE: dict[str, Callable[[Book, Row], Row | None]] = {
    "release": lambda book, row: book.release(row),
    "release and reuse": lambda book, row: book.release(row) or book.admit("next", [8, 8]),  # type: ignore[func-returns-value]
    "resume": resumed,
    "rewind": lambda book, row: book.rewind(row, 1),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", MAKES_STALE)
def test_every_call_refuses_a_stale_handle(book: Book, call: str, how: str) -> None:
    row = book.admit("a", [1, 2, 3])
    step(book, [row], [5])
    new = MAKES_STALE[how](book, row)
    step(book, [], [])
    fragments = [f"row {row.index}", f"generation {row.generation}" if new is None else f"generation {new.generation}"]
    with refused(book, StaleRow, *fragments):
        CALLS[call](book, row)
    if new is not None:
        assert book.token_ids(new).tolist() == ([8, 8] if how == "release and reuse" else [1, 2, 3, 5])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "row",
    [Row(4, 1), Row(-1, 1), Row(-4, 1), Row(3, 0), Row(2**40, 1), None, 0, "a", (0,), ("a", 1), (None, 1), (0, 1, 2)],
)
def test_every_call_refuses_what_is_no_handle(book: Book, call: str, row: Any) -> None:
    neighbour = book.admit("neighbour", [1, 2])
    with refused(book, StaleRow, "row"):
        CALLS[call](book, row)
    assert tokens(book, neighbour) == [1, 2]


@pytest.mark.parametrize("offset", [-1, 1, 2**32])
def test_a_handle_of_another_generation_is_stale(book: Book, offset: int) -> None:
    row = book.admit("a", [1])
    wrong = row.generation + offset
    with refused(book, StaleRow, f"row {row.index}", "'a'", f"generation {row.generation}", f"{wrong}"):
        book.abort(Row(row.index, wrong))


def test_a_plain_tuple_is_a_handle_or_it_is_refused(book: Book) -> None:
    neither: dict[str, Exception] = {}
    for name, call in CALLS.items():
        row = book.admit(name, [1])
        step(book, [row], [5])
        if name == "resume":
            book.preempt(row)
        index, generation = row
        try:
            call(book, (index, generation))  # type: ignore[arg-type]
        except StaleRow:
            step(book, [row], [6])
            assert tokens(book, row) == [1, 5, 6]
        except Exception as error:
            neither[name] = error
        empty(book)
    assert neither == {}


# Abort


def test_abort_is_delivered_without_a_step(book: Book) -> None:
    row, other = book.admit("a", [1, 2]), book.admit("b", [3])
    number = step(book, [row, other], [5, 6])
    assert delivered(book)["a"].token_ids == [5]
    book.abort(row)
    came: dict[str, Delivered] = {}
    wait_until(lambda: bool(came.update(delivered(book)) or came), "the abort is delivered")
    assert came == {"a": Delivered([], FinishReason.ABORT, None, 1)}
    assert book.applied_step == number


def test_abort_shows_in_the_next_frame_and_keeps_tokens(book: Book) -> None:
    row = book.admit("a", [1, 2])
    step(book, [row], [5], drafts=[[6, 7]])
    assert have(book, row, num_tokens=5)
    book.abort(row)
    assert have(book, row, finish_reason=FinishReason.NONE)
    step(book, [row], [8])
    assert have(
        book, row, finish_reason=FinishReason.ABORT, stop_reason=-1, num_tokens=3, num_output_tokens=1, last_token_id=5
    )
    assert book.token_ids(row).tolist() == [1, 2, 5] == tokens(book, row)


def test_abort_wins_over_what_the_step_would_have_finished(book: Book) -> None:
    before = book.stats()
    row = book.admit("a", [1], RequestParams(stop_token_ids=[9]))
    batch = book.batch([row])
    book.abort(row)
    step(book, batch, [9])
    assert delivered(book) == {"a": Delivered([], FinishReason.ABORT, None, 1)}
    assert grown(book, before) == {
        "admitted_requests": 1, "submitted_tokens": 1, "dropped_finished": 1, "finished_ABORT": 1
    }  # fmt: skip


@pytest.mark.parametrize("times", [1, 2])
def test_abort_of_a_finished_request_changes_nothing(book: Book, times: int) -> None:
    row = book.admit("a", [1], RequestParams(stop_token_ids=[9]))
    step(book, [row], [9])
    assert delivered(book)["a"].finish_reason is FinishReason.STOP
    for _ in range(times):
        book.abort(row)
    step(book, [], [])
    assert have(book, row, finish_reason=FinishReason.STOP, stop_reason=9)
    assert delivered(book) == {}


# Preempt and resume


def test_preempt_takes_the_computed_tokens_and_drafts(book: Book) -> None:
    row = book.admit("a", [1, 2])
    step(book, [row], [5], drafts=[[6, 7]])
    step(book, [row], [[6, 7, 8]], d=[2], drafts=[[9, 9]])
    book.preempt(row)
    step(book, [], [])
    assert have(
        book, row, num_computed_tokens=0, num_tokens=6, num_tokens_no_spec=6, num_accepted_tokens=2, finish_reason=0
    )
    assert tokens(book, row) == [1, 2, 5, 6, 7, 8]


def test_ids_in_flight_over_a_preemption_are_delivered_or_dropped(book: Book) -> None:
    before = book.stats()
    keeps, drops = book.admit("keeps", [1]), book.admit("drops", [2])
    batch = book.batch([keeps, drops])
    step(book, batch, [5, 5])
    book.preempt(keeps)
    book.preempt(drops, drop_in_flight=True)
    step(book, batch, [6, 6])
    assert have(book, keeps, num_computed_tokens=0, num_output_tokens=2)
    assert have(book, drops, num_computed_tokens=0, num_output_tokens=1)
    keeps, drops = book.resume(keeps), book.resume(drops, num_computed_tokens=1)
    step(book, batch, [7, 7])  # under the old handles: stale
    step(book, [keeps, drops], [8, 8])
    assert tokens(book, keeps) == [1, 5, 6, 8]
    assert tokens(book, drops) == [2, 5, 8]
    assert have(book, keeps, num_computed_tokens=3)
    assert have(book, drops, num_computed_tokens=2)
    assert grown(book, before) == {
        "admitted_requests": 2, "submitted_tokens": 8, "committed_tokens": 5, "dropped_preempted": 1, "dropped_stale": 2
    }  # fmt: skip


def test_a_second_preempt_says_how_anew(book: Book) -> None:
    row = book.admit("a", [1])
    batch = book.batch([row])
    book.preempt(row)
    book.preempt(row, drop_in_flight=True)
    step(book, batch, [5])
    book.preempt(row)
    step(book, batch, [6])
    assert tokens(book, row) == [1, 6]


def test_resume_and_rewind_raise_the_generation_by_one(book: Book) -> None:
    row = book.admit("a", [1, 2, 3])
    step(book, [row], [5])
    book.preempt(row)
    second = book.resume(row, num_computed_tokens=2)
    third = book.rewind(second, 1)
    assert second == (row.index, row.generation + 1)
    assert third == (row.index, row.generation + 2)
    step(book, [], [])
    assert have(book, third, generation=third.generation, num_computed_tokens=1, num_tokens=4)
    assert book.token_ids(third).tolist() == [1, 2, 3, 5]
    assert book.output_token_ids(third).tolist() == [5]
    book.release(third)
    assert book.admit("b", [1]) == (row.index, row.generation + 3)


def test_tokens_of_a_renamed_row_can_be_read_before_the_next_step(book: Book) -> None:
    row = book.admit("a", [1, 2, 3])
    step(book, [row], [5])
    new = book.rewind(row, 0)
    assert book.token_ids(new).tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize("num_computed_tokens", [0, 16, np.int64(2)])
def test_resume_and_rewind_take_any_number_up_to_max_model_len(book: Book, num_computed_tokens: int) -> None:
    row = book.admit("a", [1, 2, 3])
    row = book.rewind(row, num_computed_tokens)
    step(book, [], [])
    assert have(book, row, num_computed_tokens=int(num_computed_tokens))
    book.preempt(row)
    row = book.resume(row, num_computed_tokens=num_computed_tokens)
    step(book, [], [])
    assert have(book, row, num_computed_tokens=int(num_computed_tokens))


@pytest.mark.parametrize(
    ("value", "fragment"), [(-1, "-1"), (17, "17"), (2**40, str(2**40)), (1.5, "1.5"), ("1", "'1'"), (None, "None")]
)
def test_resume_and_rewind_refuse_what_is_no_number_of_computed_tokens(book: Book, value: Any, fragment: str) -> None:
    running, preempted = book.admit("a", [1, 2]), book.admit("b", [1, 2])
    book.preempt(preempted)
    with refused(book, InvalidRequest, f"row {running.index}", "num_computed_tokens", fragment, "0 to", "16"):
        book.rewind(running, value)
    with refused(book, InvalidRequest, f"row {preempted.index}", "num_computed_tokens", fragment, "0 to", "16"):
        book.resume(preempted, num_computed_tokens=value)
    book.resume(preempted)
    book.rewind(running, 0)


def test_resume_is_for_preempted_rows_and_rewind_for_the_others(book: Book) -> None:
    row = book.admit("a", [1, 2])
    with refused(book, InvalidRequest, f"row {row.index}", "'a'", "not preempted", "rewind"):
        book.resume(row)
    book.preempt(row)
    with refused(book, InvalidRequest, f"row {row.index}", "'a'", "preempted", "resume"):
        book.rewind(row, 1)
    row = book.resume(row)
    with refused(book, InvalidRequest, f"row {row.index}", "not preempted"):
        book.resume(row)
    row = book.rewind(row, 1)
    with refused(book, InvalidRequest, f"row {row.index}", "not preempted"):
        book.resume(row)


@pytest.mark.parametrize("ends_by", ["stop", "abort"])
def test_every_call_is_allowed_on_a_finished_row(book: Book, ends_by: str) -> None:
    row = book.admit("a", [1], RequestParams(stop_token_ids=[9]))
    batch = book.batch([row])
    if ends_by == "abort":
        book.abort(row)
    step(book, batch, [9])
    assert have(book, row, finish_reason=FinishReason.ABORT if ends_by == "abort" else FinishReason.STOP)
    ended = {name: value for name, value in columns(book, row).items() if name != "generation"}
    book.poll_outputs()
    book.preempt(row)
    row = book.resume(row, num_computed_tokens=0)
    row = book.rewind(row, 0)
    book.preempt(row, drop_in_flight=True)
    book.abort(row)
    step(book, [row], [5])
    assert have(book, row, **ended, generation=row.generation)
    assert delivered(book) == {}
    book.release(row)


# One row among many: a frame is written whole, from what changed since its memory was written last.

EVENTS: dict[str, tuple[Callable[[Book, Row], Any], dict[str, int]]] = {
    "nothing": (lambda book, row: None, {}),
    "a step": (lambda book, row: step(book, [row], [6]), {"num_tokens": 3, "last_token_id": 6}),
    "abort": (lambda book, row: book.abort(row), {"finish_reason": FinishReason.ABORT}),
    "preempt": (lambda book, row: book.preempt(row), {"num_computed_tokens": 0}),
    "resume": (resumed, {"num_computed_tokens": 0}),
    "rewind": (lambda book, row: book.rewind(row, 1), {"num_computed_tokens": 1}),
    "release": (lambda book, row: book.release(row), {"num_tokens": 0, "num_prompt_tokens": 0, "stop_reason": 0}),
    "reuse": (
        MAKES_STALE["release and reuse"],
        {"num_tokens": 2, "num_prompt_tokens": 2, "num_output_tokens": 0, "last_token_id": 8},
    ),
}


@pytest.mark.parametrize("event", EVENTS)
def test_what_happens_to_one_row_of_many_shows_in_every_later_frame(make_book: MakeBook, event: str) -> None:
    book = make_book(max_num_reqs=100)
    rows = [book.admit(f"r{number}", [1]) for number in range(40)]
    step(book, rows, [5] * 40)
    row = rows[17]
    for _ in range(5):  # as many as there are frames, and more: none of them holds anything older
        step(book, [], [])
    before = {name: getattr(book.frame(), name).copy() for name in columns(book, row)}
    call, changes = EVENTS[event]
    result = call(book, row)
    row = result if isinstance(result, Row) else row
    for _ in range(5):
        step(book, [], [])
        assert have(book, row, generation=row.generation, **changes)
        for name, column in before.items():
            after = getattr(book.frame(), name)
            assert np.flatnonzero(after != column).tolist() in ([], [17]), name


# Release


def test_release_aborts_first_and_leaves_only_the_generation(book: Book) -> None:
    row = book.admit("a", list(range(1, 9)))
    step(book, [row], [5], drafts=[[6, 7]])
    book.release(row)
    came: dict[str, Delivered] = {}
    wait_until(lambda: any(request.finish_reason for request in came.update(delivered(book)) or came.values()), "ends")
    step(book, [], [])
    assert columns(book, row) == dict.fromkeys(columns(book, row), 0) | {"generation": row.generation}
    assert tokens(book, row) == []
    assert came["a"].finish_reason is FinishReason.ABORT
    assert delivered(book) == {}


def test_release_of_a_finished_request_delivers_nothing_more(book: Book) -> None:
    before = book.stats()
    row = book.admit("a", [1], RequestParams(max_tokens=1))
    step(book, [row], [5])
    assert delivered(book) == {"a": Delivered([5], FinishReason.LENGTH, None, 1)}
    book.release(row)
    step(book, [], [])
    assert delivered(book) == {}
    assert grown(book, before) == {
        "admitted_requests": 1, "released_requests": 1, "submitted_tokens": 1, "committed_tokens": 1,
        "finished_LENGTH": 1,
    }  # fmt: skip


def test_released_rows_are_counted_free_at_once(book: Book) -> None:
    rows = [book.admit(name, [1]) for name in "abc"]
    assert (book.stats().num_rows_held, book.stats().num_rows_free) == (3, 1)
    book.abort(rows[0])
    assert book.stats().num_rows_held == 3
    book.release(rows[0])
    assert (book.stats().num_rows_held, book.stats().num_rows_free) == (2, 2)
