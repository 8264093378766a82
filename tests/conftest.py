"""Books for tests, and the few things that nearly every test does with one.

Contract and case tests run on an embedded book and on sidecar books of both transports: same calls, same results. A
sidecar takes most of a second to start, so `make_book` lends one that earlier tests have used, unless a test asks for
`fresh=True`. A lent book has no row held, nothing in flight and no outputs waiting; only its step numbers, generations
and counters go on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncbook
from asyncbook import Batch, Book, BookConfig, FinishReason, Row, Stats
from asyncbook.ipc.layout import COLUMN_DTYPES

TIMEOUT_S = 30.0  # a limit for waits that end in microseconds; only a broken book gets there
KINDS: dict[str, dict[str, Any]] = {"embedded": {}, "sidecar": {"transport": "zmq"}, "ring": {"transport": "ring"}}
MAX_IDLE_SIDECARS = 8
SMALL: dict[str, Any] = {"max_num_reqs": 4, "max_model_len": 16, "vocab_size": 100, "num_spec_tokens": 5}

MakeBook = Callable[..., Book]


def open_book(kind: str, config: BookConfig) -> Book:
    """A new book of a kind."""
    return asyncbook.open(config) if kind == "embedded" else asyncbook.spawn(config)


class SidecarPool:
    """Sidecar books between tests. A book that cannot be emptied fails the test that used it."""

    def __init__(self) -> None:
        self._idle: list[Book] = []

    def take(self, config: BookConfig) -> Book:
        """An empty book of this configuration, kept or new."""
        for book in self._idle:
            if book.config == config:
                self._idle.remove(book)
                return book
        return asyncbook.spawn(config)

    def give_back(self, book: Book) -> None:
        """Empties the book and keeps it; too many are closed, the one used longest ago first."""
        try:
            empty(book)
        except BaseException:
            book.close()
            raise
        self._idle.append(book)
        while len(self._idle) > MAX_IDLE_SIDECARS:
            self._idle.pop(0).close()

    def close(self) -> None:
        """Ends all that are kept."""
        for book in self._idle:
            book.close()


def empty(book: Book) -> None:
    """Releases every row, as the frame names them, and checks that nothing of them is left."""
    book.wait_room(TIMEOUT_S)
    step(book, [], [])
    frame = book.frame()
    for index in np.flatnonzero(frame.num_prompt_tokens).tolist():
        book.release(Row(index, int(frame.generation[index])))
    step(book, [], [])
    book.poll_outputs()
    assert book.stats().num_rows_held == 0
    assert not any(table.any() for table in tables(book))


@pytest.fixture(scope="session")
def sidecar_pool() -> Iterator[SidecarPool]:
    """The sidecars of this run."""
    pool = SidecarPool()
    yield pool
    pool.close()


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """Which book a test runs on: one without a process, or a sidecar's by its transport."""
    return str(request.param)


@pytest.fixture
def make_book(kind: str, sidecar_pool: SidecarPool) -> Iterator[MakeBook]:
    """`make_book(fresh=False, **fields of BookConfig)`: an empty book, `SMALL` where nothing else is said. A test that
    closes its book, or needs it to start at step 0, asks for a fresh one."""
    fresh_books: list[Book] = []
    lent_books: list[Book] = []

    def make(*, fresh: bool = False, **options: Any) -> Book:
        config = BookConfig(**(SMALL | KINDS[kind] | options))
        is_lent = kind != "embedded" and not fresh
        book = sidecar_pool.take(config) if is_lent else open_book(kind, config)
        (lent_books if is_lent else fresh_books).append(book)
        return book

    yield make
    for book in fresh_books:
        book.close()
    for book in lent_books:
        sidecar_pool.give_back(book)


@pytest.fixture
def book(make_book: MakeBook) -> Book:
    """A small empty book."""
    return make_book()


# Steps


def ids_of(ids: Any) -> Any:
    """Lists as an int32 array, [n] or padded with -1 to [n, longest]; an array or tensor as it is."""
    if not isinstance(ids, Sequence):
        return ids
    if not any(isinstance(item, Sequence) for item in ids):
        return np.array(ids, np.int32)
    width = max(1, *(len(item) for item in ids))
    return np.array([[*item, *[-1] * (width - len(item))] for item in ids], np.int32)


def step(
    book: Book,
    batch: Batch | Iterable[Row],
    ids: Any,
    *,
    drafts: Any = None,
    logprobs: Any = None,
    scheduled: Sequence[int] | None = None,
    d: Sequence[int] | None = None,
) -> int:
    """One step, submitted and applied; its number. `scheduled` and `d` describe a batch that is given as rows."""
    if not isinstance(batch, Batch):
        batch = book.batch(batch, num_scheduled_tokens=scheduled, num_draft_tokens=d)
    number = book.submit(batch, ids_of(ids), logprobs=logprobs, draft_token_ids=ids_of(drafts))
    book.wait_applied(number, TIMEOUT_S)
    return number


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Looks again and again, for what nothing announces."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {TIMEOUT_S} s"
        time.sleep(0.001)


@contextmanager
def stopped_sidecar(book: Book) -> Iterator[None]:
    """The sidecar does not run inside the block: all of its threads are stopped."""
    pid = book.sidecar_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: _thread_states(pid) == {"T"}, "the sidecar is stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def in_flight(book: Book) -> Iterator[None]:
    """What is sent inside the block is applied behind it, where a book can wait: an embedded one applies at once."""
    if book.sidecar_pid is None:
        yield
        return
    with stopped_sidecar(book):
        yield


def _thread_states(pid: int) -> set[str]:
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")}


# What a book shows


def tables(book: Book) -> tuple[np.ndarray, np.ndarray]:
    """`token_ids` and `is_token_ids` of all rows, committed or not. No call of the contract shows them whole."""
    return book._token_ids, book._is_token_ids


def columns(book: Book, row: Row) -> dict[str, int]:
    """All columns of a row in the last applied frame."""
    frame = book.frame()
    return {name: int(getattr(frame, name)[row.index]) for name in COLUMN_DTYPES}


def have(book: Book, row: Row, **expected: int) -> bool:
    """Whether the row shows these values in the last applied frame; where not, says what it shows."""
    shown = columns(book, row)
    assert {name: shown[name] for name in expected} == expected
    return True


def tokens(book: Book, row: Row) -> list[int]:
    """The row's ids, drafts among them, straight from the table, which must be zero behind them."""
    count = columns(book, row)["num_tokens"]
    token_ids, is_token_ids = tables(book)
    assert not token_ids[row.index, count:].any()
    assert not is_token_ids[row.index, count:].any()
    return [int(token_id) for token_id in token_ids[row.index, :count]]


@dataclass
class Delivered:
    """Everything that was delivered of a request."""

    token_ids: list[int]
    finish_reason: FinishReason = FinishReason.NONE
    stop_reason: int | None = None
    num_pieces: int = 0


def delivered(book: Book) -> dict[str, Delivered]:
    """What came since the last look, by request. A request may not go on, or end again, after its end."""
    requests: dict[str, Delivered] = {}
    for outputs in book.poll_outputs():
        for request_id, token_ids, finish_reason, stop_reason, *_ in outputs:
            request = requests.setdefault(request_id, Delivered([]))
            assert request.finish_reason is FinishReason.NONE, f"{request_id} goes on after its end"
            request.token_ids += token_ids.tolist()
            request.finish_reason, request.stop_reason = finish_reason, stop_reason
            request.num_pieces += 1
    return requests


def grown(book: Book, before: Stats) -> dict[str, int]:
    """Counters of tokens and requests that grew since, drops and ends by their reason."""
    old, new = flat(before), flat(book.stats())
    return {name: new[name] - old[name] for name in new if new[name] != old[name]}


def flat(stats: Stats) -> dict[str, int]:
    """The counters of tokens and requests by one name each."""
    return {
        **{f"dropped_{reason}": count for reason, count in stats.dropped_tokens.items()},
        **{f"finished_{reason.name}": count for reason, count in stats.finished_requests.items()},
        **{
            name: getattr(stats, name)
            for name in (
                "admitted_requests", "released_requests", "submitted_tokens", "committed_tokens",
                "invalid_draft_tokens", "nan_logprobs", "missing_logprobs", "outputs_dropped_requests",
                "replayed_messages", "stale_messages", "bad_messages",
            )
        },
    }  # fmt: skip


@contextmanager
def refused(book: Book, error: type[Exception], *fragments: str) -> Iterator[None]:
    """The call raises the error with all of these in its message, and the book is as it was.

    As it was: the frame of the next step, both tables, counters, rows held, nothing delivered, and the row that the
    next admission gets. (Outputs that wait are lost to the caller, and drafts go, as steps are taken.)
    """
    probe = _probe(book) if book.stats().num_rows_free else None
    before, counters_before = _shown(book), book.stats()
    book.poll_outputs()
    with pytest.raises(error) as caught:
        yield
    for fragment in fragments:
        assert fragment in str(caught.value)
    after, counters_after = _shown(book), book.stats()
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    assert grown(book, counters_before) == {}
    assert counters_after.messages - counters_before.messages <= 2, "more than the empty step was sent"
    assert book.poll_outputs() == []
    if probe is not None:
        assert _probe(book) == (probe.index, probe.generation + 1)
        step(book, [], [])  # the probe's end is delivered by now
        book.poll_outputs()


def _probe(book: Book) -> Row:
    """The row that an admission gets; released again."""
    row = book.admit("probe", [1])
    book.release(row)
    return row


def _shown(book: Book) -> dict[str, Any]:
    """All that a book shows after one more step with nobody in it, copied."""
    step(book, [], [])
    frame, stats = book.frame(), book.stats()
    shown = {name: getattr(frame, name).copy() for name in COLUMN_DTYPES}
    shown["token_ids"], shown["is_token_ids"] = (table.copy() for table in tables(book))
    shown["rows held"], shown["rows free"] = stats.num_rows_held, stats.num_rows_free
    return shown
