"""Books that run themselves, for `asyncbook top --demo`: an embedded one and one with a sidecar, a thread each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

import asyncbook
from asyncbook import Book, BookConfig, RequestParams, Row
from asyncbook.top import Watched

NUM_ROWS, VOCAB_SIZE, NUM_SPEC_TOKENS = 64, 32_000, 3
STEP_S = 0.01
CONFIG = BookConfig(
    max_num_reqs=NUM_ROWS,
    max_model_len=512,
    vocab_size=VOCAB_SIZE,
    num_spec_tokens=NUM_SPEC_TOKENS,
    transport="ring",
)


class SelfDriven:
    """Requests of random length that come and go, a step each 10 ms. The book is used from its thread alone."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._rng = np.random.default_rng(0)
        self._rows: dict[int, Row] = {}
        self._num_requests = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        while len(self._rows) < NUM_ROWS:
            params = RequestParams(max_tokens=int(self._rng.integers(20, 200)), eos_token_id=0)
            self._num_requests += 1
            row = self._book.admit(f"request-{self._num_requests}", self._rng.integers(1, VOCAB_SIZE, 16), params)
            self._rows[row.index] = row

    def _run(self) -> None:
        book, width = self._book, 1 + NUM_SPEC_TOKENS
        while not self._stopped.is_set():
            self._fill()
            rows = list(self._rows.values())
            ids = self._rng.integers(1, VOCAB_SIZE, (NUM_ROWS, width), np.int32)
            ids[np.arange(width) > self._rng.integers(0, width, (NUM_ROWS, 1))] = -1
            step = book.submit(book.batch(rows, num_draft_tokens=[NUM_SPEC_TOKENS] * NUM_ROWS), ids)
            self._stopped.wait(STEP_S)
            book.wait_applied(step)
            finish_reasons = book.frame(step).finish_reason
            for index in np.flatnonzero(finish_reasons).tolist():
                book.release(self._rows.pop(index))
            book.poll_outputs()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._thread.join()


@contextmanager
def run_books() -> Iterator[list[Watched]]:
    """Both books, running."""
    with ExitStack() as stack:
        books = {
            "embedded": stack.enter_context(asyncbook.open(CONFIG)),
            "sidecar": stack.enter_context(asyncbook.spawn(CONFIG)),
        }
        for book in books.values():
            stack.callback(SelfDriven(book).stop)
        yield [Watched(name, book.stats, book.sidecar_pid) for name, book in books.items()]
