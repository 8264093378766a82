"""Group G of the cases from the field: pinned memory and copies, on a fake device whose copies happen late.

`test_cases_eg.py` has those of its tests that need no device.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from asyncbook import Book, InFlightFull, InvalidBatch, NotApplied, SidecarTimeout  # noqa: E402
from asyncbook.device import api  # noqa: E402
from asyncbook.device.cuda import CudaDevice  # noqa: E402
from asyncbook.device.fake import FakeDevice  # noqa: E402
from tests.conftest import TIMEOUT_S, MakeBook, columns, have, refused, step, tokens  # noqa: E402
from tests.device import device_of, finish, held  # noqa: E402


@pytest.fixture
def book(make_book: MakeBook) -> Book:
    """A small empty book with a fake device."""
    return make_book(device="fake")


def late(book: Book) -> Any:
    """Holds back what the device samples, where a book can wait: an embedded one fetches the ids before it returns."""
    return nullcontext() if book.sidecar_pid is None else held(device_of(book))


# G1: memory is written anew while a copy of it is pending.


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_g1_a_tensor_may_be_written_over_by_the_next_step(book: Book, dtype: Any) -> None:
    device, row = device_of(book), book.admit("a", [1])
    batch, sampled, drafts = book.batch([row]), torch.zeros((1, 3), dtype=dtype), torch.zeros((1, 2), dtype=dtype)
    with late(book):
        device.launch(lambda: sampled.copy_(torch.tensor([[1, 2, 3]])))
        device.launch(lambda: drafts.copy_(torch.tensor([[4, 5]])))
        book.submit(batch, sampled, draft_token_ids=drafts)
        device.launch(lambda: sampled.fill_(9))
        device.launch(lambda: drafts.fill_(6))
        number = book.submit(batch, sampled, draft_token_ids=drafts)
        device.launch(lambda: sampled.fill_(8))
        device.launch(lambda: drafts.fill_(8))
    book.wait_applied(number, TIMEOUT_S)
    assert tokens(book, row) == [1, 1, 2, 3, 9, 9, 9, 6, 6]


def test_g1_a_frame_being_copied_is_not_written(book: Book) -> None:
    device, row = device_of(book), book.admit("a", [1])
    number = step(book, [row], [[1, 2, 3]])
    frame, side = book.frame(number), device.new_stream()
    shown = columns(book, row)
    with held(device, side):
        copied = frame.to_device(side)
        for _ in range(3):  # max_in_flight + 1: the other slots of the frame ring
            step(book, [], [])
        for _ in range(2):
            with pytest.raises(InFlightFull) as caught:
                book.submit(book.batch([]), np.zeros(0, np.int32))
            for fragment in (f"step {number + 4}", f"step {number}", "copied"):
                assert fragment in str(caught.value)
        assert book.applied_step == number + 3
        with pytest.raises(SidecarTimeout, match=f"step {number}"):
            book.wait_room(0.01)
        frame.check()
    book.wait_room(TIMEOUT_S)
    step(book, [], [])
    assert {name: int(copied[name].numpy()[row.index]) for name in shown} == shown


async def test_g1_room_waits_for_the_copy(book: Book) -> None:
    device = device_of(book)
    step(book, [], [])
    side = device.new_stream()
    with held(device, side):
        book.frame().to_device(side)
        for _ in range(3):
            step(book, [], [])
        room = asyncio.ensure_future(book.room())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(room), 0.01)
    await asyncio.wait_for(room, TIMEOUT_S)
    step(book, [], [])


def test_g1_a_copy_that_is_done_holds_nothing_up(book: Book) -> None:
    device = device_of(book)
    for number in range(20):
        book.wait_room(TIMEOUT_S)
        step(book, [], [])
        book.frame().to_device()
        if number % 3 == 2:
            finish(device)
    finish(device)
    step(book, [], [])
    assert book._copies.pending == []


# G2: a number is read before it is there.


def test_g2_nothing_is_read_before_the_device_has_brought_it(book: Book, kind: str) -> None:
    if kind == "embedded":
        return  # its calls are applied before they return: the next test
    device, row = device_of(book), book.admit("a", [1])
    before = step(book, [row], [5], drafts=[[6, 7, 8]])
    waits = book.stats().wait_for_tokens_us.count
    batch, sampled = book.batch([row], num_draft_tokens=[3]), torch.zeros((1, 4), dtype=torch.int32)
    with held(device):
        device.launch(lambda: sampled.copy_(torch.tensor([[6, 7, 8, 9]])))
        number = book.submit(batch, sampled)
        book.abort(row)  # behind the step, whenever its ids come
        with pytest.raises(NotApplied, match=f"step {number}"):
            book.frame(number)
        with pytest.raises(SidecarTimeout):
            book.wait_applied(number, 0.05)
        assert book.applied_step == before
        assert have(book, row, num_accepted_tokens=0)
    book.wait_applied(number, TIMEOUT_S)
    assert int(book.frame(number).num_accepted_tokens[row.index]) == 3
    step(book, [], [])
    assert have(book, row, num_output_tokens=5, last_token_id=9)
    histogram = book.stats().wait_for_tokens_us
    assert histogram.count > waits
    assert histogram.us_max > 1000  # the step was seen to wait


def test_g2_an_embedded_book_waits_for_the_ids(make_book: MakeBook) -> None:
    with make_book(device="fake", fresh=True) as book:
        if book.sidecar_pid is not None:
            return
        device, row = device_of(book), book.admit("a", [1])
        sampled = torch.zeros(1, dtype=torch.int64)
        device.launch(lambda: time.sleep(0.02))
        device.launch(lambda: sampled.fill_(7))
        book.submit(book.batch([row]), sampled)
        assert tokens(book, row) == [1, 7]


def test_g2_a_column_on_the_device_is_that_of_its_step(book: Book) -> None:
    device, row = device_of(book), book.admit("a", [1])
    batch, copied = book.batch([row]), []
    for token_id in range(15):
        book.wait_room(TIMEOUT_S)
        number = step(book, batch, [token_id])
        copied.append(book.frame(number).to_device())
    finish(device)
    assert [int(frame.last_token_id[row.index]) for frame in copied] == list(range(15))


# G4: start fails where pinning is missing.


@pytest.mark.parametrize("seed", [4])
def test_g4_without_pinned_memory(
    make_book: MakeBook, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    monkeypatch.setattr(FakeDevice, "refuses", "no pinned memory on this system")
    monkeypatch.setattr(api, "_refusals", {})
    api._say_pageable.cache_clear()
    with caplog.at_level(logging.WARNING, "asyncbook"):
        for _ in range(2):
            book = make_book(device=f"fake:{seed}", fresh=True)
            works_with_pageable_memory(book)
            book.close()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "pageable" in warning
    assert "no pinned memory on this system" in warning


def works_with_pageable_memory(book: Book) -> None:
    device, row = device_of(book), book.admit("a", [1])
    sampled = torch.zeros((1, 2), dtype=torch.int64)
    device.launch(lambda: sampled.copy_(torch.tensor([[5, 6]])))
    number = book.submit(book.batch([row]), sampled, draft_token_ids=torch.tensor([[7]]))
    sampled.fill_(9)  # the ids were fetched before it returned
    book.wait_applied(number, TIMEOUT_S)
    assert tokens(book, row) == [1, 5, 6, 7]
    copied = book.frame().to_device()
    assert book._copies.pending == []
    assert int(copied.last_token_id[row.index]) == 6
    assert device.registered == {}


@contextmanager
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cached in (api._count_cuda_devices, api._say_pageable):
        cached.cache_clear()
    yield
    for cached in (api._count_cuda_devices, api._say_pageable):
        cached.cache_clear()


def test_g4_without_a_device(
    make_book: MakeBook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with no_cuda(monkeypatch), caplog.at_level(logging.WARNING, "asyncbook"):
        for _ in range(2):
            book = make_book(device="cuda:0", fresh=True)
            row = book.admit("a", [1])
            step(book, [row], torch.tensor([5]))
            assert book.frame().to_device().last_token_id.tolist()[row.index] == 5
            book.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# G5, on a device: what comes through a list of indices, or in strides, arrives.


def test_g5_tensors_in_any_order_of_memory(book: Book) -> None:
    rows = [book.admit(name, [1]) for name in "abc"]
    everything = torch.arange(40).view(4, 10)
    batch = book.batch(rows)
    number = book.submit(batch, everything[[2, 0, 3]][:, [2, 0]], draft_token_ids=everything.t()[:3, ::2])
    book.wait_applied(number, TIMEOUT_S)
    assert [tokens(book, row) for row in rows] == [[1, 22, 20, 0, 20], [1, 2, 0, 1, 21], [1, 32, 30, 2, 22]]


def test_g5_ids_out_of_range_end_their_row_as_those_of_the_cpu_do(book: Book) -> None:
    rows = [book.admit(name, [1]) for name in "abcd"]
    ids = [2**31, -(2**40), 5, 100]
    number = book.submit(book.batch(rows), torch.tensor(ids))
    book.wait_applied(number, TIMEOUT_S)
    shown = [(columns(book, row)["stop_reason"], columns(book, row)["num_output_tokens"]) for row in rows]
    assert shown == [(-(2**31), 0), (-(2**31), 0), (-1, 1), (100, 0)]


@pytest.mark.parametrize(
    ("ids", "fragments"),
    [
        (torch.zeros(2, dtype=torch.float32), ["float32", "torch.int32 or torch.int64"]),
        (torch.zeros(3, dtype=torch.int32), ["[3]", "2 rows"]),
        (torch.zeros((2, 7), dtype=torch.int32), ["[2, 7]", "1 to 6"]),
        (torch.zeros((2, 0), dtype=torch.int32), ["[2, 0]"]),
    ],
)
def test_g5_tensors_that_are_no_ids_are_refused(book: Book, ids: Any, fragments: list[str]) -> None:
    batch = book.batch([book.admit(name, [1]) for name in "ab"])
    with refused(book, InvalidBatch, "sampled_token_ids", *fragments):
        book.submit(batch, ids)
    with refused(book, InvalidBatch, "draft_token_ids"):
        book.submit(batch, torch.zeros(2, dtype=torch.int32), draft_token_ids=torch.zeros((2, 6), dtype=torch.int32))


def test_g5_ids_of_the_cpu_and_of_the_device_in_one_step(book: Book) -> None:
    row = book.admit("a", [1])
    batch = book.batch([row])
    book.submit(batch, np.array([5]), draft_token_ids=torch.tensor([[6, 7]]))
    number = book.submit(batch, torch.tensor([8]), draft_token_ids=np.array([[9]], np.int32))
    book.wait_applied(number, TIMEOUT_S)
    assert tokens(book, row) == [1, 5, 8, 9]
    number = book.submit(book.batch([]), torch.zeros(0, dtype=torch.int32))
    book.wait_applied(number, TIMEOUT_S)


def test_g5_a_book_without_drafts(make_book: MakeBook) -> None:
    book = make_book(device="fake", num_spec_tokens=0)
    row = book.admit("a", [1])
    number = book.submit(book.batch([row]), torch.tensor([5]))
    book.wait_applied(number, TIMEOUT_S)
    assert tokens(book, row) == [1, 5]
    with refused(book, InvalidBatch, "num_spec_tokens=0"):
        book.submit(book.batch([row]), torch.tensor([5]), draft_token_ids=torch.tensor([[6]]))


# G6: a context on a device that nobody asked for.


class Cudart:
    """CUDA's runtime as far as `CudaDevice.register` knows it, and which device was current at each call."""

    def __init__(self, error: int) -> None:
        self.error, self.current, self.calls = error, 0, list[tuple[Any, ...]]()

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append(("register", self.current, address, num_bytes))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", self.current, address))
        return self.error

    def cudaGetErrorString(self, error: int) -> str:
        return "invalid argument"

    def cudaGetLastError(self) -> int:
        self.calls.append(("forget", self.current))
        return self.error


@pytest.mark.parametrize("error", [0, 1])
def test_g6_the_device_is_set_before_its_memory_is_registered(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    cudart = Cudart(error)
    monkeypatch.setattr(torch.cuda, "Event", object)
    monkeypatch.setattr(torch.cuda, "device", cudart.device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr("asyncbook.device.cuda._runtime_library", lambda: cudart)
    device = CudaDevice(1)
    reason = device.register(4096, 8192)
    assert ("invalid argument" in reason) == bool(error)
    device.unregister(4096)
    forget = [("forget", 1)] if error else []
    assert cudart.calls == [("register", 1, 4096, 8192), *forget, ("unregister", 1, 4096), *forget]
    assert cudart.current == 0


def test_g6_the_sidecar_of_a_book_with_a_device_knows_nothing_of_it(book: Book, kind: str) -> None:
    if kind != "embedded":
        mapped = Path(f"/proc/{book.sidecar_pid}/maps").read_text()
        assert "libzmq" in mapped
        assert not any(library in mapped for library in ("torch", "libcuda"))


def test_g6_pages_are_registered_once_and_let_go(make_book: MakeBook, kind: str) -> None:
    book = make_book(device="fake", fresh=True)
    device, layout = device_of(book), book.config.layout
    frames = layout.num_frames * layout.frame_bytes
    ring = [] if kind == "embedded" else [layout.frames_offset - layout.runner_offset]
    assert list(device.registered.values()) == [*ring, frames]
    book.close()
    book.close()
    assert device.registered == {}
    other = make_book(device="fake", fresh=True)
    device = device_of(other)
    step(other, [], [])
    link = other._device.link
    assert link is not None
    other.frame().to_device()
    link._finalizer()  # of a book that nobody closes: what is pending is waited for
    assert device.registered == {}
    assert all(device.is_done(event) for event in other._copies.events())
