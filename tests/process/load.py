"""Books under load, and what memory their two processes take meanwhile."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asyncbook import Book, InFlightFull, RequestParams, Row
from tests.conftest import TIMEOUT_S

MIB = 1 << 20


class Memory(NamedTuple):
    """Resident memory in MiB: of each process alone, and of the book that they share."""

    runner: float
    sidecar: float
    shared: float

    def __str__(self) -> str:
        return f"runner {self.runner:.1f} MiB, sidecar {self.sidecar:.1f} MiB, book {self.shared:.1f} MiB"


def _anonymous(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) / 1024


def memory(book: Book) -> Memory:
    """As of now."""
    assert book.sidecar_pid is not None
    shared = os.fstat(book._segment.descriptor).st_blocks * 512 / MIB
    return Memory(_anonymous(os.getpid()), _anonymous(book.sidecar_pid), shared)


class Engine:
    """Requests that come and go, as many at a time as there are rows. Counts what each should get."""

    def __init__(self, book: Book, seed: int, max_prompt: int, max_tokens: int) -> None:
        self.book = book
        self.num_requests = self.num_steps = self.num_tokens = 0
        self.expected: Counter[str] = Counter()
        self._random = np.random.default_rng(seed)
        self._max_prompt, self._max_tokens = max_prompt, max_tokens
        self._prompt = self._random.integers(0, 100, max_prompt, dtype=np.int32)
        self._rows: dict[Row, tuple[str, int]] = {}  # the request, and how many tokens are to come
        self._ids = self._random.integers(0, 100, book.config.max_num_reqs, dtype=np.int32)

    def step(self) -> None:
        """Fills free rows, submits a step for all, releases what is done. Lengths are mixed: most are short."""
        book, admitted = self.book, False
        while len(self._rows) < book.config.max_num_reqs:
            name, count = str(self.num_requests), int(self._random.integers(1, self._max_tokens + 1))
            length = max(1, int(self._max_prompt * self._random.random() ** 4))
            row = self._sent(lambda n=length, name=name: book.admit(name, self._prompt[:n], RequestParams()))
            self._rows[row] = (name, count)
            self.num_requests += 1
            admitted = True
        if admitted or not hasattr(self, "_batch"):
            self._batch = book.batch(self._rows)
        book.wait_room(TIMEOUT_S)
        self._last = book.submit(self._batch, self._ids[: len(self._rows)])
        self.num_steps += 1
        self.num_tokens += len(self._rows)
        for row, (name, left) in list(self._rows.items()):
            self.expected[name] += 1
            if left == 1:
                del self._rows[row]
                self._sent(lambda row=row: book.release(row))
            else:
                self._rows[row] = (name, left - 1)

    def _sent(self, call: Callable[[], Row]) -> Row:
        """The call, once there is room for it."""
        while True:
            try:
                return call()
            except InFlightFull:
                self.book.wait_applied(self._last, TIMEOUT_S)

    def finish(self) -> None:
        """Releases all, and waits until that is applied."""
        for row in self._rows:
            self.book.release(row)
        self._rows.clear()
        self.book.wait_room(TIMEOUT_S)
        self.book.wait_applied(self.book.submit(self.book.batch([]), self._ids[:0]), TIMEOUT_S)


def read_all(book: Book) -> Counter[str]:
    """What is delivered, tokens by request."""
    delivered: Counter[str] = Counter()
    for outputs in book.poll_outputs():
        for name, count in zip(outputs.request_ids, np.diff(outputs.offsets).tolist(), strict=True):
            delivered[name] += count
    return delivered


def run_unread(book: Book, seed: int, num_tokens: int) -> tuple[Memory, Memory, Engine]:
    """Takes no output while so many tokens are sampled: memory after a twentieth of them and at the end."""
    engine = Engine(book, seed, max_prompt=60, max_tokens=400)
    while engine.num_tokens < num_tokens // 20:
        engine.step()
    early = memory(book)
    while engine.num_tokens < num_tokens:
        engine.step()
    engine.finish()
    return early, memory(book), engine


def run_mixed(book: Book, seed: int, num_requests: int, max_prompt: int) -> list[Memory]:
    """Memory at ten moments while so many requests of mixed length come and go, and when all are gone."""
    engine = Engine(book, seed, max_prompt, max_tokens=6)
    seen: list[Memory] = []
    while engine.num_requests < num_requests:
        engine.step()
        book.poll_outputs()
        if engine.num_requests >= (len(seen) + 1) * num_requests / 10:
            seen.append(memory(book))
    engine.finish()
    book.poll_outputs()
    return [*seen, memory(book)]
