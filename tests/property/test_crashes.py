"""Random calls on a book whose sidecar dies again and again, at any line: nothing of it shows.

The reference and an embedded book are undisturbed; frames, tables, counters and draft rounds of the third must be
theirs, and so must what is delivered of each request, without a loss or a repeat. See `mortal.py` for how it dies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

import asyncbook.sidecar
from asyncbook import Book, BookConfig, RequestParams
from asyncbook.worker import checkpoint
from tests.property.compare import plain
from tests.property.mortal import Listener, MortalBook, small_logs
from tests.property.operations import CONFIGS, OPERATIONS, Choices, drive, once_in
from tests.property.test_book_machine import SHORT, BookMachine
from tests.property.test_slow_reader import Events, add_events, forget_ended
from tests.property.trio import Trio
from tests.reference import Finish, ReferenceOutputs


class MortalTrio(Trio):
    """A trio whose sidecar dies. Outputs are compared by request: a death may join two deliveries into one."""

    sidecar: MortalBook
    reads = True

    def __init__(self, config: BookConfig) -> None:
        self._expected: Events = defaultdict(list)
        self._came: Events = defaultdict(list)
        self._heard: Events = defaultdict(list)
        self._listener: Listener | None = None
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
        self._listen()

    def listen(self) -> None:
        """From now on another process gets the outputs as well."""
        self._listener = self.sidecar.subscribe()

    def _listen(self) -> None:
        if self._listener is not None:
            add_events(self._heard, map(plain, self._listener.poll_outputs()))

    def work(self) -> None:
        """The sidecar takes what was sent."""
        self._record("", "work")
        self.sidecar.work()

    def _compare_embedded_outputs(self, new: list[ReferenceOutputs]) -> None:
        super()._compare_embedded_outputs(new)
        add_events(self._expected, new)

    def _compare_sidecar_outputs(self) -> None:
        """A reader that takes all there is gets all there is."""
        if not self.reads:
            return
        num_polls = 0
        while num_polls < 3:
            self.sidecar.work()
            outputs = self.sidecar.poll_outputs()
            add_events(self._came, map(plain, outputs))
            num_polls = 0 if outputs else num_polls + 1
        assert self._came == self._expected, "sidecar outputs"
        self._listen()
        assert self._listener is None or self._heard == self._expected, "broadcast outputs"
        for events in (self._heard, self._came, self._expected):
            forget_ended(events)
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
    "long rows, logprobs": BookConfig(
        max_num_reqs=3, max_model_len=200, vocab_size=5, num_spec_tokens=2, max_in_flight=4, max_logprobs=2
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


NUM_LIVES = 6
CALLS_A_LIFE = 150


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize("name", MORTAL_CONFIGS)
def test_many_random_deaths(name: str) -> None:
    num_deaths = 0
    for seed in range(NUM_LIVES):
        trio = MortalTrio(MORTAL_CONFIGS[name])  # a new one: there is no checkpoint yet
        if seed % 2:
            trio.listen()
        try:
            drive(trio, seed, CALLS_A_LIFE, CALLS_A_LIFE, CRASHING)
        finally:
            trio.close()
        num_deaths += trio.sidecar.executioner.num_deaths
    assert num_deaths > 5 * NUM_LIVES


class MortalPool:
    """In the place of `TrioPool`: each example begins without a checkpoint."""

    def take(self, config: BookConfig) -> MortalTrio:
        """A new trio."""
        return MortalTrio(config)

    def give_back(self, trio: MortalTrio) -> None:
        """Compares it once more."""
        try:
            trio.empty()
        finally:
            trio.close()


class MortalMachine(BookMachine):
    """Hypothesis chooses the line, too, and looks for the shortest calls that make a difference."""

    @rule(data=st.data())
    def doom(self, data: st.DataObject) -> None:
        self._make(doom, data)

    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        self._make(work, data)

    @rule(data=st.data())
    def poll(self, data: st.DataObject) -> None:
        self._make(poll, data)


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize("name", ["many in flight", "ring"])
def test_short_random_calls_and_deaths(name: str) -> None:
    pool: Any = MortalPool()
    machine: Any = lambda: MortalMachine(pool, CONFIGS[name])  # noqa: E731 (Hypothesis sets an attribute of it)
    run_state_machine_as_test(machine, settings=SHORT)


@pytest.mark.usefixtures("logs")
def test_a_pause_of_the_reader_is_no_pause_for_what_it_gets_afterwards() -> None:
    # More than the outputs log holds, all of it behind the last step: only checkpoints of their own let it through.
    trio = MortalTrio(MORTAL_CONFIGS["long rows"])
    try:
        rows = [trio.admit(f"request-{i}", [1], RequestParams()) for i in range(3)]
        for _ in range(150):
            trio.reads = False
            trio.step(rows, [0, 1, 2])  # type: ignore[arg-type]
        trio.reads = True
        trio.settle()
    finally:
        trio.close()


def test_what_is_dropped_for_lack_of_room_is_dropped_by_the_next_sidecar_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row holds another request by then, whose ids are not its own."""
    monkeypatch.setattr(asyncbook.sidecar, "FLUSH_TIMEOUT_S", 0.0)
    config = MORTAL_CONFIGS["long rows"]
    with small_logs(0, 64 * 2):
        for lines in range(20, 400, 10):
            first, num_dropped = _released_while_full(MortalBook.open(config), lines)
            assert first == [*[2] * first.count(2), *first[first.count(2) :]], lines
            assert first[first.count(2) :] in ([], [(Finish.ABORT, -1)]), lines
            assert len(first) == 121 or num_dropped == 1, lines


def _released_while_full(book: MortalBook, lines: int) -> tuple[list[int | tuple[int, int]], int]:
    """A row that is released while nobody reads, and given to a request of other ids, by a sidecar that dies at some
    line of that. What came of the first request, and how many were dropped."""
    events: Events = defaultdict(list)

    def read() -> None:
        for _ in range(5):
            book.work()
            add_events(events, map(plain, book.poll_outputs()))

    row = book.admit("first", [1])
    for _ in range(120):
        book.submit(book.batch([row]), np.array([2], np.int32))
        book.work()
    book.executioner.doom(lines, lines)
    book.release(row)
    row = book.admit("second", [3] * 150)
    book.work()
    read()
    book.release(row)
    book.submit(book.batch([]), np.zeros(0, np.int32))
    read()
    book.close()
    return events["first"], book.stats().outputs_dropped_requests


def test_what_an_abort_leaves_is_in_a_log_before_a_checkpoint_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncbook.sidecar, "FLUSH_TIMEOUT_S", 0.0)
    monkeypatch.setattr(checkpoint, "MAX_MESSAGES_BETWEEN", 1)
    num_deaths = 0
    with small_logs(0, 1 << 14):
        for lines in range(5, 200, 2):
            book = MortalBook.open(MORTAL_CONFIGS["long rows"])
            row = book.admit("first", [1])
            for _ in range(120):
                book.submit(book.batch([row]), np.array([2], np.int32))
                book.work()
            book.executioner.doom(lines, lines)
            book.abort(row)
            events: Events = defaultdict(list)
            for _ in range(5):
                book.work()
                add_events(events, map(plain, book.poll_outputs()))
            assert events["first"] == [*[2] * 120, (Finish.ABORT, -1)], (lines, book.executioner.died_at)
            num_deaths += book.executioner.num_deaths
            book.close()
    assert num_deaths > 10


def test_an_embedded_book_writes_no_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.kernels, "write_checkpoint", None)
    with asyncbook.open(CONFIGS["many in flight"]) as book:
        row = book.admit("a", [1])
        book.submit(book.batch([row]), np.array([2], np.int32))
        assert book._bookkeeper._checkpoints is None
        assert not any(book._layout.checkpoint_work(slot).view(book._segment.readable()).any() for slot in (0, 1))
