"""Outputs in another process: all of them, in order, whatever becomes of the sidecar, the runner or other readers."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncbook
from asyncbook import (
    Batch,
    Book,
    BookClosed,
    BookConfig,
    FinishReason,
    HandshakeFailed,
    InvalidRequest,
    OutputsLost,
    RequestParams,
    RunnerDied,
    Subscription,
)
from asyncbook.ipc import wire
from asyncbook.ipc.layout import MAX_SUBSCRIBERS, SubscriberWord
from asyncbook.ipc.runtime_dir import start_time
from asyncbook.names import RequestNames
from tests.conftest import SMALL, TIMEOUT_S, step, stopped_sidecar, wait_until
from tests.process.kills import PROLOGUE, ROOT
from tests.property.compare import plain
from tests.property.operations import CONFIGS, drive
from tests.property.test_slow_reader import Events, SlowTrio, add_events

READER = """
import json, sys
import asyncbook
with asyncbook.subscribe(sys.argv[1]) as outputs:
    print("ready", flush=True)
    try:
        while outputs.wait_outputs(60):
            for new in outputs.poll_outputs():
                for delta in new:
                    line = [delta.request_id, delta.token_ids.tolist(), int(delta.finish_reason)]
                    print(json.dumps(line), flush=True)
    except asyncbook.AsyncbookError as error:
        print(json.dumps(type(error).__name__), flush=True)
"""


@pytest.fixture
def transport() -> str:
    """How steps go to the sidecar. Outputs take the same way whatever it is."""
    return "ring"


@pytest.fixture
def book(transport: str) -> Iterator[Book]:
    """A book of its own: who has subscribed to it once stays for a while."""
    with asyncbook.spawn(BookConfig(**(SMALL | {"max_model_len": 64, "transport": transport}))) as book:
        yield book


class Reader:
    """A subscriber in a process of its own."""

    def __init__(self, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER, address], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self.line() == "ready\n"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def until(self, request_id: str) -> dict[str, list[int]]:
        """What came of each request, until this one has ended."""
        came: dict[str, list[int]] = defaultdict(list)
        while True:
            name, token_ids, finish_reason = json.loads(self.line())
            came[name] += token_ids
            if name == request_id and finish_reason:
                return came

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def reader(book: Book) -> Iterator[Reader]:
    """Ends with the block."""
    reader = Reader(book.address)
    try:
        yield reader
    finally:
        reader.end()


def run(book: Book, request_id: str, ids: list[int]) -> None:
    """A request from its admission to its release."""
    row = book.admit(request_id, [1, 2], RequestParams(max_tokens=len(ids)))
    for token_id in ids:
        book.wait_room(TIMEOUT_S)
        book.submit(book.batch([row]), np.array([token_id], np.int32))
    book.wait_applied(book.submitted_step, TIMEOUT_S)
    book.release(row)
    book.wait_room(TIMEOUT_S)


def collect(subscription: Subscription, request_id: str) -> list[int]:
    """Ids of a request, until it has ended; it is the only one."""
    ids: list[int] = []
    while subscription.wait_outputs(TIMEOUT_S):
        for outputs in subscription.poll_outputs():
            for delta in outputs:
                assert delta.request_id == request_id
                ids += delta.token_ids.tolist()
                if delta.finish_reason:
                    return ids
    raise AssertionError("it never ended")


def subscribers(book: Book) -> list[int]:
    """Process ids that the sidecar has noted."""
    table = book._layout.subscribers.view(book._segment.readable())
    return [int(pid) for pid in table[:, SubscriberWord.PID] if pid]


class HeardTrio(SlowTrio):
    """Outputs are compared in the end: those of the books, and those that a subscriber got."""

    def __init__(self, config: BookConfig) -> None:
        super().__init__(config)
        self.subscription = asyncbook.subscribe(self.sidecar.address)
        self.expected: Events = defaultdict(list)
        self.heard: Events = defaultdict(list)

    def listen(self) -> None:
        add_events(self.heard, map(plain, self.subscription.poll_outputs()))

    def take_all(self) -> int:
        add_events(self.expected, self._awaited)
        num_pieces = super().take_all()
        wait_until(lambda: self.listen() or self.heard == self.expected, "a subscriber gets everything")
        return num_pieces

    def close(self) -> None:
        self.subscription.close()
        super().close()


@pytest.mark.parametrize("name", ["many in flight", "ring", "no drafts"])
def test_random_calls(name: str) -> None:
    trio = HeardTrio(CONFIGS[name])
    try:
        for seed in range(3):
            drive(trio, seed, 400)
            trio.take_all()
    finally:
        trio.close()


@pytest.mark.parametrize("transport", ["zmq", "ring"])
def test_another_process_gets_everything_until_the_book_is_closed(book: Book) -> None:
    with reader(book) as first, reader(book) as second:
        wait_until(lambda: len(subscribers(book)) == 2, "both are known")
        run(book, "a", [10, 11, 12])
        run(book, "b", [20])
        book.close()
        for each in (first, second):
            assert each.until("b") == {"a": [10, 11, 12], "b": [20]}
            assert each.line() == '"BookClosed"\n'


def test_the_runner_reads_as_if_there_were_no_subscriber(book: Book) -> None:
    with asyncbook.subscribe(book.address) as subscription:
        run(book, "a", [10, 11])
        own = [token_id for outputs in book.poll_outputs() for token_id in outputs.token_ids.tolist()]
        assert own == [10, 11] == collect(subscription, "a")


def test_one_that_comes_late_knows_the_requests_and_gets_what_is_new(book: Book) -> None:
    row, other = book.admit("a", [1], RequestParams(max_tokens=3)), book.admit("b", [1])
    step(book, [row, other], [10, 20])
    with asyncbook.subscribe(book.address, prefix="a") as subscription:
        assert subscription.poll_outputs() == []
        step(book, [row, other], [11, 21])
        step(book, [row, other], [12, 22])
        assert collect(subscription, "a") == [11, 12]


def test_names_alone_are_nothing_to_poll(book: Book) -> None:
    with (
        asyncbook.subscribe(book.address) as subscription,
        asyncbook.subscribe(book.address, prefix="b") as other,
    ):
        row = book.admit("a", [1])
        wait_until(lambda: subscription._log.has_next, "the request's name is written")
        assert not subscription.wait_outputs(0.0)
        step(book, [row], [10])
        assert subscription.wait_outputs(TIMEOUT_S)
        assert subscription.wait_outputs(0.0)  # as often as one asks
        assert [outputs.token_ids.tolist() for outputs in subscription.poll_outputs()] == [[10]]
        assert not subscription.wait_outputs(0.0)
        assert not other.wait_outputs(0.0)


def test_shares(book: Book) -> None:
    with (
        asyncbook.subscribe(book.address, prefix="one/") as one,
        asyncbook.subscribe(book.address, prefix="two/") as two,
    ):
        rows = [book.admit(name, [1], RequestParams(max_tokens=2)) for name in ("one/a", "two/a", "three")]
        for number in range(2):
            step(book, rows, [number, 10 + number, 20 + number])
        assert collect(one, "one/a") == [0, 1]
        assert collect(two, "two/a") == [10, 11]
        with pytest.raises(InvalidRequest, match=r"'three' is another's"):
            one.stream("three")


def test_what_comes_of_a_request_that_is_over_is_passed_over(book: Book) -> None:
    with asyncbook.subscribe(book.address) as subscription:
        rows = [book.admit(name, [1], RequestParams(max_tokens=2)) for name in ("a", "b")]
        step(book, rows, [10, 20])
        assert subscription.wait_outputs(TIMEOUT_S)
        (outputs,) = subscription.poll_outputs()
        subscription._names.forget(int(outputs.request_nos[outputs.request_ids.index("b")]))
        step(book, rows, [11, 21])
        assert collect(subscription, "a") == [11]


def test_a_reader_that_was_killed_is_forgotten(book: Book) -> None:
    with reader(book) as dies, asyncbook.subscribe(book.address) as subscription:
        wait_until(lambda: len(subscribers(book)) == 2, "both are known")
        run(book, "a", [10])
        dies.end()
        run(book, "b", [11])
        # Whoever comes next is a reason to look who is still there.
        with asyncbook.subscribe(book.address):
            assert dies.process.pid not in subscribers(book)
        run(book, "c", [12])
        ids = []
        while len(ids) < 3:
            assert subscription.wait_outputs(TIMEOUT_S)
            ids += [new for outputs in subscription.poll_outputs() for new in outputs.token_ids.tolist()]
        assert ids == [10, 11, 12]


def test_a_reader_that_hangs_harms_nobody_and_misses_nothing(book: Book) -> None:
    with reader(book) as hangs, asyncbook.subscribe(book.address) as subscription:
        hangs.process.send_signal(signal.SIGSTOP)
        for number in range(300):
            run(book, f"{number}", [number % 100])
            assert collect(subscription, f"{number}") == [number % 100]
            book.poll_outputs()
        hangs.process.send_signal(signal.SIGCONT)
        assert hangs.until("299") == {f"{number}": [number % 100] for number in range(300)}


@pytest.mark.parametrize("transport", ["zmq", "ring"])
def test_a_sidecar_that_dies_goes_unnoticed(book: Book) -> None:
    with reader(book) as other, asyncbook.subscribe(book.address) as subscription:
        for number in range(3):
            row = book.admit(f"{number}", [1], RequestParams(max_tokens=20))
            for token_id in range(20):
                if token_id == 10:
                    assert book.sidecar_pid is not None
                    os.kill(book.sidecar_pid, signal.SIGKILL)
                book.wait_room(TIMEOUT_S)
                book.submit(book.batch([row]), np.array([token_id], np.int32))
            book.release(row)
            assert collect(subscription, f"{number}") == list(range(20))
            # Deaths in quick succession end a book.
            book._supervisor._deaths.clear()  # type: ignore[attr-defined]
        assert other.until("2") == {f"{number}": list(range(20)) for number in range(3)}
        assert book.stats().num_restarts == 3


def test_a_runner_that_was_killed() -> None:
    program = PROLOGUE + (
        "book = spawn()\nprint(book.address, flush=True)\nsys.stdin.readline()\nrow = book.admit('a', [1, 2])\n"
        "book.wait_applied(book.submit(book.batch([row]), np.array([5], np.int32)))\nprint('done', flush=True)\n"
        "threading.Event().wait()"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert runner.stdout is not None
    assert runner.stdin is not None
    try:
        with asyncbook.subscribe(runner.stdout.readline().strip()) as subscription:
            runner.stdin.write("\n")
            runner.stdin.flush()
            assert runner.stdout.readline() == "done\n"
            runner.send_signal(signal.SIGKILL)
            runner.wait(TIMEOUT_S)
            (outputs,) = subscription.poll_outputs()
            assert outputs.token_ids.tolist() == [5]
            with pytest.raises(RunnerDied, match=f"process {runner.pid}"):
                subscription.wait_outputs(TIMEOUT_S)
            with pytest.raises(RunnerDied):
                subscription.poll_outputs()
    finally:
        runner.kill()
        runner.wait()
        runner.stdout.close()
        runner.stdin.close()


def test_a_book_that_is_being_closed_is_there_until_everything_is_delivered(book: Book) -> None:
    row = book.admit("a", [1], RequestParams(max_tokens=1))
    with asyncbook.subscribe(book.address) as subscription:
        closing = threading.Thread(target=book.close)
        with stopped_sidecar(book):
            book.submit(book.batch([row]), np.array([5], np.int32))
            closing.start()
            wait_until(lambda: book._is_closed, "the book is being closed")
            assert not subscription.wait_outputs(0.3), "nothing yet, and no end either"
        closing.join(TIMEOUT_S)
        assert collect(subscription, "a") == [5]
        with pytest.raises(BookClosed, match="has closed the book"):
            subscription.wait_outputs(TIMEOUT_S)


def test_a_subscription_that_ends(book: Book) -> None:
    subscription = asyncbook.subscribe(book.address)
    other = asyncbook.subscribe(book.address)
    assert len(subscribers(book)) == 2
    subscription.close()
    subscription.close()
    with pytest.raises(BookClosed, match="the subscription is closed"):
        subscription.wait_outputs()
    assert subscription.poll_outputs() == []
    wait_until(lambda: len(subscribers(book)) == 1, "it is forgotten")
    child = os.fork()
    if child == 0:  # what it inherits it must not end
        other._finalizer()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    run(book, "a", [1])
    assert collect(other, "a") == [1]
    del other  # dropped, not closed
    gc.collect()
    wait_until(lambda: not subscribers(book), "the dropped one is forgotten, too")


# Who reads too little


BIG: dict[str, Any] = {"max_num_reqs": 8192, "max_model_len": 2000, "vocab_size": 100}


def fill(book: Book, batch: Batch, num_steps: int) -> None:
    """160 KiB of outputs a step."""
    ids = np.full(len(batch.rows), 7, np.int32)
    for _ in range(num_steps):
        book.wait_room(TIMEOUT_S)
        book.submit(batch, ids)
    book.wait_applied(book.submitted_step, TIMEOUT_S)


def everybody(book: Book) -> Batch:
    """A request in every row."""
    return book.batch([book.admit(f"{i}", [1]) for i in range(book.config.max_num_reqs)])


def test_a_reader_that_is_too_far_behind_is_told_so_and_may_begin_again() -> None:
    with asyncbook.spawn(BookConfig(**BIG, runner_reads_outputs=False)) as book:
        with asyncbook.subscribe(book.address) as subscription:
            fill(book, everybody(book), 500)
            assert subscription.lag_bytes > 1 << 26
            with pytest.raises(OutputsLost, match="read more often, or subscribe again"):
                subscription.poll_outputs()
            with pytest.raises(OutputsLost):
                subscription.poll_outputs()
        with asyncbook.subscribe(book.address) as subscription:
            step(book, [], [])
            assert subscription.poll_outputs() == []
        # Nobody listens any more: the memory goes back.
        region = book._layout.broadcast_log
        wait_until(lambda: not region.view(book._segment.readable()).any(), "the log's memory went back")


def test_a_runner_that_never_reads_does_not_hold_up_subscribers() -> None:
    with asyncbook.spawn(BookConfig(**BIG)) as book, asyncbook.subscribe(book.address) as subscription:
        num_ids, batch = 0, everybody(book)
        while book.submitted_step < 600:
            fill(book, batch, 60)
            expected = book.submitted_step * book.config.max_num_reqs
            while num_ids < expected:
                assert subscription.wait_outputs(TIMEOUT_S)
                num_ids += sum(outputs.token_ids.size for outputs in subscription.poll_outputs())
        with pytest.raises(OutputsLost, match=r"nobody had read any of them.*runner_reads_outputs=False"):
            book.poll_outputs()


def test_a_book_whose_outputs_are_for_subscribers_alone(book: Book) -> None:
    config = BookConfig(**SMALL, transport=book.config.transport, runner_reads_outputs=False)
    with pytest.raises(ValueError, match="embedded book has nobody else"):
        asyncbook.open(config)
    with asyncbook.spawn(config) as quiet:
        run(quiet, "before", [1])
        with asyncbook.subscribe(quiet.address) as subscription:
            for number in range(200):
                run(quiet, f"{number}", [number % 100])
                assert collect(subscription, f"{number}") == [number % 100]
            assert quiet._names.next_no < 64, "numbers are used again"
            with pytest.raises(InvalidRequest, match="for subscribers"):
                quiet.poll_outputs()


def test_a_poll_ends_however_quickly_more_comes(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncbook.reader.MAX_POLL_BYTES", 200)
    with asyncbook.subscribe(book.address) as subscription:
        for number in range(20):
            run(book, f"{number}", [number])
        num_pieces = []
        while sum(num_pieces) < 20:
            assert subscription.wait_outputs(TIMEOUT_S)
            num_pieces.append(len(subscription.poll_outputs()))
        assert len(num_pieces) > 2


# In an event loop


async def test_a_stream_of_a_request_that_is_yet_to_come(book: Book) -> None:
    async with asyncbook.subscribe(book.address) as subscription:
        pieces = []

        async def read() -> None:
            async for piece in subscription.stream("a"):
                pieces.append(piece)

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="has a stream already"):
            subscription.stream("a")
        run(book, "b", [1])
        run(book, "a", [10, 11, 12])
        await asyncio.wait_for(task, TIMEOUT_S)
        assert [token_id for piece in pieces for token_id in piece.token_ids.tolist()] == [10, 11, 12]
        assert pieces[-1].finish_reason is FinishReason.LENGTH
        assert [outputs.request_ids for outputs in subscription.poll_outputs()] == [["b"]]


async def test_outputs_end_with_the_book(book: Book) -> None:
    async with asyncbook.subscribe(book.address) as subscription:
        ids: list[int] = []

        async def read() -> None:
            async with aclosing(subscription.outputs()) as deliveries:  # type: ignore[type-var]
                async for outputs in deliveries:
                    ids.extend(outputs.token_ids.tolist())

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        run(book, "a", [10, 11])
        await asyncio.sleep(0)
        book.close()
        await asyncio.wait_for(task, TIMEOUT_S)
        assert ids == [10, 11]


# Who does not get in


def test_what_cannot_be_subscribed_to(book: Book) -> None:
    with (
        asyncbook.open(BookConfig(**SMALL)) as embedded,
        pytest.raises(HandshakeFailed, match="is embedded in process"),
    ):
        asyncbook.subscribe(embedded.address)
    address = book.address
    book.close()
    with pytest.raises(BookClosed, match="there is no book at"):
        asyncbook.subscribe(address)


def test_a_wrong_token_and_a_process_that_is_not_there(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Subscription._request

    def changed(**changes: Any) -> Any:
        def make(self: Subscription, epoch: int) -> wire.Subscribe:
            message = request(self, epoch)
            for name, value in changes.items():
                setattr(message, name, value)
            return message

        return make

    for changes, words in (
        ({"token": b"?" * 16}, "the token is not the one"),
        ({"pid": 1 << 22}, "sees no process"),
        ({"start_time": 1}, "sees no process"),
    ):
        monkeypatch.setattr(Subscription, "_request", changed(**changes))
        with pytest.raises(HandshakeFailed, match=words):
            asyncbook.subscribe(book.address)
    monkeypatch.undo()
    run(book, "a", [1])
    assert not subscribers(book)


def test_as_many_as_there_may_be(book: Book) -> None:
    everybody = [asyncbook.subscribe(book.address) for _ in range(MAX_SUBSCRIBERS)]
    with pytest.raises(HandshakeFailed, match=f"has {MAX_SUBSCRIBERS} subscribers"):
        asyncbook.subscribe(book.address)
    everybody.pop().close()
    wait_until(lambda: len(subscribers(book)) < MAX_SUBSCRIBERS, "one is free")
    everybody.append(asyncbook.subscribe(book.address))
    run(book, "a", [1])
    for each in everybody:
        assert collect(each, "a") == [1]
        each.close()


def test_nonsense_on_the_socket_is_skipped(book: Book) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"ipc://{Path(book.address) / 'subscribers'}")
        unknown = wire.Subscribe(b"", os.getpid(), start_time(os.getpid()) or 0, 0)
        for parts in ([b""], [b"", b""], [b"\xc1"], [b"x" * 200], [wire.encode(wire.Unsubscribe())]):
            stranger.send_multipart(parts)
        stranger.send(wire.encode(wire.WakeAt(0)))
        stranger.send(wire.encode(unknown))
        assert stranger.poll(1000 * TIMEOUT_S)
        assert isinstance(wire.decode_subscriber_reply(stranger.recv()), wire.Unknown)
        assert isinstance(wire.decode_subscriber_reply(stranger.recv()), wire.NotSubscribed)
        with asyncbook.subscribe(book.address) as subscription:
            run(book, "a", [1])
            assert collect(subscription, "a") == [1]


def test_a_number_that_was_given_back_is_not_given_back_twice() -> None:
    names = RequestNames()
    first = names.add("a", [])
    names.forget(first)  # its end was read
    assert names.add("b", []) == first
    names.release(first, "a")  # its row is free, and the number another's by now
    assert names.next_no != first
