"""`Frame.torch` and `Frame.to_device`: the columns as tensors, shared and copied."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from asyncbook import Book, FrameExpired  # noqa: E402
from asyncbook.ipc.layout import COLUMN_DTYPES  # noqa: E402
from tests.conftest import MakeBook, step  # noqa: E402


def equal(frame_columns: object, tensors: object) -> bool:
    """Every column, by value and dtype."""
    for name, dtype in COLUMN_DTYPES.items():
        column = getattr(tensors, name).numpy()
        assert column.dtype == dtype
        np.testing.assert_array_equal(column, getattr(frame_columns, name), err_msg=name)
    return True


def test_tensors_show_the_frame(book: Book) -> None:
    rows = [book.admit(name, [1, 2]) for name in "abc"]
    step(book, rows, [[5, 6], [7, -1], [8, 9]], drafts=[[1], [2], [3]])
    frame = book.frame()
    assert equal(frame, frame.torch)
    assert equal(frame, frame.to_device())
    assert list(frame.torch) == list(COLUMN_DTYPES)
    assert len(frame.torch) == len(COLUMN_DTYPES)
    assert frame.torch["num_tokens"].tolist() == frame.num_tokens.tolist()
    with pytest.raises(AttributeError, match="num_rows"):
        _ = frame.torch.num_rows
    with pytest.raises(KeyError):
        frame.torch["num_rows"]


def test_tensors_share_the_memory_and_a_copy_does_not(book: Book) -> None:
    row = book.admit("a", [1])
    number = step(book, [row], [5])
    shared, copied = book.frame(number).torch, book.frame(number).to_device()
    assert shared.last_token_id.data_ptr() == book.frame(number).last_token_id.ctypes.data
    for token_id in (6, 7, 8, 9):  # the fourth lies where the frame lay
        step(book, [row], [token_id])
    assert int(shared.last_token_id[row.index]) == 9
    assert int(copied.last_token_id[row.index]) == 5
    with pytest.raises(FrameExpired):
        book.frame(number).to_device()


def test_an_expired_frame_is_not_copied(book: Book) -> None:
    frame = book.frame(step(book, [], []))
    for _ in range(4):
        step(book, [], [])
    with pytest.raises(FrameExpired, match=f"step {frame.step}"):
        frame.to_device()


def test_tensors_outlive_the_book(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    row = book.admit("a", [1, 2, 3])
    step(book, [row], [5])
    tensors = book.frame().torch
    book.close()
    del book
    assert tensors.num_tokens.tolist()[row.index] == 4


def test_a_write_is_stopped() -> None:
    program = """
import numpy as np, asyncbook
book = asyncbook.open(asyncbook.BookConfig(max_num_reqs=2, max_model_len=8, vocab_size=10))
tensors = book.frame().torch
print(tensors.num_tokens.sum().item(), flush=True)
tensors.num_tokens.fill_(1)
print("written")
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False, timeout=100
    )
    assert (ran.returncode, ran.stdout) == (-signal.SIGSEGV, "0\n"), ran.stderr
