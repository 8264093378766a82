"""The book in an event loop: waiting for steps, for room and for outputs, and what wakes the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import pytest

from asyncbook import AsyncbookError, Book, BookConfig, FinishReason, InFlightFull, NotApplied, RequestParams, Row
from asyncbook.ipc import wire
from asyncbook.outputs import StepOutputs
from tests.conftest import (
    KINDS,
    SMALL,
    TIMEOUT_S,
    MakeBook,
    ids_of,
    in_flight,
    open_book,
    step,
    stopped_sidecar,
    tokens,
    wait_until,
)

DEEP: dict[str, Any] = {"max_in_flight": 24, "max_model_len": 64}


async def within_limit(awaitable: Any) -> Any:
    """The result, unless the book is broken and it never comes."""
    return await asyncio.wait_for(awaitable, TIMEOUT_S)


async def let_run() -> None:
    """Every task that can run does, until it waits for a descriptor."""
    for _ in range(5):
        await asyncio.sleep(0)


def submit(book: Book, row: Row, count: int, first_id: int = 10) -> list[int]:
    """Steps of one id each, not waited for."""
    batch = book.batch([row])
    return [book.submit(batch, ids_of([first_id + number])) for number in range(count)]


@pytest.fixture
def wake_ups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The step of every wake-up that the runner receives from now on."""
    steps: list[int] = []
    decode = wire.decode_event

    def decode_event(data: memoryview | bytes) -> wire.AnyEvent:
        event = decode(data)
        if isinstance(event, wire.Wake):
            steps.append(event.step)
        return event

    monkeypatch.setattr(wire, "decode_event", decode_event)
    return steps


@pytest.fixture
async def reader_calls(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., object]]:
    """Every time that the loop is woken for a descriptor from now on."""
    calls: list[Callable[..., object]] = []
    loop = asyncio.get_running_loop()
    add_reader = loop.add_reader

    def add(descriptor: Any, callback: Callable[..., object], *args: Any) -> None:
        def counted(*args: Any) -> None:
            calls.append(callback)
            callback(*args)

        add_reader(descriptor, counted, *args)

    monkeypatch.setattr(loop, "add_reader", add)
    return calls


# Steps


async def test_applied(book: Book) -> None:
    row = book.admit("a", [1])
    (number,) = submit(book, row, 1)
    await within_limit(book.applied(number))
    assert book.applied_step == number
    assert tokens(book, row) == [1, 10]
    for earlier in (number, number - 1, 0):
        await within_limit(book.applied(earlier))


async def test_applied_of_a_step_that_nobody_submitted(book: Book) -> None:
    with pytest.raises(NotApplied, match=f"step {book.submitted_step + 1}"):
        await within_limit(book.applied(book.submitted_step + 1))


async def test_many_steps_one_after_the_other(make_book: MakeBook) -> None:
    book = make_book(**DEEP)
    row = book.admit("a", [1])
    for number in range(50):
        (at,) = submit(book, row, 1, number)
        await within_limit(book.applied(at))
    assert tokens(book, row) == [1, *range(50)]


async def test_several_waiters_on_several_steps(make_book: MakeBook) -> None:
    book = make_book(**DEEP)
    row = book.admit("a", [1])
    ended: list[int] = []

    async def wait_for(number: int) -> None:
        await book.applied(number)
        assert book.applied_step >= number
        ended.append(number)

    with in_flight(book):
        numbers = submit(book, row, 20)
        waiters = [asyncio.ensure_future(wait_for(number)) for number in reversed(numbers) for _ in range(2)]
        await let_run()
        assert ended == [] or book.sidecar_pid is None
    await within_limit(asyncio.gather(*waiters))
    assert sorted(ended) == sorted(2 * numbers)
    assert tokens(book, row) == [1, *range(10, 30)]


@pytest.mark.parametrize("kind", ["sidecar", "ring"])  # nothing is ever in flight in an embedded one
async def test_a_waiter_that_is_cancelled_takes_nobody_along(make_book: MakeBook, kind: str) -> None:
    book = make_book(**DEEP)
    row = book.admit("a", [1])
    with stopped_sidecar(book):
        numbers = submit(book, row, 6)
        waiters = [asyncio.ensure_future(book.applied(number)) for number in numbers]
        await let_run()
        for waiter in waiters[::2]:
            waiter.cancel()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(book.applied(numbers[0]), 0.01)
        assert not any(waiter.done() and not waiter.cancelled() for waiter in waiters)
    ends = await within_limit(asyncio.gather(*waiters, return_exceptions=True))
    assert [type(end) for end in ends] == [asyncio.CancelledError, type(None)] * 3
    (number,) = submit(book, row, 1, 20)
    await within_limit(book.applied(number))
    assert tokens(book, row) == [1, *range(10, 16), 20]


async def test_room(book: Book, kind: str) -> None:
    row = book.admit("a", [1])
    await within_limit(book.room())
    if kind == "embedded":
        return
    with stopped_sidecar(book):
        submit(book, row, 2)
        waiters = [asyncio.ensure_future(book.room()) for _ in range(3)]
        await let_run()
        assert not any(waiter.done() for waiter in waiters)
        with pytest.raises(InFlightFull):
            submit(book, row, 1)
    await within_limit(asyncio.gather(*waiters))
    (number,) = submit(book, row, 1, 12)
    await within_limit(book.applied(number))
    assert tokens(book, row) == [1, 10, 11, 12]


async def test_a_runner_that_waits_for_room_loses_nothing(make_book: MakeBook) -> None:
    book = make_book(max_model_len=256, vocab_size=1000)
    row = book.admit("a", [1])
    batch = book.batch([row])
    for token_id in range(200):
        await within_limit(book.room())
        number = book.submit(batch, ids_of([token_id]))
    await within_limit(book.applied(number))
    assert tokens(book, row) == [1, *range(200)]


# What wakes the loop


@pytest.mark.parametrize("kind", ["sidecar", "ring"])  # nothing is ever in flight in an embedded one
async def test_the_loop_is_woken_for_awaited_steps_only(
    make_book: MakeBook, kind: str, wake_ups: list[int], reader_calls: list[Callable[..., object]]
) -> None:
    book = make_book(**DEEP)
    row = book.admit("a", [1])
    with stopped_sidecar(book):
        numbers = submit(book, row, 20)
        waiters = [asyncio.ensure_future(book.applied(number)) for number in (numbers[19], numbers[9], numbers[9])]
        await let_run()
    await within_limit(asyncio.gather(*waiters))
    # One event for each awaited step at most; fewer where the loop saw the step before it was told. A descriptor of
    # zmq may be readable once more than there are messages, but not once a step.
    assert 1 <= len(wake_ups) <= 2
    assert min(wake_ups) >= numbers[9]
    assert len(reader_calls) <= 8


@pytest.mark.parametrize("kind", ["sidecar", "ring"])  # nothing is ever in flight in an embedded one
async def test_steps_that_nobody_awaits_wake_nobody(make_book: MakeBook, kind: str, wake_ups: list[int]) -> None:
    book = make_book(**DEEP)
    row = book.admit("a", [1])
    with stopped_sidecar(book):
        numbers = submit(book, row, 20)
        waiter = asyncio.ensure_future(book.applied(numbers[9]))
        await let_run()
        waiter.cancel()  # nobody any more
        await asyncio.gather(waiter, return_exceptions=True)
    wait_until(lambda: book.applied_step == numbers[-1], "all steps are applied")
    (number,) = submit(book, row, 1)
    await within_limit(book.applied(number))  # receives what has come until now
    assert min(wake_ups, default=number) >= number


# Outputs


async def collect(book: Book, requests: dict[str, list[int]], ends: dict[str, FinishReason]) -> None:
    """Reads outputs until the book is closed."""
    async for outputs in book.outputs():
        for delta in outputs:
            requests.setdefault(delta.request_id, []).extend(delta.token_ids.tolist())
            if delta.finish_reason:
                ends[delta.request_id] = delta.finish_reason


@pytest.mark.parametrize("kind", ["embedded", "sidecar"])
async def test_outputs_come_as_they_are_delivered_until_the_book_is_closed(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    requests: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    reader = asyncio.ensure_future(collect(book, requests, ends))
    await let_run()
    assert not reader.done()
    rows = [book.admit(name, [1], RequestParams(max_tokens=4)) for name in "ab"]
    batch = book.batch(rows)
    for number in range(4):
        await within_limit(book.room())
        book.submit(batch, ids_of([10 + number, 20 + number]))
    async with asyncio.timeout(TIMEOUT_S):
        while len(ends) < 2:
            await asyncio.sleep(0)
    assert requests == {"a": [10, 11, 12, 13], "b": [20, 21, 22, 23]}
    assert ends == dict.fromkeys("ab", FinishReason.LENGTH)
    await book.aclose()
    await within_limit(reader)


async def test_an_abort_reaches_a_waiting_reader_without_a_step(book: Book) -> None:
    row = book.admit("a", [1])
    async with aclosing(_opened(book.outputs())) as outputs:
        waiting = asyncio.ensure_future(anext(outputs))
        await let_run()
        assert not waiting.done()
        book.abort(row)
        delivery = await within_limit(waiting)
    assert [(delta.request_id, delta.finish_reason) for delta in delivery] == [("a", FinishReason.ABORT)]


async def test_readers_that_stop_and_start_miss_nothing(book: Book) -> None:
    row = book.admit("a", [1])
    came: list[int] = []
    for turn in range(4):
        (number,) = submit(book, row, 1, 10 + turn)
        if turn % 2:
            await within_limit(book.applied(number))
            came += [token_id for outputs in book.poll_outputs() for token_id in outputs.token_ids.tolist()]
            continue
        async with aclosing(_opened(book.outputs())) as outputs:
            came += (await within_limit(anext(outputs))).token_ids.tolist()
            waiting = asyncio.ensure_future(anext(outputs))
            await let_run()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
    assert came == [10, 11, 12, 13]


def _opened(outputs: AsyncIterator[StepOutputs]) -> Any:
    return outputs


async def test_a_reader_that_falls_behind_gets_everything_in_order(make_book: MakeBook) -> None:
    book = make_book(max_model_len=2048, vocab_size=5000, max_in_flight=24)
    row = book.admit("a", [1])
    batch = book.batch([row])
    for token_id in range(2000):
        await within_limit(book.room())
        number = book.submit(batch, ids_of([token_id]))
    await within_limit(book.applied(number))
    came: list[int] = []
    async with aclosing(_opened(book.outputs())) as outputs:
        while len(came) < 2000:
            came += (await within_limit(anext(outputs))).token_ids.tolist()
    assert came == list(range(2000))
    assert book.stats().outputs_dropped_requests == 0


# Ends


@pytest.mark.parametrize("kind", ["embedded", "sidecar"])
async def test_aclose_ends_every_wait(make_book: MakeBook, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncbook.process.STOP_TIMEOUT_S", 0.1)  # the sidecar of this test cannot end by itself
    book = make_book(fresh=True)
    row = book.admit("a", [1])
    with in_flight(book) if kind == "embedded" else _stopped_until_killed(book):
        numbers = submit(book, row, 2)
        reader = asyncio.ensure_future(collect(book, {}, {}))
        waiter = asyncio.ensure_future(book.applied(numbers[1]))
        await let_run()
        await book.aclose()
        await book.aclose()
        await within_limit(reader)
        if kind == "embedded":
            await within_limit(waiter)
        else:
            with pytest.raises(AsyncbookError, match="closed"):
                await within_limit(waiter)


@contextmanager
def _stopped_until_killed(book: Book) -> Iterator[None]:
    with suppress(ProcessLookupError), stopped_sidecar(book):
        yield


@pytest.mark.parametrize("kind", ["embedded", "sidecar"])
async def test_a_book_is_an_async_context(kind: str) -> None:
    async with open_book(kind, BookConfig(**(SMALL | KINDS[kind]))) as book:
        row = book.admit("a", [1])
        (number,) = submit(book, row, 1)
        await within_limit(book.applied(number))
        assert tokens(book, row) == [1, 10]
    with pytest.raises(AsyncbookError, match="closed"):
        book.admit("b", [1])


def test_one_book_in_two_event_loops(book: Book, kind: str) -> None:
    row = book.admit("a", [1])
    came: list[int] = []

    async def run(first_id: int) -> None:
        numbers = submit(book, row, 2, first_id)
        await within_limit(book.applied(numbers[0]))
        async with aclosing(_opened(book.outputs())) as outputs:
            while len(came) < first_id - 8:
                came.extend((await within_limit(anext(outputs))).token_ids.tolist())
        asyncio.ensure_future(collect(book, {}, {}))  # noqa: RUF006  cancelled with its loop, while it waits
        await within_limit(book.applied(numbers[1]))
        await let_run()

    asyncio.run(run(10))
    asyncio.run(run(12))
    step(book, [row], [14])
    assert tokens(book, row) == [1, 10, 11, 12, 13, 14]
    assert came == [10, 11, 12, 13]
    assert [outputs.token_ids.tolist() for outputs in book.poll_outputs()] == [[14]]
