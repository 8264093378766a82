"""A subscriber whose book gets another sidecar goes on where it was."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np

import asyncbook
from asyncbook import BookConfig, RequestOutput
from tests.conftest import TIMEOUT_S

NUM_TOKENS = 20


async def test_a_subscriber_that_says_several_times_who_it_is_loses_nothing() -> None:
    """Each wait that the next sidecar finds makes it ask who that is, and has its answer."""
    config = BookConfig(max_num_reqs=4, max_model_len=100, vocab_size=100, runner_reads_outputs=False)
    async with asyncbook.spawn(config) as book, asyncbook.subscribe(book.address) as outputs:
        names = [f"r{i}" for i in range(3)]
        batch = book.batch([book.admit(name, [1], asyncbook.RequestParams(max_tokens=NUM_TOKENS)) for name in names])

        async def read(name: str) -> list[RequestOutput]:
            return [piece async for piece in outputs.stream(name)]

        tasks = [asyncio.ensure_future(read(name)) for name in names]
        for number in range(NUM_TOKENS):
            if number == 5:
                os.kill(book.sidecar_pid, signal.SIGKILL)
            async with asyncio.timeout(TIMEOUT_S):
                await book.applied(book.submit(batch, np.full(3, number, np.int32)))
        for pieces in await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT_S):
            assert [i for piece in pieces for i in piece.token_ids.tolist()] == list(range(NUM_TOKENS))
        assert book.num_restarts == 1
