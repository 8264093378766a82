"""Random calls on the reference, an embedded and a sidecar book, which must never differ.

Hypothesis finds the shortest calls that make a difference; the seeded driver makes many more of the same calls.
`tests/stress/test_book_machine_long.py` runs both for long.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from asyncbook import BookConfig
from tests.property import operations
from tests.property.operations import CONFIGS, Operation, drive
from tests.property.trio import TrioPool

SHORT = settings(
    max_examples=25,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class DrawnChoices:
    """Choices that Hypothesis makes, and makes smaller."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw

    def integer(self, least: int, most: int) -> int:
        return self._draw(st.integers(least, most))


class BookMachine(RuleBasedStateMachine):
    """Every call of the contract in any order."""

    def __init__(self, pool: TrioPool, config: BookConfig) -> None:
        super().__init__()
        self._pool = pool
        self._trio = pool.take(config)
        self._has_failed = False

    def _make(self, operation: Operation, data: st.DataObject) -> None:
        try:
            operation(self._trio, DrawnChoices(data))
        except Exception as error:
            self._has_failed = True
            error.add_note(self._trio.script())
            raise

    def teardown(self) -> None:
        if self._has_failed:
            self._trio.close()
        else:
            self._pool.give_back(self._trio)

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self._make(operations.admit, data)

    @rule(data=st.data())
    def admit_another(self, data: st.DataObject) -> None:  # as often again: there must be rows to do something with
        self._make(operations.admit, data)

    @rule(data=st.data())
    def submit_new(self, data: st.DataObject) -> None:
        self._make(operations.submit_new, data)

    @rule(data=st.data())
    def submit_kept(self, data: st.DataObject) -> None:
        self._make(operations.submit_kept, data)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._make(operations.abort, data)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self._make(operations.preempt, data)

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self._make(operations.resume, data)

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        self._make(operations.rewind, data)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._make(operations.release, data)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self._make(operations.read, data)

    @rule(data=st.data())
    def hold_frame(self, data: st.DataObject) -> None:
        self._make(operations.hold_frame, data)

    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        self._make(operations.pause, data)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self._make(operations.settle, data)


def run_machine(pool: TrioPool, name: str, how: settings, seed: int | None = None) -> None:
    """Lets Hypothesis make calls, on the trio of one configuration."""
    machine: Any = lambda: BookMachine(pool, CONFIGS[name])  # noqa: E731 (Hypothesis sets an attribute of it)
    run_state_machine_as_test(machine if seed is None else hypothesis.seed(seed)(machine), settings=how)


@pytest.mark.parametrize("name", CONFIGS)
def test_short_random_calls(trio_pool: TrioPool, name: str) -> None:
    run_machine(trio_pool, name, SHORT)


@pytest.mark.parametrize("name", CONFIGS)
def test_many_random_calls(trio_pool: TrioPool, name: str) -> None:
    trio = trio_pool.take(CONFIGS[name])
    try:
        drive(trio, seed=1, num_calls=4000)
    except BaseException:
        trio.close()
        raise
    trio_pool.give_back(trio)
