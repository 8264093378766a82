"""A device for tests, `BookConfig(device="fake")` or "fake:SEED": memory and compute are the CPU's, but what a stream
is given runs later, in a thread of its own, in order, after random delays, and a copy is done in two pieces with a
pause between them. Whoever reads too early, or writes too late, gets what a GPU would give.

Every torch tensor passes for one on the device; numpy arrays are the CPU's.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
import torch

from asyncbook.ipc.layout import INT32_MIN
from asyncbook.ipc.publish import fence

Work = Callable[[], None]
WAIT_S = 60.0  # for what takes milliseconds: whoever waits longer has found a deadlock
# A pause before each piece of work: how often, and how long on average. Most pieces have none.
PAUSES = ((0.05, 0.001), (0.3, 0.000_1))


def _run(work: SimpleQueue[Work | None], pause: Work, failures: list[BaseException]) -> None:
    while (item := work.get()) is not None:
        try:
            pause()
            item()
        except BaseException as error:
            failures.append(error)


def _pauser(draw: random.Random) -> Work:
    def pause() -> None:
        for share, mean_s in PAUSES:
            if draw.random() < share:
                time.sleep(draw.expovariate(1 / mean_s))
                return

    return pause


class FakeStream:
    """Work in order, in a thread of its own, which ends with the stream."""

    def __init__(self, seed: str) -> None:
        self.pause = _pauser(random.Random(seed))
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self.failures: list[BaseException] = []
        # The thread knows what it needs and not the stream, so that it does not keep it alive.
        threading.Thread(target=_run, args=(self._work, self.pause, self.failures), daemon=True).start()
        weakref.finalize(self, self._work.put, None)

    def give(self, item: Work) -> None:
        """Runs it after all that was given before. Raises what went wrong so far."""
        if self.failures:
            raise self.failures[0]
        self._work.put(item)


class FakeDevice:
    """See the module. `refuses`: what `register` says."""

    refuses = ""

    def __init__(self, seed: int = 0) -> None:
        self.name = f"fake:{seed}"
        self._streams: weakref.WeakSet[FakeStream] = weakref.WeakSet()
        self._current = self.new_stream()
        self.registered: dict[int, int] = {}  # bytes by address

    def owns(self, tensor: torch.Tensor) -> bool:
        return True

    def register(self, address: int, num_bytes: int) -> str:
        assert address not in self.registered
        if not self.refuses:
            self.registered[address] = num_bytes
        return self.refuses

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, 77, dtype=dtype)

    def new_stream(self) -> FakeStream:
        stream = FakeStream(f"{self.name} {len(self._streams)}")
        self._streams.add(stream)
        return stream

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def launch(self, work: Work) -> None:
        """On the current stream: any work, in the place of a kernel."""
        self._current.give(work)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream, half = self._current, target.numel() // 2

        def in_two_pieces() -> None:
            # As a device's: what the stream did before is visible before this, to whoever looks on from the CPU.
            fence()
            if half:
                flat, new = target.view(-1), source.reshape(-1)
                flat[:half] = new[:half]
                stream.pause()
                flat[half:] = new[half:]
            else:
                target.copy_(source)

        stream.give(in_two_pieces)

    def fill(self, target: torch.Tensor, value: int) -> None:
        def fill() -> None:
            target.fill_(value)

        self._current.give(fill)

    def narrow(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def narrow() -> None:
            target.copy_(source)
            target.masked_fill_(target != source, INT32_MIN)

        self._current.give(narrow)

    def follow(self, stream: FakeStream) -> None:
        mark = threading.Event()
        stream.give(mark.set)
        self._current.give(lambda: _wait(mark))

    def record(self) -> threading.Event:
        mark = threading.Event()
        self._current.give(mark.set)
        return mark

    def is_done(self, event: threading.Event) -> bool:
        return event.is_set()

    def wait(self, event: threading.Event) -> None:
        _wait(event)

    def synchronize(self) -> None:
        for stream in list(self._streams):
            with self.on(stream):
                self.wait(self.record())

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        self.wait(self.record())
        array: np.ndarray = tensor.detach().clone().numpy()
        return array


def _wait(mark: threading.Event) -> None:
    assert mark.wait(WAIT_S), "a stream does not get on"
