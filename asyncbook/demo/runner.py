"""A continuous-batching runner whose bookkeeping lags one step: step N+1 is launched before step N is looked at.

    launch step N+1  ->  look at the frame of step N  ->  submit what step N+1 sampled  ->  schedule step N+2  -> ...

The ids that feed the next pass are already on the device; the book is asked only who has finished. A request that
finished in step N thus runs once more, in step N+1, and the book drops what it samples there. On the CPU a pass ends
before its launch returns; on CUDA the ids of step N are submitted while step N+1 runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncbook import FinishReason, RequestParams, Row
from asyncbook.demo.bookkeeping import COLUMNS, Bookkeeping, Metered
from asyncbook.demo.engine import NUM_SPEC_TOKENS, Engine, HostCopy
from asyncbook.demo.timeline import DeviceClock, Timeline

TIMEOUT_S = 60.0

Entry = tuple[Row, int, int]  # a row in a step, its num_scheduled_tokens and num_draft_tokens
Chunk = tuple[int, int, int]  # a row, where the chunk starts in its prompt, the prompt's length


@dataclass
class Request:
    """What is asked, and what the book has delivered of the answer so far."""

    request_id: str
    prompt: str
    prompt_token_ids: list[int]
    params: RequestParams
    token_ids: list[int] = field(default_factory=list)
    finish_reason: int = FinishReason.NONE
    stop_reason: int | None = None
    committed_token_ids: list[int] | None = None  # what the book's table held when the row was released


@dataclass
class Running:
    """A request in its row. `num_computed_tokens` counts what was launched of the prompt, not what was applied."""

    request: Request
    row: Row
    num_computed_tokens: int = 0

    @property
    def in_prefill(self) -> bool:
        return self.num_computed_tokens < len(self.request.prompt_token_ids)


@dataclass
class Plan:
    """One step."""

    batch: Any
    row_ids: Tensor  # int64 [n], the batch's order
    prefills: list[Chunk]
    is_decoding: Tensor | None  # bool [rows]; None where no row decodes


@dataclass
class Launched:
    """A step whose ids are on their way: [n, 1+K] and [n, K]."""

    step: int
    batch: Any
    sampled: HostCopy
    drafts: HostCopy


@torch.inference_mode()
def launch_step(step: int, engine: Engine, plan: Plan) -> Launched:
    """Launches a step's passes and the way of its ids to the host."""
    engine.begin_step()
    for row, start, num_prompt_tokens in plan.prefills:
        engine.prefill(row, start, num_prompt_tokens)
    if plan.is_decoding is not None:
        engine.decode(plan.is_decoding)
    engine.draft()
    sampled, drafts = (ids[plan.row_ids] for ids in (engine.sampled_token_ids, engine.draft_token_ids))
    return Launched(step, plan.batch, HostCopy(sampled), HostCopy(drafts))


class Scheduler:
    """Decides who takes part in a step, from what was launched and from who has finished."""

    def __init__(self, book: Bookkeeping, engine: Engine, requests: Sequence[Request]) -> None:
        self.book, self.engine = book, engine
        self.waiting = deque(requests)
        self.running: dict[int, Running] = {}
        # Prompt chunks that one step computes at most, beside the decoding rows.
        self.max_chunks = max(4, len(engine.num_tokens) // 4)
        self._last: tuple[Entry, ...] = ()
        self._plan: Plan | None = None

    def finished(self, frame: Any) -> list[Running]:
        """Who has finished as of `frame`, which may still show a row's last tenant."""
        return [
            running
            for index, running in self.running.items()
            if frame.generation[index] == running.row.generation and frame.finish_reason[index] != FinishReason.NONE
        ]

    def retire(self, finished: Sequence[Running]) -> None:
        """Releases their rows."""
        for running in finished:
            running.request.committed_token_ids = self.book.output_token_ids(running.row).tolist()
            self.book.release(running.row)
            del self.running[running.row.index]

    def abort(self, request_id: str) -> None:
        """Drops a request, with its row where it has one. What was launched for the row is stale from then on."""
        self.waiting = deque(request for request in self.waiting if request.request_id != request_id)
        for index, running in list(self.running.items()):
            if running.request.request_id == request_id:
                self.book.release(running.row)
                del self.running[index]

    def admit(self) -> None:
        """Gives free rows to waiting requests."""
        while self.waiting and len(self.running) < len(self.engine.num_tokens):
            request = self.waiting.popleft()
            row = self.book.admit(request.request_id, request.prompt_token_ids, request.params)
            self.engine.admit(row.index, request.prompt_token_ids)
            self.running[row.index] = Running(request, row)

    def schedule(self) -> Plan | None:
        """The next step, or None when nothing is left to run."""
        self.admit()
        prefills: list[Chunk] = []
        entries: list[Entry] = []
        decoding = set()
        for index, running in self.running.items():
            start, num_prompt_tokens = running.num_computed_tokens, len(running.request.prompt_token_ids)
            if not running.in_prefill:
                decoding.add(index)
                entries.append((running.row, 1 + NUM_SPEC_TOKENS, NUM_SPEC_TOKENS))
            elif len(prefills) < self.max_chunks:
                num_scheduled_tokens = min(self.engine.chunk, num_prompt_tokens - start)
                running.num_computed_tokens += num_scheduled_tokens
                prefills.append((index, start, num_prompt_tokens))
                entries.append((running.row, num_scheduled_tokens, 0))
        if not entries:
            return None
        if tuple(entries) != self._last or prefills or self._plan is None:
            self._last, self._plan = tuple(entries), self._make_plan(entries, prefills, decoding)
        return self._plan

    def _make_plan(self, entries: list[Entry], prefills: list[Chunk], decoding: set[int]) -> Plan:
        rows, num_scheduled_tokens, num_draft_tokens = (list(column) for column in zip(*entries, strict=True))
        batch = self.book.batch(rows, num_scheduled_tokens=num_scheduled_tokens, num_draft_tokens=num_draft_tokens)
        is_decoding = None
        if decoding:
            mask = [index in decoding for index in range(len(self.engine.num_tokens))]
            is_decoding = self.engine.to_device(mask).bool()
        return Plan(batch, self.engine.to_device([row.index for row in rows]), prefills, is_decoding)


class Runner:
    """Runs requests through an engine, with a book of any kind."""

    def __init__(self, book: Bookkeeping, engine: Engine, requests: Sequence[Request]) -> None:
        self.timeline = Timeline()
        self.device_clock = DeviceClock(self.timeline, engine.device)
        self.book = Metered(book, self.timeline)
        self.engine = engine
        self.requests = {request.request_id: request for request in requests}
        self.scheduler = Scheduler(self.book, engine, requests)
        self.columns: list[NDArray[np.int64]] = []  # every step's frame, [columns, rows]
        self._launched: deque[Launched] = deque()

    @torch.inference_mode()
    def run(self, after_step: Callable[[Runner], None] = lambda runner: None) -> None:
        """The loop of the module's head, until every request has finished and is delivered."""
        on_host = self.engine.device.type == "cpu"
        step = 0
        while (plan := self.scheduler.schedule()) is not None:
            step += 1
            self.timeline.step = step
            self.launch(step, plan)
            finished: list[Running] = []
            if step > 1:
                self.submit_through(step - 1)
                finished = self.scheduler.finished(self.read(step - 1))
            if on_host:
                self.submit_through(step)
            self.receive()
            self.scheduler.retire(finished)
            after_step(self)
        self.submit_through(step)
        self.read(step)
        self.drain()
        self.device_clock.collect()
        after_step(self)

    def launch(self, step: int, plan: Plan) -> None:
        """Launches a step and the way of its ids to the host."""
        with self.device_clock.forward(step):
            self._launched.append(launch_step(step, self.engine, plan))

    def submit_through(self, step: int) -> None:
        """Submits what was launched up to `step` and is not submitted yet, as its ids arrive."""
        while self._launched and self._launched[0].step <= step:
            launched = self._launched.popleft()
            sampled, drafts = launched.sampled.wait(), launched.drafts.wait()
            self.book.submit(launched.batch, sampled, draft_token_ids=drafts)

    def read(self, step: int) -> Any:
        """The frame of `step`; a copy of it is kept for the proof."""
        self.book.wait_applied(step, TIMEOUT_S)
        frame = self.book.frame(step)
        self.columns.append(np.stack([getattr(frame, name) for name in COLUMNS]).astype(np.int64))
        self.timeline.applied(step, frame.published_ns, frame.apply_ns)
        return frame

    def receive(self) -> None:
        """Takes what the book has delivered since last time."""
        for outputs in self.book.poll_outputs():
            for delta in outputs:
                request = self.requests[delta.request_id]
                request.token_ids += map(int, delta.token_ids)
                request.finish_reason, request.stop_reason = delta.finish_reason, delta.stop_reason

    def drain(self) -> None:
        """Receives until every request's end is delivered."""
        deadline = time.monotonic() + TIMEOUT_S
        while any(request.finish_reason == FinishReason.NONE for request in self.requests.values()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not every request's end was delivered within {TIMEOUT_S:.0f} s")
            time.sleep(0.001)
            self.receive()
