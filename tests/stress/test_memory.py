"""What a book costs after long: requests of mixed length, a reader that never reads, a million steps. `make stress`."""

from __future__ import annotations

import time

import pytest

import asyncbook
from asyncbook import BookConfig
from tests.process import load
from tests.stress.test_book_machine_long import NUM_OPERATIONS, SEED

pytestmark = [pytest.mark.stress, pytest.mark.timeout(7200)]


def test_100_000_requests_of_mixed_length() -> None:
    num_requests = max(1000, NUM_OPERATIONS // 10)
    config = BookConfig(max_num_reqs=64, max_model_len=32_768, vocab_size=100, transport="ring")
    with asyncbook.spawn(config) as book:
        *seen, last = load.run_mixed(book, SEED, num_requests, max_prompt=32_000)
        whole = book._layout.total_bytes / load.MIB
    print(f"\n{num_requests:,} requests, the book whole is {whole:.0f} MiB, seed {SEED}")
    for number, memory in enumerate(seen):
        print(f"  {10 * (number + 1):3}%  {memory}")
    print(f"  gone  {last}")
    assert max(memory.shared for memory in seen) < whole / 2
    assert last.shared < book._layout.table_offset / load.MIB + 16


@pytest.mark.parametrize("transport", ["zmq", "ring"])
def test_a_million_tokens_that_nobody_reads(transport: str) -> None:
    config = BookConfig(max_num_reqs=64, max_model_len=512, vocab_size=100, transport=transport)
    with asyncbook.spawn(config) as book:
        early, late, engine = load.run_unread(book, SEED, NUM_OPERATIONS)
        read = load.read_all(book)
        while more := load.read_all(book):
            read += more
        dropped = book.stats().outputs_dropped_requests
    print(f"\n{engine.num_tokens:,} tokens of {engine.num_requests:,} requests, {transport}, seed {SEED}")
    print(f"  after 5%  {early}\n  at the end  {late}\n  then read: {read.total():,}; requests dropped: {dropped}")
    assert read == engine.expected
    assert late.runner - early.runner < 64
    assert late.sidecar - early.sidecar < 64


def test_a_soak_of_a_million_steps() -> None:
    config = BookConfig(max_num_reqs=16, max_model_len=2048, vocab_size=100, transport="ring", spin_us=200)
    tenth = NUM_OPERATIONS // 10
    start = time.monotonic()
    with asyncbook.spawn(config) as book:
        engine = load.Engine(book, SEED, max_prompt=1500, max_tokens=300)
        seen = []
        for number in range(NUM_OPERATIONS):
            engine.step()
            book.poll_outputs()
            if number % tenth == tenth // 2 or number == NUM_OPERATIONS - 1:
                seen.append(load.memory(book))
        stats = book.stats()
    minutes = (time.monotonic() - start) / 60
    print(f"\n{engine.num_steps:,} steps, {engine.num_requests:,} requests in {minutes:.1f} minutes, seed {SEED}")
    print(f"  in the first 10%  {seen[0]}\n  in the last 10%   {seen[-2]}\n  at the end        {seen[-1]}")
    assert stats.bad_messages == stats.stale_messages == 0
    for name in ("runner", "sidecar"):
        assert getattr(seen[-1], name) - getattr(seen[0], name) < 16, name
