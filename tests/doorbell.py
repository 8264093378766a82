"""Steps through the sample ring with pauses around the moment at which the sidecar goes to sleep."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from asyncbook import Book
from tests.conftest import TIMEOUT_S

SPIN_US = 20
CONFIG: dict[str, Any] = {"max_num_reqs": 2, "vocab_size": 2**30, "spin_us": SPIN_US, "transport": "ring"}
FAR_US = 3 * SPIN_US  # the sidecar looks for SPIN_US after a step, then says that it sleeps, looks again, and sleeps


def run_doorbell(book: Book, num_steps: int, seed: int) -> None:
    """No step is lost, torn or slept over: every wait has a limit, and each id says of which step and row it is.

    `book` was made with `CONFIG` and `max_model_len` for one id a step.
    """
    rng = np.random.default_rng(seed)
    rows = [book.admit(name, [1]) for name in "ab"]
    batch = book.batch(rows)
    committed = np.arange(2 * num_steps, dtype=np.int32).reshape(num_steps, 2)
    # A third comes at once, a third around the boundary, a third at any time; after each the runner waits, or goes on.
    pauses_ns = (rng.choice([0, 1, 2], num_steps) * rng.normal(SPIN_US, SPIN_US / 2, num_steps) * 500).astype(np.int64)
    anywhere = rng.random(num_steps) < 1 / 3
    pauses_ns[anywhere] = rng.integers(0, FAR_US * 1000, int(anywhere.sum()))
    waits = rng.random(num_steps) < 0.5
    for ids, pause_ns, does_wait in zip(committed, pauses_ns.tolist(), waits.tolist(), strict=True):
        until_ns = time.monotonic_ns() + pause_ns
        while time.monotonic_ns() < until_ns:
            pass
        book.wait_room(TIMEOUT_S)
        number = book.submit(batch, ids)
        if does_wait:
            book.wait_applied(number, TIMEOUT_S)
            assert np.array_equal(book.frame(number).last_token_id, ids), f"step {number}, seed {seed}"
    book.wait_applied(book.submitted_step, TIMEOUT_S)
    for i, row in enumerate(rows):
        assert np.array_equal(book.output_token_ids(row), committed[:, i]), f"row {i}, seed {seed}"
        book.release(row)
    book.poll_outputs()
