"""A sidecar that is killed takes no logprobs along: what comes after it is what an undisturbed book would deliver."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncbook
from asyncbook import Book, BookConfig, Logprobs, RequestParams
from tests.conftest import TIMEOUT_S, wait_until
from tests.process.leftovers import WatchedProcess

SIZES: dict[str, Any] = {"max_num_reqs": 4, "max_model_len": 64, "vocab_size": 100, "num_spec_tokens": 2}
ASKED = (0, 3, None, 1)
NUM_STEPS = 12
KILLED_AFTER = 5


def kill(book: Book) -> None:
    """SIGKILL, and until it has ended."""
    assert book.sidecar_pid is not None
    process = WatchedProcess(book.sidecar_pid)
    os.kill(book.sidecar_pid, signal.SIGKILL)
    assert process.wait_end()
    process.close()


def step_of(number: int) -> tuple[np.ndarray, Logprobs]:
    """Ids [4, 3], some padded, and their logprobs, -inf and NaN among them."""
    random = np.random.default_rng(number)
    ids = random.integers(0, 100, (4, 3)).astype(np.int32)
    ids[random.integers(0, 4), 1:] = -1
    token_ids = random.integers(0, 100, (4, 3, 4)).astype(np.int32)
    token_ids[..., 0] = ids
    values = random.normal(-2, 1, token_ids.shape).astype(np.float32)
    if number > KILLED_AFTER + 3:
        values[random.integers(0, 4), 0, 1] = -np.inf
    if number == NUM_STEPS:
        values[1, 0] = np.nan
    return ids, Logprobs(token_ids, values, random.integers(1, 9, (4, 3)).astype(np.int32))


Come = dict[str, list[Any]]


def take(book: Book, came: Come) -> None:
    """What was delivered: ids, their logprobs, ends, and the sum at the end of each piece, where all books have one."""
    for outputs in book.poll_outputs():
        for request in outputs:
            events = came.setdefault(request.request_id, [[], [], [], None])
            events[0] += request.token_ids.tolist()
            events[1] += [repr(one) for one in request.logprobs or []]
            events[2] += [request.finish_reason] if request.finish_reason else []
            events[3] = repr(request.cumulative_logprob)


def run(config: BookConfig, disturb: Callable[[Book, int], None], open_book: Callable[[BookConfig], Book]) -> Any:
    """Steps of four requests, one of them aborted and one released on the way; what was delivered, and the counters."""
    came: Come = {}
    with open_book(config) as book:
        rows = [book.admit(f"r{i}", [1, 2], RequestParams(logprobs=k)) for i, k in enumerate(ASKED)]
        batch = book.batch(rows)
        for number in range(1, NUM_STEPS + 1):
            book.wait_room(TIMEOUT_S)
            ids, logprobs = step_of(number)
            book.submit(batch, ids, logprobs=logprobs if number != 3 else None)
            disturb(book, number)
            if number == KILLED_AFTER + 3:
                book.abort(rows[0])
            if number == KILLED_AFTER + 5:
                book.release(rows[3])
            if number % 4 == 0:
                take(book, came)
        book.wait_applied(NUM_STEPS, TIMEOUT_S)
        book.release(rows[1])
        number = book.submit(book.batch([]), np.zeros(0, np.int32))
        book.wait_applied(number, TIMEOUT_S)
        wait_until(lambda: take(book, came) or len(came["r1"][2]) == 1, "the last end")  # type: ignore[func-returns-value]
        stats = book.stats()
    return came, (stats.nan_logprobs, stats.missing_logprobs, stats.committed_tokens, stats.outputs_dropped_requests)


def nothing(book: Book, number: int) -> None:
    """Leaves the book alone."""


def kill_after(book: Book, number: int) -> None:
    """Kills the sidecar with a step in flight, and again later, when it has nothing to do."""
    if number == KILLED_AFTER:
        kill(book)
    elif number == NUM_STEPS - 2:
        book.wait_applied(number, TIMEOUT_S)
        kill(book)


def kill_before_ends(book: Book, number: int) -> None:
    """Kills the sidecar just before an abort and a release, which the next one has to do."""
    if number in (KILLED_AFTER + 3, KILLED_AFTER + 5):
        book.wait_applied(number - 1, TIMEOUT_S)  # by the one that is to be killed now
        kill(book)


@pytest.mark.parametrize("transport", ["zmq", "ring"])
@pytest.mark.parametrize("disturb", [nothing, kill_after, kill_before_ends])
def test_a_killed_sidecar_loses_no_logprobs(runtime_dir: object, transport: str, disturb: Any) -> None:
    sizes = {**SIZES, "max_logprobs": 3}
    expected = run(BookConfig(**sizes), nothing, asyncbook.open)
    assert expected[1][:2] != (0, 0)
    assert run(BookConfig(**sizes, transport=transport), disturb, asyncbook.spawn) == expected


@pytest.mark.parametrize("transport", ["zmq", "ring"])
def test_what_nobody_has_read_outlives_the_sidecar(runtime_dir: object, transport: str) -> None:
    # The sum is not in the segment: of what the dead one had delivered it is added up again.
    with asyncbook.spawn(BookConfig(**SIZES, max_logprobs=3, max_in_flight=4, transport=transport)) as book:
        row = book.admit("a", [1], RequestParams(logprobs=0))
        batch = book.batch([row])
        ids = np.array([5], np.int32)
        one = Logprobs(ids[:, None], np.array([[-0.5]], np.float32), ids)
        for _ in range(4):
            book.wait_applied(book.submit(batch, ids, logprobs=one), TIMEOUT_S)
        (first, *_) = book.poll_outputs()
        assert first.logprobs is not None
        kill(book)
        book.wait_applied(book.submit(batch, ids, logprobs=one), TIMEOUT_S)
        assert book.sidecar_pid is not None
        os.kill(book.sidecar_pid, signal.SIGSTOP)
        last = book.submit(batch, ids, logprobs=one)
        kill(book)
        book.wait_applied(last, TIMEOUT_S)
        sums = [float(outputs.logprobs.cumulative[0]) for outputs in book.poll_outputs() if outputs.logprobs]
        assert sums == [-2.5, -3.0]
