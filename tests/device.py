"""The fake device in tests: held back, let go, and a long run whose every id and frame is checked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from asyncbook import Book
from asyncbook.device.fake import FakeDevice, FakeStream
from tests.conftest import TIMEOUT_S


def device_of(book: Book) -> FakeDevice:
    """The fake device of a book that was made with `device="fake"`."""
    link = book._device.link
    assert link is not None
    assert isinstance(link.device, FakeDevice)
    return link.device


@contextmanager
def held(device: FakeDevice, stream: FakeStream | None = None) -> Iterator[None]:
    """What is given to the stream (the current one) inside the block, or copied from it, happens after the block."""
    gate = threading.Event()
    with device.on(stream or device.current_stream()):
        device.launch(lambda: _pass(gate))
    try:
        yield
    finally:
        gate.set()


def _pass(gate: threading.Event) -> None:
    assert gate.wait(TIMEOUT_S)


def finish(device: FakeDevice) -> None:
    """Until the current stream has done all that it was given."""
    device.wait(device.record())


CONFIG: dict[str, Any] = {"max_num_reqs": 9, "vocab_size": 2**30, "num_spec_tokens": 2}


def run_device_steps(book: Book, num_steps: int, seed: int) -> None:
    """Steps whose ids a fake device samples into one buffer, over and over, while frames are copied to it.

    Each id says of which step, row and position it is, so ids of two steps in one (torn), of an earlier one (late) or
    of a later one (too early) are told apart. `book` was made with `CONFIG`, and `max_model_len` for 3 ids a step.
    """
    device, rng = device_of(book), np.random.default_rng(seed)
    rows = [book.admit(f"request-{i}", [1]) for i in range(CONFIG["max_num_reqs"])]
    n = len(rows)
    batch = book.batch(rows)
    side = device.new_stream()
    dtypes = torch.int32, torch.int64
    buffers = {(width, dtype): torch.empty((n, width), dtype=dtype) for width in (1, 2, 3) for dtype in dtypes}
    first = book.applied_step + 1
    copied: list[tuple[int, Any]] = []
    expected: list[np.ndarray] = []
    for index in range(num_steps):
        width = int(rng.integers(1, 4))
        ids = index * 30 % 2**29 + 3 * np.arange(n)[:, None] + np.arange(width)
        buffer = buffers[width, dtypes[rng.integers(2)]]
        sampled = torch.from_numpy(ids)
        device.launch(lambda buffer=buffer, sampled=sampled: buffer.copy_(sampled))  # type: ignore[misc]
        book.wait_room(TIMEOUT_S)
        number = book.submit(batch, ids if rng.random() < 0.1 else buffer)
        device.launch(lambda buffer=buffer: buffer.fill_(-7))  # type: ignore[misc]
        expected.append(ids)
        if rng.random() < 0.3:
            frame = book.frame()
            copied.append((frame.step, frame.to_device(side if rng.random() < 0.5 else None)))
        if rng.random() < 0.2:
            book.wait_applied(number, TIMEOUT_S)
            assert np.array_equal(book.frame(number).last_token_id, ids[:, -1]), f"step {number}, seed {seed}"
        if len(copied) > 1000 or index == num_steps - 1:
            _check_copies(device, side, copied, first, expected)
            copied.clear()
    book.wait_applied(book.submitted_step, TIMEOUT_S)
    committed = np.concatenate(expected, axis=1)
    for i, row in enumerate(rows):
        assert np.array_equal(book.output_token_ids(row), committed[i]), f"row {i}, seed {seed}"
        book.release(row)


def _check_copies(
    device: FakeDevice, side: FakeStream, copied: list[tuple[int, Any]], first: int, expected: list[np.ndarray]
) -> None:
    finish(device)
    with device.on(side):
        finish(device)
    for step, columns in copied:
        if step >= first:
            assert np.array_equal(columns.last_token_id.numpy(), expected[step - first][:, -1]), f"frame of step {step}"
