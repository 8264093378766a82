"""A book without a process: every call is applied before it returns.

What a step has to deliver is gathered by the poll that asks for it, or else by the next call: between two forward
passes it would be in the way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import numpy as np

from asyncbook.batch import Batch
from asyncbook.book import Book
from asyncbook.config import BookConfig
from asyncbook.ipc import jit, wire
from asyncbook.ipc.columns import OutputColumns
from asyncbook.ipc.segment import Segment
from asyncbook.logprobs import LogprobsArea
from asyncbook.outputs import StepOutputs
from asyncbook.place import Place
from asyncbook.staging import StagingArea
from asyncbook.worker.bookkeeper import Bookkeeper
from asyncbook.worker.outbox import Outbox

MAX_QUEUED_OUTPUTS = 512  # steps that wait for the reader one by one; beyond that they come in bigger pieces


class OutputQueue:
    """Outputs between a step and the poll that asks for them."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, OutputColumns]] = deque()
        self._waiters: set[asyncio.Future[None]] = set()

    def take_from(self, outbox: Outbox, step: int) -> bool:
        """Queues what is new as of a step, unless the queue is full."""
        if len(self._queue) >= MAX_QUEUED_OUTPUTS:
            return False
        self._queue.append((step, outbox.take_all()))
        self.wake_readers()
        return True

    def take(self) -> tuple[int, OutputColumns] | None:
        """The oldest entry."""
        return self._queue.popleft() if self._queue else None

    async def wait(self) -> None:
        """Until something is queued, or `wake_readers`."""
        if not self._queue:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def wake_readers(self) -> None:
        """Ends every `wait`."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class EmbeddedBook(Book):
    """Keeps the book in the runner's own thread."""

    def __init__(self, config: BookConfig) -> None:
        config.check_supported()
        if not config.runner_reads_outputs:
            raise ValueError("runner_reads_outputs is False, and an embedded book has nobody else to read its outputs")
        segment = Segment.create(config.layout)
        super().__init__(config, segment, Place(config, segment, is_embedded=True))
        text_rows = None
        if config.tokenizer_path is not None:
            from asyncbook.worker.text import TextRows
        jit.announce_compilation()
        jit.compile_all()
        if config.tokenizer_path is not None:
            text_rows = TextRows(config.tokenizer_path, config.max_num_reqs)
        self._area = StagingArea(config.max_num_reqs, config.num_spec_tokens)
        self._logprobs_area = LogprobsArea(np.zeros(self._layout.ring_logprobs.shape[1], np.int32))
        self._queue = OutputQueue()
        self._has_gathered = True  # what the last step had to deliver is in the queue
        self._bookkeeper = Bookkeeper(
            self._layout, self._segment.writable(), config.vocab_size, self._queue, text_rows=text_rows
        )

    def _send_step(
        self, step: int, batch: Batch, n: int, sampled: np.ndarray, drafts: np.ndarray | None, logprobs: Any
    ) -> None:
        width, draft_width = self._area.put(n, sampled, drafts)
        logprobs_width = 0
        if logprobs is not None:
            logprobs_width, _ = self._logprobs_area.put(logprobs, batch, width, self._max_logprobs_width)
        slot = self._known_slot(batch)
        seq = self._next_seq()
        area = self._area
        if not self._has_gathered:
            self._gather()
        self._bookkeeper.apply_step(
            seq, step, slot, area.sampled, width, area.drafts, draft_width, self._logprobs_area.entries, logprobs_width
        )  # fmt: skip
        self._seq = seq
        self._has_gathered = False
        self._queue.wake_readers()

    def _send(self, message: wire.AnyCommand) -> None:
        if not self._has_gathered:
            self._gather()
        self._bookkeeper.apply(message)
        self._bookkeeper.flush()

    def _gather(self) -> bool:
        """Takes what is to be delivered into the queue; False where it has no room for all."""
        self._has_gathered = True
        return self._bookkeeper.flush()

    def wait_applied(self, step: int, timeout_s: float | None = None) -> None:
        self._check_submitted(step)

    async def applied(self, step: int) -> None:
        self._check_submitted(step)

    def _take_outputs(self) -> StepOutputs | None:
        self._check_ours()
        if not self._has_gathered:
            self._gather()
        taken = self._queue.take()
        if taken is None and not self._is_closed and self._bookkeeper.flush():
            taken = self._queue.take()  # what the full queue had no room for
        return None if taken is None else self._names.step_outputs(*taken)

    def _await_flushed(self) -> None:
        pass

    async def _await_outputs(self) -> None:
        if self._has_gathered:  # else something came while a delivery was handed out
            await self._queue.wait()

    def _wake_readers(self) -> None:
        self._queue.wake_readers()

    @property
    def sidecar_pid(self) -> None:
        return None

    def close(self) -> None:
        if not self._is_closed:
            if not self._has_gathered:
                self._gather()
            self._is_closed = True
            self._place.withdraw()
            self._device.close()
            self._segment.close()
            self._queue.wake_readers()
