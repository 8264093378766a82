"""A sidecar without a process that can die at any line: its duty cycle runs in the test's own thread, under a trace.

Of the line in which it dies, any part of what it wrote to the shared memory is there, and the rest is not: that covers
a death in the middle of a kernel as well. All else of it is thrown away. The runner's side is the real one, journal and
all; only the processes, the sockets and the thread that watches are played here.
"""

from __future__ import annotations

import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from asyncbook import BookConfig, StepOutputs
from asyncbook.ipc import broadcast, jit, layout, outputs_log, wire
from asyncbook.ipc.broadcast import BroadcastReader, NamesRecord
from asyncbook.ipc.runtime_dir import start_time
from asyncbook.ipc.segment import Segment
from asyncbook.names import Names
from asyncbook.place import Place
from asyncbook.sidecar import SidecarBook
from asyncbook.supervisor import Link
from asyncbook.worker import bookkeeper, checkpoint, delivery, duty, ledger, logprobs, outbox, subscribers
from asyncbook.worker.idle import SpinThenSleep

MORTAL_MODULES = (
    bookkeeper, broadcast, checkpoint, delivery, duty, ledger, logprobs, outbox, outputs_log, subscribers
)  # fmt: skip
MORTAL_FILES = {module.__file__ for module in MORTAL_MODULES}
UNIT_BYTES = 8  # an aligned store is whole or not there


class Died(BaseException):
    """The sidecar's last moment."""


class Executioner:
    """Lets a call die at a line."""

    def __init__(self, memory: memoryview) -> None:
        self._bytes = np.frombuffer(memory, np.int64)
        self._lines_left = 0
        self._random = random.Random(0)
        self._before: np.ndarray | None = None
        self.num_deaths = 0
        self.died_at: list[str] = []

    def doom(self, num_lines: int, seed: int) -> None:
        """So many lines from now on it dies. `seed` decides what is left of the last one."""
        self._lines_left = num_lines
        self._random = random.Random(seed)

    def run(self, call: Callable[[], Any]) -> bool:
        """Whether it lived through the call."""
        if self._lines_left <= 0:
            call()
            return True
        sys.settrace(self._trace)
        try:
            call()
        except Died:
            self.num_deaths += 1
            return False
        finally:
            sys.settrace(None)
            self._before = None
        return True

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._trace_line if frame.f_code.co_filename in MORTAL_FILES else None

    def _trace_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception":
            return self._trace_line
        if self._before is not None:
            self._tear(self._before)
            raise Died
        self._lines_left -= 1
        if self._lines_left == 0:
            self._before = self._bytes.copy()
            self.died_at.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return self._trace_line

    def _tear(self, before: np.ndarray) -> None:
        """Takes some of what the last line wrote back."""
        written = np.flatnonzero(before != self._bytes)
        share = self._random.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        for index in written.tolist():
            if self._random.random() < share:
                self._bytes[index] = before[index]


class RunnerEnd:
    """In the place of `RunnerChannel`."""

    directory = Path("/nowhere")
    events_descriptor = -1

    def __init__(self, sidecar: MortalSidecar) -> None:
        self._sidecar = sidecar

    def send_command(self, data: bytes) -> bool:
        if not self._sidecar.is_alive:
            return False
        self._sidecar.commands.append(bytes(data))
        return True

    def ring_doorbell(self) -> None:
        self.send_command(b"")

    def wait_command_room(self, timeout_ms: int) -> bool:
        return self._sidecar.is_alive

    def receive_event(self) -> bytes | None:
        return self._sidecar.events.popleft() if self._sidecar.events else None

    def wait_event(self, timeout_ms: int | None, *other_descriptors: int) -> None:
        self._sidecar.work()

    def end_waits(self) -> None:
        pass

    def close(self) -> None:
        pass


class MortalSidecar:
    """In the place of `SidecarProcess` and `SidecarChannel`. It works when the runner waits for it."""

    pid = None
    pidfd = -1

    def __init__(self, config: BookConfig, segment: Segment, executioner: Executioner, memory: memoryview,
                 on_death: Callable[[], None], *, is_restart: bool) -> None:  # fmt: skip
        self._config, self._segment, self._memory = config, segment, memory
        self._executioner, self._on_death, self._is_restart = executioner, on_death, is_restart
        self.commands: deque[bytes] = deque()
        self.asked: deque[wire.AnySubscriberMessage] = deque()
        self.answered: deque[wire.AnySubscriberReply] = deque()
        self.events: deque[bytes] = deque()
        self.is_dead = False
        self._duty: duty.DutyCycle | None = None

    # As a process

    @property
    def is_alive(self) -> Any:
        return _Truth(not self.is_dead)

    def shake_hands(self, timeout_s: float) -> None:
        self._start()

    def has_become_ready(self) -> bool:
        self._live(self._start)
        return not self.is_dead

    def is_ours(self) -> bool:
        return True

    def wait_ended(self) -> bool:
        return True

    def stop(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def describe_end(self) -> str:
        return "killed by the test"

    # As a sidecar

    def _start(self) -> None:
        self._duty = duty.DutyCycle(
            self._segment.layout, self._memory, self._config.vocab_size, self, SpinThenSleep(0),  # type: ignore[arg-type]
            is_restart=self._is_restart, runner_reads_outputs=self._config.runner_reads_outputs,
        )  # fmt: skip

    def work(self) -> None:
        """Until there is nothing to do, or it dies."""
        if self._duty is not None and not self.is_dead:
            self._live(self._duty.run)

    def _live(self, call: Callable[[], Any]) -> None:
        if not self._executioner.run(call):
            self.is_dead = True
            self._on_death()

    def receive_command(self) -> bytes | None:
        return self.commands.popleft() if self.commands else None

    def wait_command(self, timeout_ms: int | None) -> bool:
        return bool(self.commands)  # False ends `DutyCycle.run`, which can be called again

    def receive_from_subscriber(self) -> tuple[bytes, bytes] | None:
        return (b"subscriber", wire.encode(self.asked.popleft())) if self.asked else None

    def send_to_subscriber(self, who: bytes, reply: wire.AnySubscriberReply) -> bool:
        self.answered.append(reply)
        return True

    def send_event(self, event: wire.Event, timeout_ms: int = 1000) -> bool:
        self.events.append(wire.encode(event))
        return True


class _Truth:
    """A flag that may be called: the process's `is_alive()` and the channel's question share a name."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def __bool__(self) -> bool:
        return self._value

    def __call__(self) -> bool:
        return self._value


class Undertaker:
    """In the place of `Supervisor`: another sidecar is there at once."""

    changed_descriptor = -1
    reason = ""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.is_down = False
        self.replacement: Link | None = None
        self.make_link: Callable[[], Link] = lambda: link
        self.num_restarts = 0

    def on_death(self) -> None:
        self.is_down = True
        self.replacement = self.make_link()

    def wait_noticed(self) -> None:
        pass

    def take_news(self) -> bool:
        return False

    def take_retired(self) -> list[Link]:
        return []

    def adopt(self, link: Link) -> bool:
        if self.replacement is not link:
            return False
        self.link, self.replacement = link, None
        self.num_restarts += 1
        self.is_down = False
        return True

    def stand_down(self) -> None:
        pass

    def end(self) -> None:
        pass


class MortalBook(SidecarBook):
    """A `SidecarBook` whose sidecar dies when `doom` says so."""

    executioner: Executioner

    @classmethod
    def open(cls, config: BookConfig) -> MortalBook:
        """Its outputs logs are as small as they can be."""
        with pytest.MonkeyPatch.context() as patch:
            segment = Segment.create(config.layout)
            memory = segment.writable()
            executioner = Executioner(memory)
            keepers: list[Undertaker] = []

            def make_link(*, is_restart: bool = True) -> Link:
                sidecar = MortalSidecar(
                    config, segment, executioner, memory, lambda: keepers[0].on_death(), is_restart=is_restart
                )
                return Link(RunnerEnd(sidecar), sidecar)  # type: ignore[arg-type]

            def supervise(config: BookConfig, descriptor: int, place: Place, link: Link) -> Undertaker:
                keepers.append(Undertaker(link))
                keepers[0].make_link = make_link
                return keepers[0]

            patch.setattr("asyncbook.linked.Supervisor", supervise)
            jit.compile_all()
            place = Place(config, segment, is_embedded=False)
            book = cls(config, segment, place, *make_link(is_restart=False))
        book.executioner = executioner
        return book

    def work(self) -> None:
        """Lets the sidecar do all that is to be done."""
        while True:
            self._process.work()  # type: ignore[attr-defined]
            if not self._supervisor.is_down:
                return
            self._check_alive()

    def subscribe(self) -> Listener:
        """The outputs from now on, as another process gets them."""
        sidecar: Any = self._process
        started = start_time(os.getpid())
        assert started is not None
        sidecar.asked.append(wire.Subscribe(b"", os.getpid(), started, 0))
        sidecar.work()
        reply = sidecar.answered.popleft()
        assert isinstance(reply, wire.Subscribed)
        return Listener(self._segment, reply, has_texts=self.config.tokenizer is not None)

    def poll_outputs(self) -> list[StepOutputs]:
        self._process.work()  # type: ignore[attr-defined]
        return super().poll_outputs()


class Listener:
    """In the place of `Subscription`: it has no socket to be woken through."""

    def __init__(self, segment: Segment, reply: wire.Subscribed, *, has_texts: bool) -> None:
        self._names = Names(has_texts=has_texts)
        self._learn(reply.requests)
        self._log = BroadcastReader(segment.layout, segment.readable(), reply.position, reply.epoch)

    def _learn(self, requests: list[wire.Named]) -> None:
        for named in requests:
            self._names.put(named.request_no, named.request_id, named.stop)

    def poll_outputs(self) -> list[StepOutputs]:
        """What was broadcast since the last call."""
        outputs = []
        while (record := self._log.take()) is not None:
            if isinstance(record, NamesRecord):
                self._learn(wire.decode_names(record.data))
            else:
                outputs.append(self._names.step_outputs(record.step, record.columns))
        return outputs


@contextmanager
def small_logs(outputs_bytes: int, overflow_bytes: int) -> Iterator[None]:
    """Books made in the block have logs of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "MIN_OUTPUTS_LOG_BYTES", outputs_bytes)
        patch.setattr(layout, "OVERFLOW_LOG_BYTES", overflow_bytes)
        patch.setattr(layout, "BROADCAST_LOG_BYTES", 1 << 18)
        yield
