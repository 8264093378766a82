"""The fuzzer of `tests/fuzz.py`, for seconds: changed messages by random numbers, whole ones by Hypothesis. For long it
runs in `make stress`."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbook.ipc import wire
from tests import fuzz
from tests.unit.test_wire import instances

COMMANDS = typing.get_args(wire.AnyCommand)
SMALL_NUMBERS = st.integers(-2, 30)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_messages_change_nothing_or_what_they_may(seed: int) -> None:
    fuzzed = fuzz.run(seed, 1500)
    # All of it happened: right messages, refused ones, gaps, outputs.
    assert fuzzed.num_applied > 500
    assert fuzzed.num_bad > 500
    assert fuzzed.num_gaps > 0
    assert fuzzed.num_records > 50


def test_a_mutated_restore_is_refused_or_the_book_goes_on() -> None:
    assert 0 < fuzz.run_restores(1, 60) < 60


def near(fuzzed: fuzz.Fuzzed, struct: Any, draw: Any) -> Any:
    """Any message of a kind, its number the next one, and where Hypothesis likes its row and generation right."""
    message = draw(instances(struct))
    message.seq = fuzzed.next_seq - (struct is wire.Restore)
    if draw(st.booleans()) and hasattr(message, "row"):
        message.row = draw(st.integers(0, fuzz.LAYOUT.max_num_reqs - 1))
        message.generation = int(fuzzed.ledger.generation[message.row]) + draw(st.integers(0, 1))
    for name in ("num_computed_tokens", "max_tokens", "min_tokens", "slot", "width", "request_no"):
        if hasattr(message, name) and draw(st.booleans()):
            setattr(message, name, draw(SMALL_NUMBERS))
    return message


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 50), data=st.data())
def test_any_message_is_applied_whole_or_not_at_all(seed: int, data: st.DataObject) -> None:
    fuzzed = fuzz.Fuzzed()
    traffic = fuzz.Traffic(fuzzed, seed)
    for _ in range(12):
        fuzzed.feed(traffic.right())
    for _ in range(4):
        encoded = wire.encode(near(fuzzed, data.draw(st.sampled_from(COMMANDS)), data.draw))
        before = fuzzed.snapshot()
        if fuzzed.feed(encoded):
            assert fuzzed.others_unchanged(before, fuzzed.named_rows(encoded))
        else:
            assert fuzzed.unchanged(before)
        fuzzed.check()
