"""Random calls on a book whose sidecar dies again and again, at any line: nothing of it shows.

The reference and an embedded book are undisturbed; frames, tables, counters and draft rounds of the third must be
theirs, and so must what is delivered of each request, without a loss or a repeat. See `mortal.py` for how it dies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

import asyncbook.sidecar
from asyncbook import Book, BookConfig
from asyncbook.worker import checkpoint
from tests.property.compare import plain
from tests.property.mortal import MortalBook, small_logs
from tests.property.operations import CONFIGS, OPERATIONS, Choices, drive, once_in
from tests.property.test_slow_reader import Events, add_events
from tests.property.trio import Trio
from tests.reference import ReferenceOutputs


class MortalTrio(Trio):
    """A trio whose sidecar dies. Outputs are compared by request: a death may join two deliveries into one."""

    sidecar: MortalBook

    def __init__(self, config: BookConfig) -> None:
        self._expected: Events = defaultdict(list)
        self._came: Events = defaultdict(list)
        super().__init__(config)

    def _make_sidecar(self, config: BookConfig) -> Book:
        return MortalBook.open(config)

    def doom(self, num_lines: int, seed: int) -> None:
        """It dies so many lines later."""
        self._record("", "doom", num_lines, seed)
        self.sidecar.executioner.doom(num_lines, seed)

    def poll(self) -> None:
        """The reader takes what is there."""
        self._record("", "poll")
        add_events(self._came, map(plain, self.sidecar.poll_outputs()))

    def work(self) -> None:
        """The sidecar takes what was sent."""
        self._record("", "work")
        self.sidecar.work()

    def _compare_embedded_outputs(self, new: list[ReferenceOutputs]) -> None:
        super()._compare_embedded_outputs(new)
        add_events(self._expected, new)

    def _compare_sidecar_outputs(self) -> None:
        """A reader that takes all there is gets all there is."""
        num_polls = 0
        while num_polls < 3:
            self.sidecar.work()
            outputs = self.sidecar.poll_outputs()
            add_events(self._came, map(plain, outputs))
            num_polls = 0 if outputs else num_polls + 1
        assert self._came == self._expected, "sidecar outputs"
        self._came.clear()
        self._expected.clear()
        self._awaited.clear()
        self._num_due = 0


def doom(trio: Any, choices: Choices) -> None:
    """Mostly soon, and sometimes several messages later."""
    trio.doom(choices.integer(1, 1 << choices.integer(1, 10)), choices.integer(0, 1 << 30))


def poll(trio: Any, choices: Choices) -> None:
    trio.poll()


def work(trio: Any, choices: Choices) -> None:
    if once_in(choices, 2):
        trio.work()


CRASHING = {**OPERATIONS, doom: 20, poll: 4, work: 12}
MORTAL_CONFIGS = CONFIGS | {
    # Rows that hold more than the outputs log, which the reader does not look at for long.
    "long rows": BookConfig(max_num_reqs=3, max_model_len=200, vocab_size=5, num_spec_tokens=2, max_in_flight=4),
    "long rows, ring": BookConfig(
        max_num_reqs=3, max_model_len=200, vocab_size=5, num_spec_tokens=2, max_in_flight=4, transport="ring"
    ),
}
LOG_BYTES = {"tiny": (0, 1 << 16), "small": (4096, 1 << 14)}


@pytest.fixture(params=LOG_BYTES)
def logs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The outputs log is full and wraps all the time; the overflow log takes the rest. Checkpoints are written every
    few messages."""
    monkeypatch.setattr(asyncbook.sidecar, "FLUSH_TIMEOUT_S", 0.0)
    monkeypatch.setattr(checkpoint, "MAX_MESSAGES_BETWEEN", 5)
    with small_logs(*LOG_BYTES[request.param]):
        yield


NUM_LIVES = 12
CALLS_A_LIFE = 150


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize("name", MORTAL_CONFIGS)
def test_many_random_deaths(name: str) -> None:
    num_deaths = 0
    for seed in range(NUM_LIVES):
        trio = MortalTrio(MORTAL_CONFIGS[name])  # a new one: there is no checkpoint yet
        try:
            drive(trio, seed, CALLS_A_LIFE, CALLS_A_LIFE, CRASHING)
        finally:
            trio.close()
        num_deaths += trio.sidecar.executioner.num_deaths
    assert num_deaths > 5 * NUM_LIVES
