"""Each race between the runner, the bookkeeper and a device: its permitted outcomes, by all interleavings of a model.

The model is total store order with a store buffer a thread: a store becomes visible later, in order, and a fence waits
for that. It is what x86-64 does; a release-store and an acquire-load are plain there, and on a weaker machine they keep
exactly the orders that the model keeps. What the second half shows: the code takes the same steps in the same order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asyncbook import linked
from asyncbook.ipc.layout import NO_WAKE
from asyncbook.sidecar import SidecarBook
from asyncbook.worker import duty
from asyncbook.worker.arrival import Arrivals
from asyncbook.worker.duty import DutyCycle
from asyncbook.worker.idle import Idle

Step = tuple[Any, ...]  # ("store", word, value), ("load", word), ("fence",)
Outcome = tuple[tuple[int, ...], ...]  # what each thread loaded, in order


def outcomes(*threads: list[Step]) -> set[Outcome]:
    """Every outcome that some interleaving has. Words start at 0."""
    found: set[Outcome] = set()
    seen = set()
    none: tuple[Any, ...] = tuple(() for _ in threads)
    todo: list[Any] = [(tuple(0 for _ in threads), (), none, none)]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        places, memory, buffers, loaded = state
        if all(place == len(thread) for place, thread in zip(places, threads, strict=True)) and not any(buffers):
            found.add(loaded)
        for index, thread in enumerate(threads):
            if buffers[index]:  # the oldest store becomes visible
                (word, value), *rest = buffers[index]
                words = tuple(sorted({**dict(memory), word: value}.items()))
                todo.append((places, words, put(buffers, index, tuple(rest)), loaded))
            if places[index] == len(thread):
                continue
            kind, *arguments = thread[places[index]]
            after = put(places, index, places[index] + 1)
            if kind == "store":
                todo.append((after, memory, put(buffers, index, (*buffers[index], tuple(arguments))), loaded))
            elif kind == "load":
                value = {**dict(memory), **dict(buffers[index])}.get(arguments[0], 0)
                todo.append((after, memory, buffers, put(loaded, index, (*loaded[index], value))))
            elif not buffers[index]:  # a fence, which waits for the buffer
                todo.append((after, memory, buffers, loaded))
    return found


def put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


# Somebody says that it sleeps and looks once more; somebody else stores work and looks for a sleeper.

SLEEPER: list[Step] = [("store", "sleeping", 1), ("fence",), ("load", "step")]
WAKER: list[Step] = [("store", "step", 1), ("fence",), ("load", "sleeping")]
SLEPT_OVER: Outcome = ((0,), (0,))  # the sleeper saw no work, the waker saw no sleeper


def test_no_step_is_slept_over() -> None:
    """The bookkeeper before it sleeps and the runner with a step; the runner that waits and the bookkeeper with one."""
    assert outcomes(SLEEPER, WAKER) == {((1,), (0,)), ((0,), (1,)), ((1,), (1,))}


@pytest.mark.parametrize(
    "threads",
    [
        (SLEEPER, [step for step in WAKER if step != ("fence",)]),
        ([step for step in SLEEPER if step != ("fence",)], WAKER),
        ([SLEEPER[2], SLEEPER[0], SLEEPER[1]], WAKER),
        (SLEEPER, [WAKER[2], WAKER[0], WAKER[1]]),
    ],
    ids=["no fence in the waker", "no fence in the sleeper", "the sleeper looks first", "the waker looks first"],
)
def test_any_other_order_would_sleep_over_a_step(threads: tuple[list[Step], list[Step]]) -> None:
    assert SLEPT_OVER in outcomes(*threads)


# A slot of the ring: the runner describes the step, a device brings its ids, in whatever order.

RUNNER: list[Step] = [("store", "header", 1), ("store", "described", 1)]
DEVICE: list[Step] = [("store", "ids", 1), ("store", "arrived", 1)]
READER: list[Step] = [("load", "described"), ("load", "arrived"), ("load", "header"), ("load", "ids")]


def test_a_step_that_is_described_and_has_arrived_is_whole() -> None:
    seen = {loaded[2] for loaded in outcomes(RUNNER, DEVICE, READER)}
    assert {(header, ids) for described, arrived, header, ids in seen if described and arrived} == {(1, 1)}
    assert all(header for described, _, header, _ in seen if described)
    assert any(described and not arrived for described, arrived, *_ in seen)  # submitted, its ids on their way
    assert any(arrived and not described for described, arrived, *_ in seen)  # a device can be first


def test_a_word_before_its_ids_would_be_torn() -> None:
    seen = {loaded[2] for loaded in outcomes(RUNNER, DEVICE[::-1], READER)}
    assert any(described and arrived and not ids for described, arrived, _, ids in seen)


# The code. (The kernel with which the runner stores a step and looks for a sleeper: test_publish.py.)


class Recorder:
    """Stands for a word, a ring or a channel, and writes down what is done to it."""

    def __init__(self, name: str, log: list[str], **answers: Any) -> None:
        self._name, self._log, self._answers = name, log, answers

    def __getattr__(self, call: str) -> Any:
        def record(*arguments: Any, **options: Any) -> Any:
            shown = ", ".join(map(str, arguments)) if call in ("store_release", "is_submitted") else ""
            self._log.append(f"{self._name}.{call}({shown})")
            answer = self._answers.get(call)
            return answer.pop(0) if isinstance(answer, list) else answer

        return record


def duty_cycle(log: list[str], **parts: Any) -> DutyCycle:
    cycle = DutyCycle.__new__(DutyCycle)
    cycle._ledger = SimpleNamespace(step=6, applied_seq=9)  # type: ignore[assignment]
    cycle._idle_policy = Recorder("policy", [], idle=Idle.SLEEP)
    cycle._arrivals = Arrivals.__new__(Arrivals)
    cycle._arrivals.is_waiting = False
    cycle._has_all_delivered = True
    cycle._log = SimpleNamespace(overflow=Recorder("overflow", []))  # type: ignore[assignment]
    cycle._is_sleeping = Recorder("is_sleeping", log)  # type: ignore[assignment]
    cycle._channel = Recorder("channel", log, wait_command=True)  # type: ignore[assignment]
    cycle._subscribers = Recorder("subscribers", [])  # type: ignore[assignment]
    for name, part in parts.items():
        setattr(cycle, name, part)
    return cycle


@pytest.mark.parametrize("comes", [False, True])
def test_the_bookkeeper_says_that_it_sleeps_then_looks(monkeypatch: pytest.MonkeyPatch, comes: bool) -> None:
    log: list[str] = []
    monkeypatch.setattr(duty, "fence", lambda: log.append("fence"))
    ring = Recorder("ring", log, is_submitted=[False, comes])  # before it is said, and after
    assert duty_cycle(log, _ring=ring)._wait()
    waits = [] if comes else ["channel.wait_command()"]
    said = ["is_sleeping.store_release(1)", "fence", "ring.is_submitted(7)"]
    assert log == ["ring.is_submitted(7)", *said, *waits, "is_sleeping.store_release(0)"]


@pytest.mark.parametrize("awaited", [6, 7, NO_WAKE])
def test_the_bookkeeper_looks_for_a_sleeping_runner_behind_a_fence(
    monkeypatch: pytest.MonkeyPatch, awaited: int
) -> None:
    log: list[str] = []
    monkeypatch.setattr(duty, "fence", lambda: log.append("fence"))
    wake_at_step = Recorder("wake_at_step", log, load_acquire=awaited)
    monkeypatch.setattr(DutyCycle, "_flush", lambda self: None)
    applied_seq = Recorder("applied_seq", [])
    duty_cycle(log, _wake_at_step=wake_at_step, _woken_at_step=0, _applied_seq=applied_seq)._after_step()
    assert log == ["fence", "wake_at_step.load_acquire()", *(["channel.send_event()"] if awaited == 6 else [])]


def test_the_runner_says_that_it_waits_then_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(linked, "fence", lambda: log.append("fence"))
    monkeypatch.setattr(linked, "SPIN_NS", 0)
    book = SidecarBook.__new__(SidecarBook)
    book._wake_at_step = Recorder("wake_at_step", log)  # type: ignore[assignment]
    book._published_step = Recorder("published_step", log, load_acquire=[6, 6, 7])  # type: ignore[assignment]
    book._channel = Recorder("channel", log, receive_event=None)  # type: ignore[assignment]
    book._process = type("Process", (), {"pidfd": 0, "is_alive": lambda self: True})()  # type: ignore[assignment]
    book._awaited_steps, book._submitted_step, book._known_applied_step = [], 7, 6
    book._is_closed, book._ended_by, book._foreign = False, None, None
    book._supervisor = SimpleNamespace(is_down=False, num_restarts=0)  # type: ignore[assignment]
    book.wait_applied(7)
    assert log == [
        "published_step.load_acquire()",
        "wake_at_step.store_release(7)",
        "fence",
        "published_step.load_acquire()",
        "channel.wait_event()",
        "channel.receive_event()",
        "published_step.load_acquire()",
        f"wake_at_step.store_release({NO_WAKE})",
        "fence",
    ]
