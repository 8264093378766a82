"""A trio whose sidecar is killed, by itself at a named point or from outside: see `faulty_sidecar.py`."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import asyncbook
from asyncbook import BookConfig, Subscription
from asyncbook.ipc import layout
from tests.property import operations
from tests.property.compare import plain
from tests.property.operations import OPERATIONS, Operation, SeededChoices, pick
from tests.property.test_slow_reader import Events, add_events
from tests.property.trio import Trio
from tests.reference import ReferenceOutputs

ROOT = Path(__file__).parents[2]
LOG_BYTES = (0, 1 << 20)  # small, so that the outputs log wraps and is full all the time
CALLS: dict[Operation, int] = {  # a dead sidecar cannot be stopped, and one that is read all the time is never full
    operation: weight
    for operation, weight in OPERATIONS.items()
    if operation not in (operations.pause, operations.settle, operations.hold_frame, operations.read)
}
TIMEOUT_S = 300.0  # several sidecars may die before one gets on
MAX_ROUNDS_A_POINT = 40
CALLS_A_ROUND = 25
ROUNDS_A_SUBSCRIBER = 6
_WEIGHTED = [operation for operation, weight in CALLS.items() for _ in range(weight)]


def config_of(transport: str) -> BookConfig:
    """Rows that collide, and hold more than the outputs log."""
    return BookConfig(
        max_num_reqs=5, max_model_len=40, vocab_size=7, num_spec_tokens=2, max_in_flight=2, transport=transport
    )


def differing(came: Events, expected: Events) -> dict[str, tuple[object, object]]:
    """What came and what should have, of each request where that is not the same."""
    names = {*came, *expected}
    return {str(name): (came[name], expected[name]) for name in names if came[name] != expected[name]}


class KilledTrio(Trio):
    """Outputs are compared by request: a death may join two deliveries into one."""

    def __init__(self, config: BookConfig) -> None:
        self._expected: Events = defaultdict(list)
        self._came: Events = defaultdict(list)
        self._heard: Events = defaultdict(list)
        self._is_reading = True
        self._subscription: Subscription | None = None
        super().__init__(config)

    @property
    def num_restarts(self) -> int:
        return self.sidecar._supervisor.num_restarts  # type: ignore[attr-defined,no-any-return]

    @property
    def is_down(self) -> bool:
        return self.sidecar._supervisor.is_down  # type: ignore[attr-defined,no-any-return]

    def _compare_embedded_outputs(self, new: list[ReferenceOutputs]) -> None:
        super()._compare_embedded_outputs(new)
        add_events(self._expected, new)

    def _compare_sidecar_outputs(self) -> None:
        """All of the outputs, each once; unless the reader is slow, and looks at other times."""
        if not self._is_reading:
            return
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            self._read()
            is_right = all(
                self._expected.get(name, [])[: len(events)] == events
                for came in self._readers()
                for name, events in came.items()
            )
            is_all = all(came == self._expected for came in self._readers())
            if is_all or not is_right or time.monotonic() > deadline:
                break
        assert [differing(came, self._expected) for came in self._readers()] == [{}] * len(self._readers())
        for events in (self._came, self._heard, self._expected):
            events.clear()
        self._awaited.clear()
        self._num_due = 0

    def _readers(self) -> list[Events]:
        """What the runner got, and the subscriber, if there is one."""
        return [self._came] if self._subscription is None else [self._came, self._heard]

    def poll(self) -> None:
        """Takes what is there."""
        self._record("", "poll")
        self._read()

    def _read(self) -> None:
        add_events(self._came, map(plain, self.sidecar.poll_outputs()))
        if self._subscription is not None:
            add_events(self._heard, map(plain, self._subscription.poll_outputs()))
            self._subscription.wait_outputs(0.001)  # says how far it has read

    def change_subscriber(self) -> None:
        """One that has got everything goes, or one comes. Whatever the sidecar does meanwhile, it is replaced by the
        book's own thread."""
        self._is_reading = True
        self.settle()
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
            return
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(asyncbook.subscribe, self.sidecar.address, timeout_s=TIMEOUT_S)
            while not coming.done():
                assert self.sidecar.applied_step >= 0
                os.sched_yield()
            self._subscription = coming.result()

    def close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
        super().close()

    def kill(self) -> None:
        """SIGKILL, now."""
        self._record("", "kill")
        # By the descriptor: the number of one that has just ended may be somebody else's.
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sidecar._process.pidfd, signal.SIGKILL)  # type: ignore[attr-defined]

    def make_calls(self, choices: SeededChoices, count: int) -> None:
        """Random ones; the reader looks at the outputs now and then."""
        self._is_reading = False
        for _ in range(count):
            if choices.integer(0, 29) == 0:
                self.poll()
            pick(choices, _WEIGHTED)(self, choices)
        self._is_reading = True

    def recover(self) -> float:
        """Until all that was submitted is applied; how long that took, in seconds."""
        start = time.monotonic()
        self.sidecar.wait_applied(self.sidecar.submitted_step, TIMEOUT_S)
        return time.monotonic() - start


@contextmanager
def faulty_sidecars(plan: Path) -> Iterator[None]:
    """Books spawned in the block get the test build of the sidecar, whose processes die as the file `plan` says; and
    they may die as often as they like."""
    plan.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncbook.process.SIDECAR_MODULE", "tests.process.faulty_sidecar")
        patch.setattr("asyncbook.supervisor.DEATHS_WINDOW_S", 0.0)
        patch.setattr("tests.property.trio.TIMEOUT_S", TIMEOUT_S)
        patch.setattr(layout, "MIN_OUTPUTS_LOG_BYTES", LOG_BYTES[0])
        patch.setattr(layout, "OVERFLOW_LOG_BYTES", LOG_BYTES[1])
        patch.setenv("ASYNCBOOK_TEST_LOG_BYTES", " ".join(map(str, LOG_BYTES)))
        patch.setenv("ASYNCBOOK_FAULTS", str(plan))
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


def run_points(trio: KilledTrio, plan: Path, points: list[str], seed: int) -> list[str]:
    """Random calls while one sidecar after the other dies at its point. Returns the points where none died."""
    choices = SeededChoices(seed)
    deaths = plan.with_suffix(".deaths")
    deaths.write_text("")
    plan.write_text("\n".join(f"{point} {choices.integer(1, 3)}" for point in points))
    trio.kill()  # the first one has no fault
    progress, num_rounds = "", 0
    try:
        while plan.read_text() or num_rounds < MAX_ROUNDS_A_POINT:
            if len(deaths.read_text().splitlines()) == len(points):
                break
            num_rounds = num_rounds + 1 if plan.read_text() == progress else 0
            progress = plan.read_text()
            if num_rounds == MAX_ROUNDS_A_POINT:
                trio.kill()  # it does not get there
            trio.make_calls(choices, CALLS_A_ROUND)
            trio.recover()
            # While there is none, outputs wait for room, and not else; and only a reader that is long away fills a log.
            if choices.integer(0, ROUNDS_A_SUBSCRIBER - 1) == 0:
                trio.change_subscriber()
        trio.empty()
    except Exception as error:
        error.add_note(f"seed {seed}, died at {deaths.read_text().splitlines()}, then:\n{trio.script()}")
        raise
    return sorted({*points} - {*deaths.read_text().splitlines()})
