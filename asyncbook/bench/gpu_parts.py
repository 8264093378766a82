"""The measurements of `asyncbook bench gpu`. Each returns figures by name and checks its own results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import asyncbook
from asyncbook import Book, BookConfig
from asyncbook.bench.gpu_decode import Decoder, Size, replay_of
from asyncbook.bench.gpu_platform import Platform, busy_work
from asyncbook.bench.per_row_loop import PerRowLoop
from asyncbook.device.columns import TensorColumns
from asyncbook.device.link import open_link
from asyncbook.ipc.segment import Segment

Figures = dict[str, Any]
VOCAB_SIZE = 32_000
NUM_PROMPT_TOKENS = 4


def _config(platform: Platform, num_rows: int, num_steps: int, **options: Any) -> BookConfig:
    return BookConfig(
        max_num_reqs=num_rows,
        max_model_len=num_steps + NUM_PROMPT_TOKENS + 2,
        vocab_size=VOCAB_SIZE,
        device=platform.name,
        transport="ring",
        idle_policy="cadence",
        **options,
    )


def _admit(book: Book, num_rows: int) -> tuple[list[asyncbook.Row], asyncbook.Batch]:
    rows = [book.admit(f"request-{i}", np.arange(NUM_PROMPT_TOKENS)) for i in range(num_rows)]
    return rows, book.batch(rows)


def _us(durations_ns: list[int]) -> Figures:
    p50, p99 = np.percentile(durations_ns, (50, 99)) / 1000
    return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}


def registration(platform: Platform, num_rows: int) -> Figures:
    """How long the shared pages take to be pinned, the device being in use already."""
    with Segment.create(_config(platform, num_rows, 8192).layout) as segment:
        start_ns = time.monotonic_ns()
        link = open_link(platform.name, segment, has_ring=True)
        took_ns = time.monotonic_ns() - start_ns
        layout = segment.layout
        is_pinned = link is not None and link.is_pinned
        if link is not None:
            link.close([])
    num_bytes = layout.table_offset - layout.runner_offset
    return {"rows": num_rows, "pinned": is_pinned, "bytes": num_bytes, "ms": round(took_ns / 1e6, 2)}


def random_steps(platform: Platform, num_rows: int, num_steps: int) -> Figures:
    """Random ids from the device, written over by the next step at once, equal to what the device says they were."""
    chunk = 1000
    generator = torch.Generator(platform.torch_device).manual_seed(7)
    start_s = time.monotonic()
    with asyncbook.spawn(_config(platform, num_rows, num_steps)) as book:
        launcher = platform.launcher(book)
        rows, batch = _admit(book, num_rows)
        buffer = torch.zeros(num_rows, dtype=torch.int64, device=platform.torch_device)
        for start in range(0, num_steps, chunk):
            n = min(chunk, num_steps - start)
            sampled = torch.randint(VOCAB_SIZE, (n, num_rows), generator=generator, device=platform.torch_device)
            for ids in sampled:
                launcher.launch(lambda ids=ids: buffer.copy_(ids))  # type: ignore[misc]
                book.wait_room()
                book.submit(batch, buffer)
            book.wait_applied(book.submitted_step)
            expected = sampled.cpu().numpy()
            for i, row in enumerate(rows):
                assert np.array_equal(book.output_token_ids(row)[start:], expected[:, i]), f"row {i} differs"
        wait = book.stats().wait_for_tokens_us
    return {
        "rows": num_rows, "steps": num_steps, "wrong": 0, "s": round(time.monotonic() - start_s, 1),
        "wait_for_ids_p50_us": wait.us_p50,
    }  # fmt: skip


def submit_costs(platform: Platform, num_rows: int, num_steps: int) -> Figures:
    """What the runner pays a step while the device works: the loop behind `.tolist()`, the loop behind a copy to pinned
    memory and its event, and `submit`, which waits for nothing."""
    work = busy_work(platform)
    costs: dict[str, list[int]] = {"tolist and loop": [], "pinned copy, event, loop": [], "submit": []}
    pinned = torch.zeros(num_rows, dtype=torch.int64, pin_memory=platform.is_cuda)
    sampled = torch.randint(VOCAB_SIZE, (num_rows,), device=platform.torch_device)
    loops = [PerRowLoop(num_rows, num_steps + NUM_PROMPT_TOKENS + 2, NUM_PROMPT_TOKENS) for _ in range(2)]
    with asyncbook.spawn(_config(platform, num_rows, num_steps)) as book:
        rows, batch = _admit(book, num_rows)
        launcher = platform.launcher(book)

        def by_tolist() -> None:
            if not platform.is_cuda:
                launcher.synchronize()
            loops[0].submit(np.array(sampled.tolist())[:, None])

        def by_event() -> None:
            launcher.launch(lambda: pinned.copy_(sampled, non_blocking=True))
            event = launcher.mark()
            event.synchronize() if platform.is_cuda else launcher.synchronize()
            loops[1].submit(pinned.numpy()[:, None])

        def by_submit() -> None:
            book.submit(batch, sampled)

        arms: dict[str, Callable[[], None]] = dict(zip(costs, (by_tolist, by_event, by_submit), strict=True))
        for index in range(num_steps):
            for name, arm in arms.items():
                book.wait_room()
                launcher.launch(work)
                start_ns = time.monotonic_ns()
                arm()
                if index >= num_steps // 10:
                    costs[name].append(time.monotonic_ns() - start_ns)
                launcher.synchronize()
        book.wait_applied(book.submitted_step)
        for i, row in enumerate(rows):
            assert np.array_equal(book.output_token_ids(row), np.full(num_steps, int(sampled[i])))
    return {"rows": num_rows, **{name: _us(durations) for name, durations in costs.items()}}


def frame_copies(platform: Platform, num_rows: int, num_repeats: int) -> Figures:
    """A frame to the device in one copy, against one copy a column from the same pinned memory: until it is there."""
    costs: dict[str, list[int]] = {"one copy": [], "one copy a column": []}
    with asyncbook.open(_config(platform, num_rows, 16)) as book:
        _, batch = _admit(book, num_rows)
        step = book.submit(batch, np.arange(num_rows, dtype=np.int32) % VOCAB_SIZE)
        launcher, link = platform.launcher(book), book._device.link
        assert link is not None
        columns = TensorColumns(link._layout, link._frames[step % link._layout.num_frames])
        for _ in range(num_repeats):
            start_ns = time.monotonic_ns()
            copied = book.frame(step).to_device()
            launcher.synchronize()
            costs["one copy"].append(time.monotonic_ns() - start_ns)
            start_ns = time.monotonic_ns()
            for column in columns.values():
                target = link.device.empty(tuple(column.shape), column.dtype)
                link.device.copy(target, column)
            launcher.synchronize()
            costs["one copy a column"].append(time.monotonic_ns() - start_ns)
        assert copied.last_token_id.cpu().tolist() == [i % VOCAB_SIZE for i in range(num_rows)]
    return {"rows": num_rows, **{name: _us(durations) for name, durations in costs.items()}}


# Decode steps


class _LoopKeeper:
    """The per-row loop: it needs the ids before the runner can go on."""

    def __init__(self, num_rows: int, num_steps: int) -> None:
        self._loop = PerRowLoop(num_rows, num_steps + NUM_PROMPT_TOKENS + 2, NUM_PROMPT_TOKENS)

    def keep(self, ids: torch.Tensor) -> None:
        self._loop.submit(np.array(ids.tolist())[:, None])

    def committed(self) -> np.ndarray:
        return self._loop.token_ids[:, NUM_PROMPT_TOKENS : int(self._loop.num_tokens_no_spec[0])]


class _BookKeeper:
    """A book, which is given the ids where they are."""

    def __init__(self, book: Book, num_rows: int) -> None:
        self._book = book
        self._rows, self._batch = _admit(book, num_rows)

    def keep(self, ids: torch.Tensor) -> None:
        self._book.wait_room()
        self._book.submit(self._batch, ids)
        self._book.poll_outputs()

    def committed(self) -> np.ndarray:
        self._book.wait_applied(self._book.submitted_step)
        return np.stack([self._book.output_token_ids(row) for row in self._rows])


def decode(platform: Platform, arm: str, num_rows: int, num_steps: int, size: Size) -> Figures:
    """Decode steps as fast as they come. Idle: the share of the time in which no step runs on the device."""
    config = _config(platform, num_rows, num_steps)
    book = {"loop": None, "embedded": asyncbook.open, "sidecar": asyncbook.spawn}[arm]
    opened = book(config) if book is not None else None
    try:
        launcher = platform.launcher(opened)
        keeper = _LoopKeeper(num_rows, num_steps) if opened is None else _BookKeeper(opened, num_rows)
        decoder = Decoder(platform, num_rows, size)
        replay = replay_of(platform, decoder)
        sampled = torch.zeros((num_steps, num_rows), dtype=torch.int64, device=platform.torch_device)
        launcher.synchronize()
        marks, start_s = [], time.monotonic()
        for index in range(num_steps):
            first = launcher.mark()
            launcher.launch(replay)
            marks.append((first, launcher.mark()))
            launcher.launch(lambda index=index: sampled[index].copy_(decoder.ids))  # type: ignore[misc]
            if opened is None and not platform.is_cuda:
                launcher.synchronize()
            keeper.keep(decoder.ids)
        committed = keeper.committed()
        launcher.synchronize()
        took_s = time.monotonic() - start_s
        assert np.array_equal(committed, sampled.cpu().numpy().T), f"{arm} differs from what the device sampled"
    finally:
        if opened is not None:
            opened.close()
    warm = marks[len(marks) // 10 :]
    busy_us = sum(launcher.us_between(first, last) for first, last in warm)
    total_us = launcher.us_between(warm[0][0], warm[-1][1])
    return {
        "rows": num_rows, "arm": arm, "steps_per_s": round(num_steps / took_s, 1),
        "device_us_a_step": round(busy_us / len(warm), 1), "idle": round(1 - busy_us / total_us, 4),
    }  # fmt: skip
