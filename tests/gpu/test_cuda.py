"""What only a CUDA device can show. `pytest -m gpu tests/gpu`; left out everywhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from asyncbook import Book  # noqa: E402
from asyncbook.__main__ import main  # noqa: E402
from asyncbook.ipc.errors import ContractError  # noqa: E402
from tests.conftest import TIMEOUT_S, MakeBook, columns, step, tokens  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def book(make_book: MakeBook) -> Book:
    """A small empty book on the first device."""
    return make_book(device="cuda:0")


@contextmanager
def nobody_waits() -> Iterator[None]:
    """torch raises where a call waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_pages_are_pinned(book: Book, kind: str) -> None:
    link = book._device.link
    assert link is not None
    assert link.is_pinned
    assert link.brings_ids == (kind != "embedded")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_may_be_written_over_at_once_and_nobody_waits(book: Book, kind: str, dtype: Any) -> None:
    if kind == "embedded":
        return
    row = book.admit("a", [1])
    batch = book.batch([row])
    sampled = torch.empty((1, 3), dtype=dtype, device="cuda:0")
    drafts = torch.empty((1, 2), dtype=dtype, device="cuda:0")
    first, second = (torch.tensor([ids], dtype=dtype, device="cuda:0") for ids in ([1, 2, 3], [9, 9, 9]))
    step(book, [], [])
    with nobody_waits():
        for ids in (first, second):
            torch.cuda._sleep(10_000_000)
            sampled.copy_(ids)
            drafts.fill_(4)
            number = book.submit(batch, sampled, draft_token_ids=drafts)
            sampled.fill_(8)
            drafts.fill_(8)
    book.wait_applied(number, TIMEOUT_S)
    assert tokens(book, row) == [1, 1, 2, 3, 9, 9, 9, 4, 4]


def test_ids_out_of_range(book: Book) -> None:
    rows = [book.admit(name, [1]) for name in "abcd"]
    number = book.submit(book.batch(rows), torch.tensor([2**31, -(2**40), 5, 100], device="cuda:0"))
    book.wait_applied(number, TIMEOUT_S)
    shown = [(columns(book, row)["stop_reason"], columns(book, row)["num_output_tokens"]) for row in rows]
    assert shown == [(-(2**31), 0), (-(2**31), 0), (-1, 1), (100, 0)]


def test_a_frame_on_the_device(book: Book) -> None:
    row = book.admit("a", [1])
    side = torch.cuda.Stream()
    for token_id in range(50):
        number = step(book, [row], [token_id])
        frame = book.frame(number)
        with nobody_waits():
            copied = frame.to_device(side if token_id % 2 else None)
        torch.cuda.synchronize()
        assert copied.block.device.type == "cuda"
        for name, column in copied.items():
            assert np.array_equal(column.cpu().numpy(), getattr(frame, name)), name
        book.wait_room(TIMEOUT_S)


def test_the_sidecar_has_no_context(book: Book, kind: str) -> None:
    if kind != "embedded":
        assert "libcuda" not in Path(f"/proc/{book.sidecar_pid}/maps").read_text()


def test_a_graph_that_is_being_recorded_holds_no_step(book: Book) -> None:
    batch, ids = book.batch([book.admit("a", [1])]), torch.zeros(1, dtype=torch.int32, device="cuda:0")
    step(book, [], [])
    with pytest.raises(ContractError, match="graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        book.submit(batch, ids)


def test_an_error_of_the_runtime_is_not_left_behind() -> None:
    from asyncbook.device.cuda import CudaDevice

    assert CudaDevice(0).register(4096, 4096) != ""  # no such memory
    torch.zeros(1, device="cuda:0").add_(1)
    torch.cuda.synchronize()


def test_the_benchmark_runs(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    arguments = ["bench", "gpu", "--device", "cuda:0", "--tiny", "--json", str(path)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["random steps"]["wrong"] == 0
