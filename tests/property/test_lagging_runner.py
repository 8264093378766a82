"""An engine that is several steps ahead of its book puts out what one puts out that waits for every token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncbook import Book, FinishReason
from tests.conftest import MakeBook
from tests.property.engine import TIMEOUT_S, LaggingEngine, Request
from tests.property.operations import SeededChoices, once_in, pick

NUM_SEEDS = 3
NUM_ROUNDS = 150
CONFIG: dict[str, Any] = {"max_num_reqs": 5, "max_model_len": 24, "vocab_size": 29}


def assert_nothing_vanished(book: Book) -> None:
    """Every id that was submitted was committed, or dropped for a reason; every row is free or held."""
    stats = book.stats()
    assert stats.submitted_tokens == stats.committed_tokens + sum(stats.dropped_tokens.values())
    assert stats.num_rows_free + stats.num_rows_held == book.config.max_num_reqs


def disturb(engine: LaggingEngine, request: Request) -> None:
    """Something happens to a request."""
    if request.is_stopped:
        if once_in(engine.choices, 3):
            engine.release(request)
    elif request.is_preempted:
        if once_in(engine.choices, 3):
            what = (engine.resume, engine.resume, engine.resume, engine.preempt, engine.abort, engine.release)
            pick(engine.choices, what)(request)
    elif once_in(engine.choices, 12):
        pick(engine.choices, (engine.preempt, engine.preempt, engine.rewind, engine.readmit))(request)
    elif once_in(engine.choices, 60):
        pick(engine.choices, (engine.abort, engine.release))(request)


def run(book: Book, seed: int, lag: int) -> list[Request]:
    """One run on an empty book, and its requests. A failure tells the seed."""
    engine = LaggingEngine(book, SeededChoices(seed), lag)
    try:
        run_until_all_ended(engine)
    except Exception as error:
        error.add_note(f"seed {seed}, lag {lag}")
        raise
    return engine.requests


def run_until_all_ended(engine: LaggingEngine) -> None:
    """Requests until there were rounds enough; then no new ones, and no more trouble, until all have ended."""
    book, lag = engine.book, engine.lag
    before = book.stats()
    for round_no in range(100 * NUM_ROUNDS):
        if round_no < NUM_ROUNDS:
            if once_in(engine.choices, 2):
                engine.admit()
            for request in list(engine.held):
                disturb(engine, request)
        else:
            for request in [request for request in engine.held if request.is_preempted and not request.is_stopped]:
                engine.resume(request)
        if once_in(engine.choices, 6):
            engine.pace.pause()
        engine.launch()
        most_launched = lag if not once_in(engine.choices, 4) else engine.choices.integer(0, lag)
        while len(engine.launched) > most_launched:
            engine.submit()
        if book.applied_step == book.submitted_step:
            assert_nothing_vanished(book)
        if once_in(engine.choices, 3):
            engine.poll()
        for request in engine.requests:
            engine.check_request(request)
        if round_no >= NUM_ROUNDS and not engine.held:
            break
    while engine.launched:
        engine.submit()
    engine.pace.wake()
    book.wait_room(TIMEOUT_S)
    book.wait_applied(book.submit(book.batch([]), np.zeros(0, np.int32)), TIMEOUT_S)
    engine.poll()
    assert_nothing_vanished(book)
    assert not engine.held
    after = book.stats()
    num_delivered = sum(len(request.delivered) for request in engine.requests)
    assert num_delivered == after.committed_tokens - before.committed_tokens
    # Whatever happened in between, every step found its rows as the engine had left them.
    for reason in ("overscheduled", "invalid"):
        assert after.dropped_tokens[reason] == before.dropped_tokens[reason], reason


@pytest.mark.parametrize("num_spec_tokens", [0, 3])
@pytest.mark.parametrize("lag", [0, 1, pytest.param(2, marks=pytest.mark.stress), 8])
def test_outputs_are_those_of_a_synchronous_runner(make_book: MakeBook, lag: int, num_spec_tokens: int) -> None:
    book = make_book(**CONFIG, num_spec_tokens=num_spec_tokens, max_in_flight=max(1, lag))
    reasons = set()
    for seed in range(NUM_SEEDS):
        for request in run(book, seed, lag):
            assert request.finish_reason is not FinishReason.NONE, request
            assert request.num_aborts_to_come == 0, request
            reasons.add(request.finish_reason)
    dropped = book.stats().dropped_tokens
    assert dropped["partial_prefill"] > 0
    assert dropped["preempted"] > 0 or lag == 0
    assert dropped["stale"] > 0 or lag == 0
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
