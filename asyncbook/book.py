"""The public contract: everything a book does for its runner, whoever keeps it. `docs/ledger.md` has the rules.

`Book` checks a call, sends one message, and then changes what the runner knows; a call that raises has sent nothing and
changed nothing. Where messages go, and how to wait for them, is left to `EmbeddedBook` and `SidecarBook`.
"""

from __future__ import annotations

import os
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncbook.admission import check_request
from asyncbook.batch import Batch, BatchSlots, check_ids, make_batch
from asyncbook.closing import Closing
from asyncbook.committed import CommittedState
from asyncbook.config import DEFAULT_PARAMS, BookConfig, RequestParams, is_int
from asyncbook.frame import Frame
from asyncbook.ipc import wire
from asyncbook.ipc.errors import (
    AsyncbookError,
    BookClosed,
    FrameExpired,
    InFlightFull,
    InvalidBatch,
    InvalidRequest,
    NotApplied,
)
from asyncbook.ipc.histogram import bucket_of
from asyncbook.ipc.layout import INT32_MAX, RunnerHistogram, SubmissionWord
from asyncbook.ipc.segment import Segment
from asyncbook.names import RequestNames
from asyncbook.on_device import DeviceSide
from asyncbook.place import Place
from asyncbook.reader import BookOutputs
from asyncbook.rows import Row, RowRegistry
from asyncbook.staging import NotAsTheyAre

_SUBMITTED_STEP, _FIRST_NS = int(SubmissionWord.STEP), int(SubmissionWord.FIRST_NS)
_PLAIN = (np.ndarray, type(None))  # drafts that need no look

if TYPE_CHECKING:
    from asyncbook.device.link import DeviceLink

_books: weakref.WeakSet[Book] = weakref.WeakSet()


def _disown_books() -> None:
    for book in _books:
        book._disown()


os.register_at_fork(after_in_child=_disown_books)


class Book(CommittedState, BookOutputs, Closing):
    """A book, used from one thread. Made by `asyncbook.open` or `asyncbook.spawn`."""

    _has_ring = False  # whether somebody takes steps from the sample ring

    def __init__(self, config: BookConfig, segment: Segment, place: Place) -> None:
        self._runner_part = segment.runner_part()
        CommittedState.__init__(self, config, segment, self._runner_part)
        BookOutputs.__init__(self)
        self._rows = RowRegistry(config.max_num_reqs)
        self._submitted_step = 0
        self._read_step = 0  # the last one whose frame was looked at
        self._seq = 0  # of the last message
        # Single words: a memoryview gives and takes them for a fraction of what an array asks.
        self._submissions = self._layout.submissions.view(self._runner_part, self._layout.runner_offset).data
        self._read_histogram = self._runner_histograms[RunnerHistogram.READ].data
        self._submit_histogram = self._runner_histograms[RunnerHistogram.SUBMIT].data
        self._num_ring_slots = self._layout.num_ring_slots
        self._names = RequestNames(has_texts=config.tokenizer is not None)
        self._slots = BatchSlots()
        self._max_in_flight = config.max_in_flight
        self._max_width = 1 + config.num_spec_tokens
        self._max_logprobs_width = 0 if config.max_logprobs is None else 1 + config.max_logprobs
        self._device = DeviceSide(config.device, segment, self._frames, has_ring=self._has_ring)
        self._copies = self._device.copies
        self._ended_by: AsyncbookError | None = None  # what ended the book, once known: later calls fail at once
        self._foreign: BookClosed | None = None  # in a process forked from the book's own: why it can only be read
        self._place = place
        weakref.finalize(self, place.withdraw)  # also of a book that nobody closes
        _books.add(self)

    # What the runner knows without asking

    @property
    def submitted_step(self) -> int:
        """The last step that was submitted, 0 before the first."""
        return self._submitted_step

    @property
    def _keeps_outputs(self) -> bool:
        """Whether what is delivered waits for the runner to read it."""
        return True

    @property
    def _num_rows_held(self) -> int:
        return self._rows.num_held

    @property
    def _num_messages(self) -> int:
        return self._seq

    def frame(self, step: int | None = None) -> Frame:
        """Every column as of `step`, by default the last applied one. Raises `NotApplied`, `FrameExpired`."""
        frame = super().frame(step)
        if frame.step > self._read_step:
            self._read_step = frame.step
            self._read_histogram[bucket_of(monotonic_ns() - frame.published_ns)] += 1
        return frame

    def _check_frame(self, step: int) -> None:
        if step < 0 or self._submitted_step - step >= self._frames.num_frames:
            raise FrameExpired(
                f"the frame of step {step} is gone: step {self._submitted_step} was submitted since, "
                f"a frame holds for {self._frames.num_frames - 1} later steps"
            )

    def _committed(self, row: Row) -> tuple[int, int]:
        held = self._rows.held(row)
        frame = self.frame()
        if not held.admit_generation <= int(frame.generation[row.index]):
            raise NotApplied(
                f"row {row.index} was given to request {held.request_id!r} after step {frame.step}, "
                f"the last applied one"
            )
        return held.num_prompt_tokens, int(frame.num_tokens_no_spec[row.index])

    # Where a book differs from another

    @abstractmethod
    def _send(self, message: wire.AnyCommand) -> None:
        """Takes a message on its way, or raises with nothing done. Never blocks."""

    @abstractmethod
    def wait_applied(self, step: int, timeout_s: float | None = None) -> None:
        """Until `step` is applied. Raises `NotApplied` (it was not submitted), `SidecarTimeout`, `SidecarDied`."""

    @abstractmethod
    async def applied(self, step: int) -> None:
        """`wait_applied` for an event loop, which is woken for a step that somebody awaits and for no other."""

    @property
    @abstractmethod
    def sidecar_pid(self) -> int | None:
        """The sidecar's process id, None for an embedded book."""

    @abstractmethod
    def close(self) -> None:
        """Ends the book; a sidecar applies what was sent first. Idempotent. Arrays taken before stay readable."""

    def _check_ours(self) -> None:
        """Raises in a process forked from the book's own: what it wrote, and the outputs it took, its parent would
        miss."""
        if self._foreign is not None:
            raise self._foreign

    def _disown(self) -> None:
        """This is a forked child now."""
        self._foreign = self._ended_by = BookClosed(
            f"the book belongs to process {os.getppid()}, from which process {os.getpid()} was forked: "
            f"here it can only be read; open or spawn another one"
        )

    # The life of a row

    def _next_seq(self) -> int:
        if self._is_closed:
            raise BookClosed("the book is closed")
        if self._ended_by is not None:
            raise self._ended_by
        return self._seq + 1

    def _post(self, message: wire.AnyCommand) -> None:
        self._send(message)
        self._seq = message.seq

    def admit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: RequestParams = DEFAULT_PARAMS,
        *,
        output_token_ids: Sequence[int] | np.ndarray = (),
        num_computed_tokens: int = 0,
        prompt_is_token_ids: Sequence[bool] | np.ndarray | None = None,
    ) -> Row:
        """Gives the request a free row, the lowest. Never blocks.

        `output_token_ids`: what an earlier row of the request had put out; they count as outputs and are not delivered
        again. `prompt_is_token_ids` bool [len(prompt)]: False where a position holds something else than its id says.
        Raises `InvalidRequest`, `InvalidToken`, `PromptTooLong`, `DuplicateRequest`, `BookFull`.
        """
        request = check_request(
            self.config,
            request_id,
            prompt_token_ids,
            params,
            output_token_ids,
            num_computed_tokens,
            prompt_is_token_ids,
        )
        row = self._rows.check_admission(request_id)
        message = wire.Admit(
            self._next_seq(),
            row.index,
            row.generation,
            self._names.next_no,
            request_id,
            wire.as_bytes(request.prompt_token_ids),
            wire.as_bytes(request.output_token_ids),
            None if request.is_token_ids is None else wire.as_bytes(request.is_token_ids),
            int(num_computed_tokens),
            INT32_MAX if params.max_tokens is None else min(int(params.max_tokens), INT32_MAX),
            min(int(params.min_tokens), INT32_MAX),
            [int(token_id) for token_id in params.eos_token_ids],
            [int(token_id) for token_id in params.stop_token_ids],
            bool(params.ignore_eos),
            list(params.stop),
            bool(params.include_stop_str_in_output),
            bool(params.skip_special_tokens),
            params.logprobs_width,
        )
        self._post(message)
        request_no = self._names.add(request_id, message.stop)
        self._rows.admit(row, request_id, request_no, request.prompt_token_ids.size, params.logprobs_width)
        return row

    def abort(self, row: Row) -> None:
        """Ends the request with `ABORT`, unless it has ended. The row stays held, its `request_id` is free."""
        self._rows.held(row)
        self._post(wire.Abort(self._next_seq(), row.index, row.generation))
        self._rows.abort(row)

    def preempt(self, row: Row, *, drop_in_flight: bool = False) -> None:
        """Takes the row's computed tokens away. Ids still in flight under the handle are delivered, or dropped."""
        held = self._rows.held(row)
        self._post(wire.Preempt(self._next_seq(), row.index, row.generation, bool(drop_in_flight)))
        held.is_preempted = True

    def resume(self, row: Row, *, num_computed_tokens: int = 0) -> Row:
        """Takes a preempted row up again under a new handle; what was launched under the old one is stale."""
        return self._rename(row, num_computed_tokens, wire.Resume, preempted=True)

    def rewind(self, row: Row, num_computed_tokens: int) -> Row:
        """Sets `num_computed_tokens` under a new handle; what was launched under the old one is stale."""
        return self._rename(row, num_computed_tokens, wire.Rewind, preempted=False)

    def _rename(
        self, row: Row, num_computed_tokens: int, message: type[wire.Resume | wire.Rewind], *, preempted: bool
    ) -> Row:
        new_row = self._rows.renamed(row, preempted=preempted)
        if not is_int(num_computed_tokens) or not 0 <= num_computed_tokens <= self.config.max_model_len:
            raise InvalidRequest(
                f"row {row.index}: num_computed_tokens is {num_computed_tokens!r}, "
                f"expected 0 to max_model_len = {self.config.max_model_len}"
            )
        self._post(message(self._next_seq(), new_row.index, new_row.generation, int(num_computed_tokens)))
        self._rows.rename(new_row)
        return new_row

    def release(self, row: Row) -> None:
        """Frees the row at once; a request that has not ended is aborted first."""
        held = self._rows.held(row)
        self._post(wire.Release(self._next_seq(), row.index, row.generation))
        self._rows.release(row)
        if not self._keeps_outputs:
            self._names.release(held.request_no, held.request_id)

    # Steps

    def batch(
        self,
        rows: Iterable[Row],
        *,
        num_scheduled_tokens: Sequence[int] | np.ndarray | None = None,
        num_draft_tokens: Sequence[int] | np.ndarray | None = None,
    ) -> Batch:
        """Who takes part in a step. Default: every token of the row not computed yet, plus its drafts; no drafts.

        Raises `StaleRow`, and `InvalidBatch` for a row named twice or a number out of range.
        """
        return make_batch(self._rows, rows, num_scheduled_tokens, num_draft_tokens, self.config.num_spec_tokens)

    def submit(self, batch: Batch, sampled_token_ids: Any, *, logprobs: Any = None, draft_token_ids: Any = None) -> int:
        """Hands over what a step sampled and returns its number. Never blocks.

        `sampled_token_ids`: int32 or int64, [n] or [n, 1 to 1 + num_spec_tokens], numpy or torch; -1 pads.
        `logprobs`: an `asyncbook.Logprobs`, or what has its attributes. `draft_token_ids`: the next step's drafts, [n]
        or [n, 1 to num_spec_tokens]. All of them may be overwritten as soon as this returns. Raises `InvalidBatch`;
        `InFlightFull` when `max_in_flight` steps are not yet applied.
        """
        start_ns = monotonic_ns()
        step = self._submitted_step + 1
        if step - self._known_applied_step > self._max_in_flight and step - self.applied_step > self._max_in_flight:
            self._check_alive()
            raise InFlightFull(
                f"step {step} does not fit: step {self._known_applied_step} is applied, "
                f"at most {self._max_in_flight} may be in flight"
            )
        if self._copies.pending:
            self._copies.check_room(step)
        if draft_token_ids is not None and self.config.num_spec_tokens == 0:
            raise InvalidBatch("draft_token_ids came, but the book was made with num_spec_tokens=0")
        if logprobs is not None and self._max_logprobs_width == 0:
            raise InvalidBatch("logprobs came, but the book was made with max_logprobs=None")
        if batch.registry is not self._rows:
            raise InvalidBatch("the batch is another book's, expected one that this book's batch() made")
        n = len(batch.rows)
        self._submissions[_FIRST_NS + step % self._num_ring_slots] = start_ns
        self._submissions[_SUBMITTED_STEP] = step
        if type(sampled_token_ids) is np.ndarray and type(draft_token_ids) in _PLAIN:
            try:
                self._send_step(step, batch, n, sampled_token_ids, draft_token_ids, logprobs)
            except NotAsTheyAre:
                self._send_mended(step, batch, n, sampled_token_ids, draft_token_ids, logprobs)
        else:
            self._send_tensors(step, batch, n, sampled_token_ids, draft_token_ids, logprobs)
        self._submitted_step = step
        self._submit_histogram[bucket_of(monotonic_ns() - start_ns)] += 1
        return step

    def _send_mended(self, step: int, batch: Batch, n: int, sampled: Any, drafts: Any, logprobs: Any) -> None:
        """`_send_step` for ids that it does not take as they are: says what is wrong with them, or mends it."""
        sampled = check_ids("sampled_token_ids", sampled, n, self._max_width)
        if drafts is not None:
            drafts = check_ids("draft_token_ids", drafts, n, self._max_width - 1)
        self._send_step(step, batch, n, sampled, drafts, logprobs)

    def _send_tensors(self, step: int, batch: Batch, n: int, sampled: Any, drafts: Any, logprobs: Any) -> None:
        """`_send_step` for ids that are no arrays, or not both: on a device, or tensors of the CPU."""
        link = self._device.link_to(sampled, drafts)
        if link is not None:
            widths = self._max_width, self._max_width - 1
            sampled, drafts = link.check_or_fetch(
                ("sampled_token_ids", "draft_token_ids"), (sampled, drafts), n, widths
            )
            if link.brings_ids:
                if logprobs is not None:
                    raise NotImplementedError("logprobs with ids on a device are not part of this version yet")
                self._send_from_device(link, step, batch, n, sampled, drafts)
                return
        self._send_mended(step, batch, n, sampled, drafts, logprobs)

    def _send_from_device(self, link: DeviceLink, step: int, batch: Batch, n: int, sampled: Any, drafts: Any) -> None:
        """`_send_step` for ids on a device that brings them. Those of the CPU may be arrays or tensors."""
        raise NotImplementedError

    @abstractmethod
    def _send_step(
        self, step: int, batch: Batch, n: int, sampled: np.ndarray, drafts: np.ndarray | None, logprobs: Any
    ) -> None:
        """Takes a step on its way, or raises with nothing done: `NotAsTheyAre` for ids that the kernels do not take,
        `InvalidBatch` for logprobs that are wrong. The arrays may change once this returns."""

    def _known_slot(self, batch: Batch) -> int:
        """The batch's slot, described to the bookkeeper if it has to be."""
        if not self._slots.is_known(batch):
            self._post(wire.DescribeBatch(self._next_seq(), self._slots.next_slot, wire.as_bytes(batch.fields)))
            self._slots.remember(batch)
        return batch.slot

    def _room_step(self) -> int:
        """The step whose application makes room for one more."""
        return self._submitted_step + 1 - self._max_in_flight

    def wait_room(self, timeout_s: float | None = None) -> None:
        """Until one more `submit` fits. Raises `SidecarTimeout`, `SidecarDied`."""
        deadline = None if timeout_s is None else monotonic() + timeout_s
        self.wait_applied(self._room_step(), timeout_s)
        if self._copies.pending:
            self._copies.wait_room(self._submitted_step + 1, deadline)

    async def room(self) -> None:
        """`wait_room` for an event loop."""
        await self.applied(self._room_step())
        if self._copies.pending:
            await self._copies.room(self._submitted_step + 1)

    def _check_submitted(self, step: int) -> None:
        if step > self._submitted_step:
            raise NotApplied(f"step {step} was not submitted, the last was step {self._submitted_step}")

    @property
    def address(self) -> str:
        """Where other processes of this user find the book: for `asyncbook.attach` and `asyncbook.subscribe`. Raises
        `HandshakeFailed` where there was no place to say it."""
        return self._place.path
