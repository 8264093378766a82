"""What a book shows: frames, tokens, statistics, and the end of the book. On every kind of book."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncbook import (
    AsyncbookError,
    Book,
    ContractError,
    FinishReason,
    FrameExpired,
    NotApplied,
    RequestParams,
    Row,
    StaleRow,
)
from asyncbook.ipc.layout import COLUMN_DTYPES
from tests.conftest import (
    TIMEOUT_S,
    Delivered,
    MakeBook,
    columns,
    delivered,
    ids_of,
    in_flight,
    refused,
    step,
    tables,
    tokens,
)

# A fresh sidecar takes its time, and the transport has no part in what these tests look at.
ONE_TRANSPORT = pytest.mark.parametrize("kind", ["embedded", "sidecar"])
DTYPES = dict.fromkeys(COLUMN_DTYPES, np.int32) | {"generation": np.uint32, "finish_reason": np.uint8}


# Frames


def test_a_frame_has_the_columns_of_the_contract(book: Book) -> None:
    frame = book.frame()
    assert len(DTYPES) == 10
    for name, dtype in DTYPES.items():
        column = getattr(frame, name)
        assert (column.shape, column.dtype) == ((4,), dtype), name
    assert frame.step == book.applied_step


@ONE_TRANSPORT
def test_frame_zero_is_the_empty_book(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    assert book.applied_step == book.frame().step == 0
    assert not any(getattr(book.frame(0), name).any() for name in COLUMN_DTYPES)
    book.wait_applied(0)
    assert step(book, [], []) == 1


def test_frames_and_tables_are_read_only(book: Book) -> None:
    row = book.admit("a", [1])
    step(book, [row], [5])
    frame = book.frame()
    arrays = [getattr(frame, name) for name in COLUMN_DTYPES]
    arrays += [book.token_ids(row), book.output_token_ids(row), *tables(book)]
    for array in arrays:
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    for name in COLUMN_DTYPES:
        with pytest.raises(AttributeError):
            setattr(frame, name, None)


def test_tokens_are_views_of_the_table(book: Book) -> None:
    row = book.admit("a", [1, 2])
    step(book, [row], [5])
    token_ids, outputs = book.token_ids(row), book.output_token_ids(row)
    assert token_ids.dtype == outputs.dtype == np.int32
    assert np.shares_memory(token_ids, outputs)
    assert np.shares_memory(book.token_ids(row), token_ids)
    step(book, [row], [6], drafts=[[7]])
    assert token_ids.tolist() == [1, 2, 5]  # the table only grows: what was read stays
    assert book.token_ids(row).tolist() == [1, 2, 5, 6]  # drafts are not committed
    assert tokens(book, row) == [1, 2, 5, 6, 7]


def test_a_frame_shows_its_own_step_while_later_ones_are_applied(book: Book) -> None:
    row = book.admit("a", [1])
    numbers = [step(book, [row], [10 + number]) for number in range(3)]
    frames = [book.frame(number) for number in numbers]
    step(book, [row], [13])
    for number, frame in enumerate(frames):
        with frame as inside:
            assert inside is frame
            assert frame.step == numbers[number]
            assert int(frame.last_token_id[row.index]) == 10 + number
            assert int(frame.num_tokens[row.index]) == 2 + number
    assert book.frame().step == numbers[-1] + 1


@pytest.mark.parametrize("max_in_flight", [1, 2, 5])
def test_a_frame_holds_for_max_in_flight_plus_one_later_steps(make_book: MakeBook, max_in_flight: int) -> None:
    book = make_book(max_in_flight=max_in_flight)
    row = book.admit("a", [1])
    number = step(book, [row], [7])
    frame = book.frame(number)
    with frame:
        for _ in range(max_in_flight + 1):
            step(book, [row], [8])
            frame.check()
            assert int(frame.last_token_id[row.index]) == 7
    entered = frame.__enter__()
    step(book, [row], [9])
    checks: list[Callable[[], Any]] = [
        frame.check,
        lambda: entered.__exit__(None, None, None),
        lambda: book.frame(number),
    ]
    for check in checks:
        with pytest.raises(FrameExpired) as caught:
            check()
        for fragment in (f"step {number}", f"step {number + max_in_flight + 2}", f"{max_in_flight + 1} later"):
            assert fragment in str(caught.value)
    with pytest.raises(FrameExpired), frame:
        pass


def test_an_error_inside_an_expired_frame_is_not_hidden(book: Book) -> None:
    frame = book.frame()

    def use() -> None:
        with frame:
            for _ in range(4):
                step(book, [], [])
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()


def test_frames_out_of_reach_are_refused(book: Book) -> None:
    now = step(book, [], [])
    for read in (book.frame, lambda number: book.wait_applied(number, 0)):
        with pytest.raises(NotApplied) as caught:
            read(now + 1)
        assert f"step {now + 1}" in str(caught.value)
        assert f"step {now}" in str(caught.value)
    for number in (now - 4, -1, -(2**40)):
        with pytest.raises(FrameExpired, match=f"step {number}"):
            book.frame(number)


def test_times_of_a_step(book: Book) -> None:
    first = step(book, [], [])
    second = step(book, [], [])
    early, late = book.frame(first), book.frame(second)
    assert 0 < early.apply_start_ns <= early.published_ns <= late.apply_start_ns <= late.published_ns
    assert late.apply_ns == late.published_ns - late.apply_start_ns
    assert "step" in repr(late)
    assert str(second) in repr(late)


# Statistics


def test_every_token_is_accounted_for(book: Book) -> None:
    start = book.stats()
    stopped = book.admit("stopped", [1], RequestParams(stop_token_ids=[9]))
    partial = book.admit("partial", [1, 2, 3])
    too_much = book.admit("too much", [1])
    gone = book.admit("gone", [1])
    rows = [stopped, partial, too_much, gone]
    first = book.batch(rows, num_scheduled_tokens=[1, 2, 5, 1])
    second = book.batch(rows, num_scheduled_tokens=[1, 1, 1, 1])
    book.release(gone)
    step(book, first, [[5, 9, 6], [5, 6, 7], [5, 6, -1], [5, -1, -1]])
    step(book, second, [[5, -1, -1], [7, 100, 8], [5, -1, -1], [5, 5, 5]])
    stats = book.stats()
    assert stats.submitted_tokens == stats.committed_tokens + sum(stats.dropped_tokens.values())
    assert set(stats.dropped_tokens) == {
        "stale", "finished", "preempted", "partial_prefill", "overscheduled", "invalid", "after_finish"
    }  # fmt: skip
    dropped = {name: count - start.dropped_tokens[name] for name, count in stats.dropped_tokens.items()}
    assert dropped == {
        "stale": 4, "finished": 2, "preempted": 0, "partial_prefill": 3, "overscheduled": 2, "invalid": 1,
        "after_finish": 2,
    }  # fmt: skip
    assert stats.committed_tokens - start.committed_tokens == 3
    assert stats.submitted_tokens - start.submitted_tokens == 17


def test_finished_requests_are_counted_by_reason(book: Book) -> None:
    start = book.stats().finished_requests
    assert set(start) == set(FinishReason) - {FinishReason.NONE}
    rows = [
        book.admit("stop", [1], RequestParams(eos_token_id=9)),
        book.admit("length", [1], RequestParams(max_tokens=1)),
        book.admit("abort", [1]),
        book.admit("error", [1]),
    ]
    book.abort(rows[2])
    step(book, rows, [9, 9, 9, 100])
    ends = book.stats().finished_requests
    assert {reason: ends[reason] - start[reason] for reason in ends} == dict.fromkeys(start, 1)


@ONE_TRANSPORT
def test_steps_messages_and_times_are_counted(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    empty = book.stats()
    assert (empty.submitted_steps, empty.applied_steps, empty.messages) == (0, 0, 0)
    assert (empty.num_rows_held, empty.num_rows_free) == (0, 4)
    assert empty.submit_us.count == empty.apply_us.count == 0
    assert math.isnan(empty.submit_us.us_p50)
    row = book.admit("a", [1])
    batch = book.batch([row])
    for _ in range(3):
        step(book, batch, [5])
    stats = book.stats()
    assert (stats.submitted_steps, stats.applied_steps) == (3, 3) == (book.submitted_step, book.applied_step)
    assert stats.messages == 1 + 1 + 3  # the description of a batch that stays the same crosses once
    assert (stats.num_rows_held, stats.admitted_requests, stats.released_requests) == (1, 1, 0)
    for times in (stats.submit_us, stats.queue_us, stats.apply_us):
        assert times.count == 3
        assert 0 < times.us_p50 <= times.us_p90 <= times.us_p99 <= times.us_max
    assert stats.read_us.count == 0  # nobody took a frame
    book.frame()
    book.frame()
    assert book.stats().read_us.count == 1 == book.stats().read_us.since(stats.read_us).count
    assert (stats.lag_steps.count, stats.lag_steps.steps_p50, stats.lag_steps.steps_max) == (3, 1, 1)
    assert stats.num_restarts == 0
    assert empty.submit_us.count == 0  # a snapshot stays as it is
    assert empty.messages == 0


def test_steps_in_flight_are_counted_where_a_book_can_lag(make_book: MakeBook, kind: str) -> None:
    """Two steps that a stopped sidecar finds when it goes on: the first has two in flight, the second one."""
    book = make_book(fresh=True)
    batch = book.batch([book.admit("a", [1])])
    step(book, batch, [5])
    with in_flight(book):
        for _ in range(2):
            last = book.submit(batch, np.array([5], np.int32))
    book.wait_applied(last, TIMEOUT_S)
    lags = book.stats().lag_steps
    assert lags.count == 3
    assert lags.steps_max == (1 if kind == "embedded" else 2)
    assert math.isnan(lags.since(lags).steps_p99)


@ONE_TRANSPORT
def test_spec_decode_stats(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    assert book.spec_decode_stats().mean_acceptance_length == 1.0
    assert book.spec_decode_stats().acceptance_rate_per_pos == [0.0] * 5
    row, other = book.admit("a", [1]), book.admit("b", [1])
    step(book, [row, other], [5, 5])
    step(book, [row, other], [[6, 7, 8], [6, -1, -1]], d=[3, 2])
    stats = book.spec_decode_stats()
    assert (stats.num_drafts, stats.num_draft_tokens) == (2, 5)
    assert (stats.num_accepted_tokens, stats.num_emitted_tokens) == (2, 4)
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0, 0, 0]
    assert stats.mean_acceptance_length == 2.0
    assert stats.acceptance_rate_per_pos == [0.5, 0.5, 0.0, 0.0, 0.0]
    mine = book.spec_decode_stats(row)
    assert (mine.num_drafts, mine.num_draft_tokens, mine.num_accepted_tokens, mine.num_emitted_tokens) == (1, 3, 2, 3)
    assert book.spec_decode_stats(other).num_accepted_tokens_per_pos == [0] * 5
    book.release(row)
    with refused(book, StaleRow, f"row {row.index}"):
        book.spec_decode_stats(row)
    reused = book.admit("c", [1])
    with pytest.raises(NotApplied, match="'c'"):
        book.spec_decode_stats(reused)
    step(book, [reused], [5])
    assert book.spec_decode_stats(reused).num_drafts == 0
    assert book.spec_decode_stats().num_drafts == 2


# Outputs


def test_outputs_are_columns(book: Book) -> None:
    rows = [book.admit(name, [1], RequestParams(stop_token_ids=[9])) for name in "abc"]
    number = step(book, [rows[2], rows[0], rows[1]], [[5, 6], [-1, -1], [7, 9]])
    (outputs,) = book.poll_outputs()
    assert outputs.step == number
    assert outputs.request_ids == ["c", "b"]  # the order of the batch; who got nothing is left out
    assert outputs.offsets.dtype == outputs.token_ids.dtype == np.int32
    assert outputs.finish_reasons.dtype == np.uint8
    assert outputs.offsets.tolist() == [0, 2, 4]
    assert outputs.token_ids.tolist() == [5, 6, 7, 9]
    assert outputs.finish_reasons.tolist() == [FinishReason.NONE, FinishReason.STOP]
    assert outputs.stop_reasons.tolist() == [-1, 9]
    assert outputs.logprobs is None
    assert outputs.texts is None
    assert len(outputs) == 2
    first, second = outputs
    assert (first.request_id, first.token_ids.tolist(), *first[2:4]) == ("c", [5, 6], FinishReason.NONE, None)
    assert (second.request_id, second.token_ids.tolist(), *second[2:4]) == ("b", [7, 9], FinishReason.STOP, 9)
    assert book.poll_outputs() == []


def test_one_delivery_a_step_and_none_without_news(book: Book) -> None:
    row = book.admit("a", [1])
    numbers = [step(book, [row], [5]), step(book, [row], [[-1]]), step(book, [], []), step(book, [row], [6])]
    assert [outputs.step for outputs in book.poll_outputs()] == [numbers[0], numbers[3]]


def test_outputs_stay_when_their_row_is_reused(book: Book) -> None:
    for number in range(20):  # more requests than numbers of requests that a small book keeps at once
        row = book.admit(f"r{number}", [1], RequestParams(max_tokens=2))
        step(book, [row], [[number, number + 1]])
        book.release(row)
    assert delivered(book) == {
        f"r{number}": Delivered([number, number + 1], FinishReason.LENGTH, None, 1) for number in range(20)
    }


# The end of a book


@ONE_TRANSPORT
def test_views_stay_valid_after_close(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    row = book.admit("a", [1, 2])
    step(book, [row], [5])
    frame, token_ids, outputs = book.frame(), book.token_ids(row), book.output_token_ids(row)
    shown = columns(book, row)
    book.close()
    assert {name: int(getattr(frame, name)[row.index]) for name in shown} == shown
    assert (token_ids.tolist(), outputs.tolist()) == ([1, 2, 5], [5])
    assert book.applied_step == 1
    assert book.stats().committed_tokens == 1


@ONE_TRANSPORT
def test_close_is_idempotent_and_ends_every_call_that_sends(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    row = book.admit("a", [1, 2])
    batch = book.batch([row])
    step(book, batch, [5])
    book.close()
    book.close()
    calls: list[Callable[[], Any]] = [
        lambda: book.admit("b", [1]),
        lambda: book.submit(batch, ids_of([5])),
        lambda: book.abort(row),
        lambda: book.preempt(row),
        lambda: book.rewind(row, 0),
        lambda: book.release(row),
    ]
    for call in calls:
        with pytest.raises(AsyncbookError, match="closed"):
            call()
    book.wait_applied(1)
    book.wait_room(0)


@ONE_TRANSPORT
def test_a_book_is_a_context(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    with book as inside:
        assert inside is book
    with pytest.raises(AsyncbookError, match="closed"):
        book.admit("a", [1])


def test_process_id_of_the_sidecar(book: Book, kind: str) -> None:
    pid = book.sidecar_pid
    if kind == "embedded":
        assert pid is None
    else:
        assert pid is not None
        assert pid != os.getpid()
        os.kill(pid, 0)


def test_errors_have_the_families_of_the_contract() -> None:
    import asyncbook as package

    contract = (
        "BookFull", "DuplicateRequest", "StaleRow", "InvalidBatch", "InvalidToken", "InvalidRequest", "PromptTooLong",
        "InFlightFull", "FrameExpired", "NotApplied",
    )  # fmt: skip
    peer = ("SidecarDied", "SidecarTimeout", "HandshakeFailed", "LayoutMismatch")
    for names, family in ((contract, ContractError), (peer, package.PeerError)):
        assert issubclass(family, AsyncbookError)
        assert all(issubclass(getattr(package, name), family) for name in names)
    assert not issubclass(package.PeerError, ContractError)
    assert [(reason.name, reason.value) for reason in FinishReason] == [
        ("NONE", 0), ("STOP", 1), ("LENGTH", 2), ("ABORT", 3), ("ERROR", 4)
    ]  # fmt: skip


def test_waits_end_at_once_for_what_is_applied(book: Book) -> None:
    number = step(book, [], [])
    for earlier in (number, number - 1, 0):
        book.wait_applied(earlier, 0)
    book.wait_room(0)
    assert Row(0, 1) == (0, 1)
    book.wait_applied(number, TIMEOUT_S)
