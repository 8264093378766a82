"""The ledger: messages in, arrays out. It decides everything about tokens and knows no socket, clock or process.

`apply(message)` does one message by the rules of `docs/ledger.md`. A step writes its frame into the frame ring; it is
not visible to a reader until the caller publishes its number. Whatever is applied is applied once, in order of `seq`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from asyncbook.ipc import wire
from asyncbook.ipc.errors import BadMessage
from asyncbook.ipc.layout import NUM_CHECKPOINTS, UINT32_MAX, Counter, Field, FinishReason, Layout
from asyncbook.ipc.publish import fence
from asyncbook.ipc.segment import give_back
from asyncbook.ipc.wire import BatchField
from asyncbook.worker import kernels, rules
from asyncbook.worker.checks import check_logprobs_width, check_range, check_stop_ids, checked_admission, checked_batch
from asyncbook.worker.life import TRANSITIONS, Effect, LifeEvent, State
from asyncbook.worker.logprobs import NO_ENTRIES, LogprobTable
from asyncbook.worker.outbox import Outbox
from asyncbook.worker.row_texts import RowTexts

if TYPE_CHECKING:
    from asyncbook.worker.text import TextRows

GIVE_BACK_BYTES = 16384  # of a row's table; below that, zeroed pages are kept for the row's next request


class Outcome(IntEnum):
    """What became of a message."""

    REPLAYED = 0  # applied before: nothing changed
    APPLIED = 1
    STEP = 2  # a frame is written and waits to be published
    STOP = 3


_STEP = Outcome.STEP  # an enum's member is looked up slowly, and this one every step


class Tables:
    """Views of a segment that its bookkeeper writes: the table, the frame ring and the counters."""

    def __init__(self, layout: Layout, memory: memoryview) -> None:
        self.layout = layout
        self.memory = memory
        self.token_ids = layout.token_ids.view(memory)
        self.is_token_ids = layout.is_token_ids.view(memory)
        self.counters = layout.counters.view(memory)
        self.row_counters = layout.row_counters.view(memory)
        self.released_generations = layout.released_generations.view(memory)
        self.frames_int32 = [layout.frame_int32(slot).view(memory) for slot in range(layout.num_frames)]
        self.frames_uint8 = [layout.frame_uint8(slot).view(memory) for slot in range(layout.num_frames)]

    def give_back(self, row: int, num_tokens: int) -> None:
        """Returns the pages of a cleared row that had held this many tokens, where they are worth a system call."""
        if 4 * num_tokens < GIVE_BACK_BYTES:
            return
        for region in (self.layout.token_ids, self.layout.is_token_ids):
            row_bytes = region.shape[1] * region.dtype.itemsize
            give_back(self.memory, region.offset + row * row_bytes, num_tokens * region.dtype.itemsize)


class Ledger:
    """The single writer's state. `work` holds the columns between frames; see `kernels` for shapes."""

    def __init__(self, tables: Tables, vocab_size: int, text_rows: TextRows | None = None) -> None:
        layout = tables.layout
        num_rows = layout.max_num_reqs
        self.tables = tables
        self.vocab_size = vocab_size
        self.applied_seq = 0
        self.step = 0
        self.work = np.zeros((len(Field), layout.padded_rows), np.int32)
        self.generation = self.work[Field.GENERATION].view(np.uint32)
        self.stop_ids = np.zeros((num_rows, 4), np.int32)
        self.lists = np.zeros((rules.NUM_LISTS, num_rows), np.int32)
        self.lengths = np.zeros(rules.NUM_LISTS, np.int64)
        self.history = np.zeros((layout.num_frames, num_rows), np.int32)
        # Frames start zeroed, as the columns do: nothing has changed in any of them.
        self.history_lengths = np.zeros(layout.num_frames, np.int64)
        self.texts = None if text_rows is None else RowTexts(text_rows, self.work, tables.token_ids)
        self.logprobs = LogprobTable(layout, tables.memory, self.work, tables.counters) if layout.has_logprobs else None
        self.outbox = Outbox(self.work, tables.token_ids, self.lists, self.lengths, self.texts, self.logprobs)
        self._no_stop_strings = np.full(num_rows, -1, np.int32)
        # Called before a row is cleared: what departed from it must be safe by then.
        self.before_clearing: Callable[[], object] = lambda: None
        self._takes_drafts = np.zeros(num_rows, np.bool_)
        self._sampled = np.zeros(num_rows * (1 + layout.num_spec_tokens), np.int32)
        self._drafts = np.zeros(num_rows * layout.num_spec_tokens, np.int32)
        self._entries = np.zeros(num_rows * (1 + layout.num_spec_tokens) * layout.entry_size, np.int32)
        self._batches: list[np.ndarray | None] = [None] * wire.NUM_BATCH_SLOTS
        self._handlers: dict[type[wire.Command], Callable[..., Outcome]] = {
            wire.Step: self._step,
            wire.Admit: self._admit,
            wire.DescribeBatch: self._describe_batch,
            wire.Abort: self._abort,
            wire.Preempt: self._preempt,
            wire.Resume: self._resume,
            wire.Rewind: self._rewind,
            wire.Release: self._release,
            wire.Barrier: lambda message: Outcome.APPLIED,
            wire.Stop: lambda message: Outcome.STOP,
        }

    def apply(self, message: wire.AnyCommand) -> Outcome:
        """Applies one message, once. Raises `BadMessage`, with nothing changed, for one that makes no sense."""
        if type(message) is wire.Restore:
            return self._restore(message)
        if not self._is_next(message.seq):
            return Outcome.REPLAYED
        outcome = self._handlers[type(message)](message)
        self.applied_seq = message.seq
        return outcome

    def apply_step(
        self, seq: int, step: int, slot: int, sampled: np.ndarray, width: int, drafts: np.ndarray, draft_width: int,
        entries: np.ndarray = NO_ENTRIES, logprobs_width: int = 0,
    ) -> Outcome:  # fmt: skip
        """`apply` for a step whose ids are in memory: int32, `width` and `draft_width` a row, row after row; `entries`
        of logprobs as in `wire.Step`."""
        if not self._is_next(seq):
            return Outcome.REPLAYED
        self._apply_step(step, slot, sampled, width, drafts, draft_width, entries, logprobs_width)
        self.applied_seq = seq
        return _STEP

    def _is_next(self, seq: int) -> bool:
        if seq == self.applied_seq + 1:
            return True
        if seq > self.applied_seq:
            raise BadMessage(f"message {seq} came after message {self.applied_seq}: one is missing")
        self.tables.counters[Counter.REPLAYED_MESSAGES] += 1
        return False

    # Steps

    def num_batch_rows(self, slot: int) -> int:
        """Rows of the batch in a slot. Raises `BadMessage` where it holds none."""
        batch = self._batches[slot] if 0 <= slot < wire.NUM_BATCH_SLOTS else None
        if batch is None:
            raise BadMessage(f"batch slot {slot} holds no batch")
        return int(batch.shape[1])

    def _describe_batch(self, message: wire.DescribeBatch) -> Outcome:
        self._batches[message.slot] = checked_batch(message.slot, message.fields, self.tables.layout)
        return Outcome.APPLIED

    def _step(self, message: wire.Step) -> Outcome:
        num_rows = self.num_batch_rows(message.slot)
        self._unpack(message.sampled_token_ids, num_rows * message.width, self._sampled)
        self._unpack(message.draft_token_ids, num_rows * message.draft_width, self._drafts)
        entries_size = self._entries_size(message)
        self._unpack(message.logprobs, entries_size, self._entries)
        self._apply_step(
            message.step, message.slot, self._sampled, message.width, self._drafts, message.draft_width, self._entries,
            message.logprobs_width,
        )  # fmt: skip
        return _STEP

    def _entries_size(self, message: wire.Step) -> int:
        """int32 values of the logprobs that a step must have come with."""
        check_logprobs_width(message.logprobs_width, self.tables.layout)
        batch = self._batches[message.slot]
        if message.logprobs_width == 0 or batch is None:
            return 0
        widths = np.minimum(batch[BatchField.LOGPROBS_WIDTH], message.logprobs_width)
        return message.width * int(np.count_nonzero(widths) + 2 * widths.sum())

    @staticmethod
    def _unpack(data: memoryview, num_ids: int, target: np.ndarray) -> None:
        if not 0 <= num_ids <= target.size or len(data) != 4 * num_ids:
            raise BadMessage(f"{len(data)} bytes of ids, expected {num_ids} ids of 4 bytes, {target.size} at most")
        target[:num_ids] = np.frombuffer(data, np.int32)

    def _apply_step(
        self, step: int, slot: int, sampled: np.ndarray, width: int, drafts: np.ndarray, draft_width: int,
        entries: np.ndarray, logprobs_width: int,
    ) -> None:  # fmt: skip
        num_rows, layout = self.num_batch_rows(slot), self.tables.layout
        if step != self.step + 1:
            raise BadMessage(f"step {step} came after step {self.step}")
        if not (0 < width <= 1 + layout.num_spec_tokens and 0 <= draft_width <= layout.num_spec_tokens):
            raise BadMessage(f"step {step} of {num_rows} rows has {width} ids and {draft_width} drafts a row")
        check_logprobs_width(logprobs_width, layout)
        tables, frame, batch = self.tables, step % layout.num_frames, self._batches[slot]
        assert batch is not None
        stop_strings_at = self._no_stop_strings
        if self.texts is not None:
            stop_strings_at = self.texts.stop_strings_at(
                self.stop_ids, batch, sampled, width, self.vocab_size, layout.max_model_len
            )
        kernels.apply_step(
            self.work, tables.token_ids, tables.is_token_ids, self.stop_ids, tables.counters, tables.row_counters,
            self.lists, self.lengths, batch, self._takes_drafts, sampled, width, drafts, draft_width, stop_strings_at,
            tables.frames_int32[frame], tables.frames_uint8[frame], self.history, self.history_lengths, frame,
            self.vocab_size, layout.max_model_len,
        )  # fmt: skip
        if self.logprobs is not None:
            self.logprobs.store(batch, sampled, width, entries, logprobs_width)
        self.step = step

    # The life of a row

    def _next_state(self, row: int, event: LifeEvent) -> tuple[State, Effect]:
        state = State(int(self.work[Field.STATE, row]))
        try:
            return TRANSITIONS[state, event]
        except KeyError:
            raise BadMessage(f"row {row} is {state.name}, and {event.value} cannot happen to it") from None

    def _transition(self, row: int, event: LifeEvent) -> Effect:
        next_state, effect = self._next_state(row, event)
        self.work[Field.STATE, row] = next_state
        self.work[Field.IS_DIRTY, row] = NUM_CHECKPOINTS
        return effect

    def _is_stale(self, row: int, generation: int) -> bool:
        if not 0 <= row < self.tables.layout.max_num_reqs:
            raise BadMessage(f"row {row} of {self.tables.layout.max_num_reqs}")
        if self.generation[row] == generation and self.work[Field.STATE, row] != State.FREE:
            return False
        self.tables.counters[Counter.STALE_MESSAGES] += 1
        return True

    def _touch(self, row: int) -> None:
        if not self.work[Field.IS_TOUCHED, row]:
            self.work[Field.IS_TOUCHED, row] = 1
            self.lists[rules.TOUCHED, self.lengths[rules.TOUCHED]] = row
            self.lengths[rules.TOUCHED] += 1

    def _admit(self, message: wire.Admit) -> Outcome:
        row, work = message.row, self.work
        prompt, outputs, is_prompt_token_ids = checked_admission(message, self.tables.layout, self.vocab_size)
        num_tokens = prompt.size + outputs.size
        next_generation = int(self.generation[row]) + 1
        check_range("the generation of an admission", message.generation, next_generation, next_generation)
        if "" in message.stop:
            raise BadMessage(f"request {message.request_id!r} has an empty stop string")
        self._next_state(row, LifeEvent.ADMIT)
        self._make_room_for_stop_ids(len(message.stop_ids))
        self._transition(row, LifeEvent.ADMIT)
        self._set_stop_ids(row, message.stop_ids)
        self.generation[row] = message.generation
        work[Field.NUM_PROMPT_TOKENS, row] = prompt.size
        work[Field.NUM_TOKENS_NO_SPEC, row] = work[Field.NUM_TOKENS, row] = num_tokens
        work[Field.NUM_COMPUTED_TOKENS, row] = message.num_computed_tokens
        work[Field.REMEMBERED_COMPUTED, row] = message.num_computed_tokens
        work[Field.NUM_OUTPUT_TOKENS, row] = work[Field.NUM_DELIVERED, row] = outputs.size
        work[Field.LOGPROBS_WIDTH, row], work[Field.NUM_WITH_LOGPROBS, row] = message.logprobs_width, outputs.size
        work[Field.LAST_TOKEN_ID, row] = outputs[-1] if outputs.size else prompt[-1]
        work[Field.STOP_REASON, row] = -1
        work[Field.MAX_TOKENS, row] = message.max_tokens
        work[Field.MIN_TOKENS, row] = message.min_tokens
        tables = self.tables
        tables.token_ids[row, : prompt.size] = prompt
        tables.token_ids[row, prompt.size : num_tokens] = outputs
        tables.is_token_ids[row, :num_tokens] = True
        if is_prompt_token_ids is not None:
            tables.is_token_ids[row, : prompt.size] = is_prompt_token_ids
        work[Field.REQUEST_NO, row] = message.request_no
        self._touch(row)
        ends_by_string = self.texts is not None and self.texts.admit(message, prompt, outputs)
        self._finish_at_admission(row, outputs, ends_by_string)
        self.outbox.skip_delivered_end(row)
        tables.counters[Counter.ADMITTED] += 1
        return Outcome.APPLIED

    def _restore(self, message: wire.Restore) -> Outcome:
        if message.seq != self.applied_seq:
            raise BadMessage(f"what was so at message {message.seq} came after message {self.applied_seq}")
        stop_ids = {row.row: row.stop_ids for row in message.rows}
        self._check_restored(stop_ids)
        batches = {batch.slot: checked_batch(batch.slot, batch.fields, self.tables.layout) for batch in message.batches}
        self._make_room_for_stop_ids(max(map(len, stop_ids.values()), default=0))
        for row, ids in stop_ids.items():
            self._set_stop_ids(row, ids)
        if self.texts is not None:
            for restored in message.rows:
                self.texts.restore(restored)
        for slot, batch in batches.items():
            self._batches[slot] = batch
        return Outcome.APPLIED

    def _check_restored(self, stop_ids: dict[int, list[int]]) -> None:
        """The columns say which rows are held and how many stop ids each has: neither more nor less must come."""
        held = np.flatnonzero(self.work[Field.STATE] != State.FREE).tolist()
        if sorted(stop_ids) != held:
            raise BadMessage(f"what is to be restored is of {len(stop_ids)} rows, expected {len(held)}")
        for row, ids in stop_ids.items():
            check_stop_ids(ids)
            if len(ids) != self.work[Field.NUM_STOP_IDS, row]:
                raise BadMessage(f"{len(ids)} stop ids are to be restored in row {row}, it has another number")

    def _make_room_for_stop_ids(self, num_stop_ids: int) -> None:
        if num_stop_ids <= self.stop_ids.shape[1]:
            return
        try:  # as zeroed memory, of which only what is in use costs anything
            wider = np.zeros((self.stop_ids.shape[0], 2 * num_stop_ids), np.int32)
        except MemoryError:
            raise BadMessage(f"no memory for {num_stop_ids} stop ids") from None
        wider[:, : self.stop_ids.shape[1]] = self.stop_ids
        self.stop_ids = wider

    def _set_stop_ids(self, row: int, stop_ids: list[int]) -> None:
        self.stop_ids[row, : len(stop_ids)] = stop_ids
        self.work[Field.NUM_STOP_IDS, row] = len(stop_ids)

    def _finish_at_admission(self, row: int, outputs: np.ndarray, ends_by_string: bool) -> None:
        """Earlier outputs that had ended the request end it again: rule 3 for the last of them."""
        if not outputs.size:
            return
        work, last = self.work, int(outputs[-1])
        is_stop_id = last in self.stop_ids[row, : work[Field.NUM_STOP_IDS, row]]
        if is_stop_id and outputs.size - 1 >= work[Field.MIN_TOKENS, row]:
            self._end(row, FinishReason.STOP, last)
        elif ends_by_string:
            self._end(row, FinishReason.STOP, -1)
        elif work[Field.NUM_TOKENS_NO_SPEC, row] >= self.tables.layout.max_model_len:
            self._end(row, FinishReason.LENGTH, -1)

    def _end(self, row: int, finish_reason: FinishReason, stop_reason: int) -> None:
        tables = self.tables
        kernels.end_row(
            self.work, tables.token_ids, tables.is_token_ids, tables.counters, self.lists, self.lengths, row,
            int(finish_reason), stop_reason,
        )  # fmt: skip

    def _abort(self, message: wire.Abort) -> Outcome:
        if not self._is_stale(message.row, message.generation):
            effect = self._transition(message.row, LifeEvent.ABORT)
            if effect is Effect.END:
                self._end(message.row, FinishReason.ABORT, -1)
            # Its id is free: what it still has to deliver must come before whoever gets the id next.
            self.outbox.depart(message.row)
        return Outcome.APPLIED

    def _preempt(self, message: wire.Preempt) -> Outcome:
        row = message.row
        if not self._is_stale(row, message.generation):
            event = LifeEvent.PREEMPT_DROP if message.drop_in_flight else LifeEvent.PREEMPT
            if self._transition(row, event) is Effect.UNCOMPUTE:
                self.work[Field.NUM_COMPUTED_TOKENS, row] = 0
                start, end = self.work[Field.NUM_TOKENS_NO_SPEC, row], self.work[Field.NUM_TOKENS, row]
                self.tables.token_ids[row, start:end] = 0
                self.tables.is_token_ids[row, start:end] = False
                self.work[Field.NUM_TOKENS, row] = start
                self._touch(row)
        return Outcome.APPLIED

    def _recompute(self, message: wire.Resume | wire.Rewind, event: LifeEvent) -> Outcome:
        """`generation` is the new one: whatever was launched under the one before is stale from here on."""
        row = message.row
        check_range("num_computed_tokens", message.num_computed_tokens, 0, self.tables.layout.max_model_len)
        if not self._is_stale(row, message.generation - 1):
            check_range("generation", message.generation, 1, UINT32_MAX)
            if self._transition(row, event) is Effect.RECOMPUTE:
                self.work[Field.NUM_COMPUTED_TOKENS, row] = message.num_computed_tokens
                self.work[Field.REMEMBERED_COMPUTED, row] = message.num_computed_tokens
            self.generation[row] = message.generation
            self._touch(row)
        return Outcome.APPLIED

    def _resume(self, message: wire.Resume) -> Outcome:
        return self._recompute(message, LifeEvent.RESUME)

    def _rewind(self, message: wire.Rewind) -> Outcome:
        return self._recompute(message, LifeEvent.REWIND)

    def _release(self, message: wire.Release) -> Outcome:
        row, tables = message.row, self.tables
        if self._is_stale(row, message.generation):
            return Outcome.APPLIED
        effect = self._transition(row, LifeEvent.RELEASE)
        if effect is Effect.END_AND_CLEAR:
            self._end(row, FinishReason.ABORT, -1)
        self.outbox.depart(row)
        self.before_clearing()
        if self.texts is not None:
            self.texts.close(row)
        num_tokens = int(self.work[Field.NUM_TOKENS, row])
        tables.released_generations[row] = message.generation
        fence()  # whoever reads the row's tokens in another process, and then this, knows whether they were still there
        if self.logprobs is not None:
            self.logprobs.clear(row, GIVE_BACK_BYTES)
        kernels.clear_row(
            self.work, tables.token_ids, tables.is_token_ids, tables.row_counters, self.lists, self.lengths, row
        )
        tables.give_back(row, num_tokens)
        tables.counters[Counter.RELEASED] += 1
        return Outcome.APPLIED
