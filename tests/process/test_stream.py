"""`stream`: the outputs of one request, on every kind of book, in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from asyncbook import Book, FinishReason, InvalidRequest, OutputsLost, RequestOutput, RequestParams, Row, streams
from tests.conftest import TIMEOUT_S, delivered, step


async def read(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    """All of it."""
    return [piece async for piece in stream]


async def within_limit(task: asyncio.Task[list[RequestOutput]]) -> list[RequestOutput]:
    """The pieces of a task that reads a stream."""
    return await asyncio.wait_for(task, TIMEOUT_S)


async def steps(book: Book, rows: list[Row], *ids: list[int]) -> None:
    """Steps with a turn of the event loop behind each."""
    batch = book.batch(rows)
    for sampled in ids:
        await book.room()
        await book.applied(book.submit(batch, np.array(sampled, np.int32)))
        book._await_flushed()
        await asyncio.sleep(0)


def ids_of_pieces(pieces: list[RequestOutput]) -> list[int]:
    return [token_id for piece in pieces for token_id in piece.token_ids.tolist()]


async def test_each_stream_has_its_own_request(book: Book) -> None:
    rows = [book.admit(name, [1], RequestParams(max_tokens=3)) for name in ("a", "b")]
    tasks = [asyncio.ensure_future(read(book.stream(name))) for name in ("a", "b")]
    await steps(book, rows, [10, 20], [11, 21], [12, 22])
    a, b = [await within_limit(task) for task in tasks]
    assert (ids_of_pieces(a), ids_of_pieces(b)) == ([10, 11, 12], [20, 21, 22])
    for pieces in (a, b):
        assert [piece.is_finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert pieces[-1].finish_reason is FinishReason.LENGTH
        assert pieces[-1].stop_reason is None
        assert pieces[-1].text is None
    assert book.poll_outputs() == []


async def test_others_go_to_whoever_reads_everything(book: Book) -> None:
    rows = [book.admit(name, [1]) for name in ("a", "b", "c")]
    stream = book.stream("b")
    await steps(book, rows, [10, 20, 30], [11, 21, 31])
    others = delivered(book)
    assert {name: request.token_ids for name, request in others.items()} == {"a": [10, 11], "c": [30, 31]}
    assert ids_of_pieces([await anext(stream)]) == [20, 21], "a slow reader gets one bigger piece"


async def test_what_was_not_read_yet_belongs_to_the_stream(book: Book) -> None:
    row = book.admit("a", [1], RequestParams(max_tokens=2))
    other = book.admit("b", [1])
    outputs = book.outputs()
    await steps(book, [row, other], [10, 20])
    stream = book.stream("a")
    await steps(book, [row, other], [11, 21])
    assert ids_of_pieces(await read(stream)) == [10, 11]
    assert (await anext(outputs)).request_ids == ["b"]


async def test_the_streams_and_the_readers_of_a_book_wake_each_other(book: Book) -> None:
    row = book.admit("a", [1], RequestParams(max_tokens=2))
    task = asyncio.ensure_future(read(book.stream("a")))
    await asyncio.sleep(0)
    for token_id in (10, 11):
        step(book, [row], [token_id])
        assert book.poll_outputs() == []
    assert ids_of_pieces(await within_limit(task)) == [10, 11]


@pytest.mark.parametrize("aborts", [False, True])
async def test_a_reader_that_goes_may_take_the_request_along(book: Book, aborts: bool) -> None:
    row = book.admit("a", [1])
    task = asyncio.ensure_future(read(book.stream("a", abort_on_cancel=aborts)))
    await steps(book, [row], [10])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await steps(book, [], [])
    frame = book.frame()
    assert frame.finish_reason[row.index] == (FinishReason.ABORT if aborts else FinishReason.NONE)
    end = delivered(book).get("a")
    assert (end is not None and end.finish_reason is FinishReason.ABORT) == aborts


async def test_a_reader_that_goes_late_does_not_end_the_next_of_the_id(book: Book) -> None:
    book.release(book.admit("a", [1]))
    first = book.admit("a", [1])
    stream = book.stream("a", abort_on_cancel=True)
    await steps(book, [first], [10])
    assert ids_of_pieces([await anext(stream)]) == [10]
    book.release(first)
    second = book.admit("a", [1])
    await stream.aclose()  # type: ignore[attr-defined]
    await steps(book, [second], [20])
    assert book.frame().finish_reason[second.index] == FinishReason.NONE


async def test_a_stream_follows_a_row_that_is_renamed(book: Book) -> None:
    row = book.admit("a", [1])
    stream = book.stream("a", abort_on_cancel=True)
    await steps(book, [row], [10])
    book.preempt(row)
    row = book.resume(row)
    await steps(book, [row], [11])
    assert ids_of_pieces([await anext(stream)]) == [10, 11]
    await stream.aclose()  # type: ignore[attr-defined]
    await steps(book, [], [])
    assert book.frame().finish_reason[row.index] == FinishReason.ABORT


async def test_requests_that_have_no_stream_to_give(book: Book) -> None:
    row = book.admit("a", [1])
    stream = book.stream("a")
    with pytest.raises(InvalidRequest, match="'a' has a stream"):
        book.stream("a")
    await stream.aclose()
    for request_id in ("b", "gone"):
        with pytest.raises(InvalidRequest, match=f"'{request_id}' is not live"):
            book.stream(request_id)
    book.abort(row)
    book.release(row)


async def test_a_stream_that_was_given_up_unread_is_no_stream_any_more(book: Book) -> None:
    row = book.admit("a", [1])
    closed = book.stream("a")
    await closed.aclose()
    stream = book.stream("a", abort_on_cancel=True)
    del stream  # never read from: it goes, and the request with it
    await steps(book, [row], [10])
    assert delivered(book)["a"].finish_reason is FinishReason.ABORT


async def test_what_belongs_to_no_stream_is_bounded(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNCLAIMED_BYTES", 2000)
    rows = [book.admit(name, [1], RequestParams(max_tokens=100)) for name in ("a", "b")]
    stream = book.stream("a")
    for number in range(13):
        await steps(book, rows, [number, 20 + number])
        assert ids_of_pieces([await anext(stream)]) == [number]
    monkeypatch.setattr(streams, "MAX_UNCLAIMED_BYTES", 200)
    await steps(book, rows, [13, 33])
    assert ids_of_pieces([await anext(stream)]) == [13]
    with pytest.raises(OutputsLost, match="as well; open its stream before its first output"):
        book.stream("b")
    with pytest.raises(OutputsLost, match="the next call gives what is left"):
        book.poll_outputs()
    left = delivered(book)["b"].token_ids
    assert left == list(range(34 - len(left), 34)), "what is left is the newest"
    await steps(book, rows, [14, 34])
    assert delivered(book)["b"].token_ids == [34]
