"""The reference, an embedded book and a sidecar book side by side: the same calls, the same answers, the same bytes.

`Trio` takes a call, gives it to all three, and compares. The embedded book is compared after every call; the sidecar as
soon as it has applied the same step (`settle`), with every frame that it wrote meanwhile. A call that is refused answers
with a `Refused`, which must name the same error in all three.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import asyncbook
from asyncbook import Batch, Book, BookConfig, ContractError, Frame, FrameExpired, InFlightFull, RequestParams, Row
from asyncbook import StepOutputs
from tests.reference import COLUMNS, Finish, ReferenceBatch, ReferenceBook, ReferenceOutputs, ReferenceRefused, State

TIMEOUT_S = 60.0  # a limit for waits that end in microseconds; only a broken book gets there
MAX_KEPT_HANDLES = 40
MAX_KEPT_BATCHES = 40  # more than the slots in which a book remembers batches


@dataclass(frozen=True)
class Refused:
    """The answer of a call that was refused."""

    name: str


@dataclass(frozen=True)
class TrioBatch:
    """One batch, made by each of the three."""

    name: str
    rows: tuple[Row, ...]
    reference: ReferenceBatch
    embedded: Batch
    sidecar: Batch


@dataclass
class Deliveries:
    """What came from each of the three and is not compared yet."""

    reference: list[ReferenceOutputs] = field(default_factory=list)
    embedded: list[ReferenceOutputs] = field(default_factory=list)
    sidecar: list[ReferenceOutputs] = field(default_factory=list)


def answer(call: Any, *args: Any, **kwargs: Any) -> Any:
    """What the call returns, or `Refused` with the name of its error."""
    try:
        return call(*args, **kwargs)
    except ReferenceRefused as error:
        return Refused(error.name)
    except ContractError as error:
        return Refused(type(error).__name__)


def plain(outputs: StepOutputs) -> ReferenceOutputs:
    """A delivery as the reference tells it."""
    n = len(outputs.request_ids)
    ends = outputs.offsets.tolist()
    assert (outputs.offsets.dtype, outputs.token_ids.dtype, outputs.stop_reasons.dtype) == (np.int32,) * 3
    assert outputs.finish_reasons.dtype == np.uint8
    assert len(ends) == n + 1
    assert (ends[0], ends[-1]) == (0, outputs.token_ids.size)
    return ReferenceOutputs(
        outputs.step,
        outputs.request_ids,
        [outputs.token_ids[ends[i] : ends[i + 1]].tolist() for i in range(n)],
        outputs.finish_reasons.tolist(),
        outputs.stop_reasons.tolist(),
    )


def assert_frame(frame: Frame, expected: dict[str, np.ndarray], what: str) -> None:
    """Every column, byte for byte."""
    for name, column in expected.items():
        shown = getattr(frame, name)
        assert shown.dtype == COLUMNS[name]
        assert not shown.flags.writeable
        if shown.tobytes() != column.tobytes():
            raise AssertionError(f"{what}, frame of step {frame.step}, {name}: {shown} is not {column}")


class Trio:
    """Three books of one configuration. Lives as long as its sidecar; `empty` makes it new but for running numbers."""

    def __init__(self, config: BookConfig) -> None:
        self.config = config
        self.reference = ReferenceBook(
            max_num_reqs=config.max_num_reqs,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            num_spec_tokens=config.num_spec_tokens,
            max_in_flight=config.max_in_flight,
        )
        self.embedded = asyncbook.open(config)
        self.sidecar = asyncbook.spawn(config)
        self._tables = [self._padded_tables(book) for book in (self.embedded, self.sidecar)]
        self.num_calls = 0
        self.num_refused = 0
        self._num_admitted = self._num_released = 0
        self._deliveries = Deliveries()
        self._num_due = 0  # deliveries that the sidecar must have made once it applied the last step
        self._unsettled: list[int] = []  # steps whose frames of the sidecar are not compared yet
        self._is_between_steps = False  # something was sent after the last step
        self._is_paused = False
        self._held_frames: list[tuple[Frame, dict[str, np.ndarray]]] = []
        self.log: list[str] = []
        self._names: dict[Row, str] = {}
        self.handles: list[Row] = []  # given out in the past, stale ones among them
        self.batches: list[TrioBatch] = []

    @staticmethod
    def _padded_tables(book: Book) -> tuple[np.ndarray, np.ndarray]:
        """Both tables with the padding behind `max_model_len`, where nothing may ever be written."""
        layout, memory = book.config.layout, book._segment.readable()
        return layout.token_ids.view(memory), layout.is_token_ids.view(memory)

    # Calls

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The same call to all three, which must answer alike."""
        self.num_calls += 1
        answers = [answer(getattr(book, name), *args, **kwargs) for book in self._books()]
        assert answers[0] == answers[1] == answers[2], f"{name}: {answers}"
        if isinstance(answers[0], Refused):
            self.num_refused += 1
            self._note(f"# {answers[0].name}:")
        self._note(f"trio.{name}({self._text(args, kwargs)})")
        return answers[0]

    def _books(self) -> tuple[Any, Any, Any]:
        return self.reference, self.embedded, self.sidecar

    def _note(self, line: str) -> None:
        self.log.append(line)

    def _text(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        return ", ".join([*map(self._argument, args), *(f"{key}={self._argument(kwargs[key])}" for key in kwargs)])

    def _argument(self, value: Any) -> str:
        if isinstance(value, Row):
            return self._names.get(value, repr(value))
        if isinstance(value, np.ndarray):
            return f"np.array({value.tolist()}, np.{value.dtype})"
        if isinstance(value, tuple | list):
            return f"[{', '.join(map(self._argument, value))}]"
        return repr(value)

    def _new_handle(self, row: Any) -> Any:
        """Remembers a handle that a call gave out."""
        if isinstance(row, Refused):
            return row
        handle = Row(*row)
        self._names[handle] = f"row_{len(self._names)}"
        self.log[-1] = f"{self._names[handle]} = {self.log[-1]}"
        self.handles = [*self.handles[-MAX_KEPT_HANDLES:], handle]
        return handle

    def admit(self, request_id: str, prompt: Sequence[int], params: RequestParams, **options: Any) -> Row | Refused:
        row = self._new_handle(self._call("admit", request_id, prompt, params, **options))
        self._num_admitted += not isinstance(row, Refused)
        self._after_message()
        return row  # type: ignore[no-any-return]

    def abort(self, row: Row) -> Refused | None:
        return self._message("abort", row)

    def preempt(self, row: Row, *, drop_in_flight: bool = False) -> Refused | None:
        return self._message("preempt", row, drop_in_flight=drop_in_flight)

    def release(self, row: Row) -> Refused | None:
        refused = self._message("release", row)
        self._num_released += refused is None
        return refused

    def _message(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = self._call(name, *args, **kwargs)
        self._after_message()
        return result

    def resume(self, row: Row, num_computed_tokens: int = 0) -> Row | Refused:
        return self._new_handle(self._message("resume", row, num_computed_tokens=num_computed_tokens))  # type: ignore[no-any-return]

    def rewind(self, row: Row, num_computed_tokens: int) -> Row | Refused:
        return self._new_handle(self._message("rewind", row, num_computed_tokens))  # type: ignore[no-any-return]

    def batch(self, rows: Sequence[Row], *, num_scheduled_tokens: Sequence[int] | None = None,
              num_draft_tokens: Sequence[int] | None = None) -> TrioBatch | Refused:  # fmt: skip
        self.num_calls += 1
        options = {"num_scheduled_tokens": num_scheduled_tokens, "num_draft_tokens": num_draft_tokens}
        made = [answer(book.batch, rows, **options) for book in self._books()]
        name = f"batch_{len(self.log)}"
        self._note(f"{name} = trio.batch({self._text((rows,), options)})")
        refusals = [isinstance(batch, Refused) for batch in made]
        if any(refusals):
            assert made[0] == made[1] == made[2], f"batch: {made}"
            self.num_refused += 1
            return made[0]  # type: ignore[no-any-return]
        batch = TrioBatch(name, tuple(rows), *made)
        self.batches = [*self.batches[-MAX_KEPT_BATCHES:], batch]
        return batch

    def submit(self, batch: TrioBatch, sampled: np.ndarray, drafts: np.ndarray | None = None) -> int | Refused:
        """A step. The arrays are overwritten right behind the call, which a book must not mind."""
        self._note(f"trio.submit({batch.name}, {self._text((sampled, drafts), {})})")
        self.num_calls += 1
        expected = answer(self.reference.submit, batch.reference, sampled, draft_token_ids=drafts)
        assert self._submit(self.embedded, batch.embedded, sampled, drafts) == expected
        if not isinstance(expected, Refused):
            self._make_room(batch, sampled, drafts)
        assert self._submit(self.sidecar, batch.sidecar, sampled, drafts) == expected
        if isinstance(expected, Refused):
            self.num_refused += 1
            return expected
        self._unsettled.append(expected)
        self._is_between_steps = False
        self._deliveries.reference += self.reference.poll_outputs()
        self._num_due = len(self._deliveries.reference)
        self._check_embedded(has_stepped=True)
        self._check_held_frames()
        if len(self._unsettled) > self.config.max_in_flight:  # the oldest frame is about to be overwritten
            self.settle()
        return expected  # type: ignore[no-any-return]

    def step(self, rows: Sequence[Row], sampled: Any, drafts: Any = None, *, scheduled: Sequence[int] | None = None,
             d: Sequence[int] | None = None) -> int | Refused:  # fmt: skip
        """A batch and its step, for tests that are written by hand."""
        batch = self.batch(rows, num_scheduled_tokens=scheduled, num_draft_tokens=d)
        if isinstance(batch, Refused):
            return batch
        return self.submit(batch, np.array(sampled, np.int32), None if drafts is None else np.array(drafts, np.int32))

    @staticmethod
    def _submit(book: Book, batch: Batch, sampled: np.ndarray, drafts: np.ndarray | None) -> Any:
        mine, my_drafts = sampled.copy("K"), None if drafts is None else drafts.copy("K")
        result = answer(book.submit, batch, mine, draft_token_ids=my_drafts)
        mine.fill(1)
        if my_drafts is not None:
            my_drafts.fill(1)
        return result

    def _make_room(self, batch: TrioBatch, sampled: np.ndarray, drafts: np.ndarray | None) -> None:
        """A paused sidecar refuses a step too many; then it goes on."""
        if self._is_paused and self.sidecar.submitted_step - self.sidecar.applied_step == self.config.max_in_flight:
            messages = self.sidecar.stats().messages
            assert self._submit(self.sidecar, batch.sidecar, sampled, drafts) == Refused(InFlightFull.__name__)
            assert self.sidecar.stats().messages == messages
            self.settle()
        if not self._is_paused:
            self.sidecar.wait_room(TIMEOUT_S)

    # The sidecar's pace

    def pause(self) -> None:
        """The sidecar stands still from here on, so that whatever is submitted stays in flight."""
        if not self._is_paused:
            self._note("trio.pause()")
            os.kill(self.sidecar.sidecar_pid, signal.SIGSTOP)
            os.waitid(os.P_PID, self.sidecar.sidecar_pid, os.WSTOPPED)
            self._is_paused = True

    def wake(self) -> None:
        """The sidecar goes on."""
        if self._is_paused:
            os.kill(self.sidecar.sidecar_pid, signal.SIGCONT)
            self._is_paused = False

    def settle(self) -> None:
        """Waits until the sidecar has applied every step, and compares all that it shows."""
        self.wake()
        self.sidecar.wait_applied(self.reference.step, TIMEOUT_S)
        for step in self._unsettled:
            if step > self.reference.step - self.reference.num_frames:
                with self.sidecar.frame(step) as frame:
                    assert_frame(frame, self.reference.frame(step), "sidecar")
        self._unsettled.clear()
        self._collect_sidecar()
        if not self._is_between_steps:
            self._check_state(self.sidecar, self._tables[1], "sidecar")

    def _collect_sidecar(self) -> None:
        """Deliveries of the applied steps are there; of what was called after them, some may be."""
        came = self._deliveries
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            came.sidecar += map(plain, self.sidecar.poll_outputs())
            if len(came.sidecar) >= self._num_due or time.monotonic() > deadline:
                break
        assert came.sidecar == came.reference[: len(came.sidecar)], "sidecar outputs"
        assert len(came.sidecar) >= self._num_due, f"sidecar outputs are missing: {came.reference[len(came.sidecar) :]}"
        del came.reference[: len(came.sidecar)]
        self._num_due = 0
        came.sidecar.clear()

    # Comparing

    def _after_message(self) -> None:
        self._is_between_steps = True
        self._deliveries.reference += self.reference.poll_outputs()
        self._check_embedded(has_stepped=False)

    def _check_embedded(self, *, has_stepped: bool) -> None:
        """An embedded book has applied every call when it returns."""
        came = self._deliveries
        came.embedded += map(plain, self.embedded.poll_outputs())
        new = came.embedded
        assert new == came.reference[len(came.reference) - len(new) :], "embedded outputs"
        came.embedded = []
        if has_stepped:
            assert self.embedded.applied_step == self.reference.step
            assert_frame(self.embedded.frame(), self.reference.frame(), "embedded")
        self._check_state(self.embedded, self._tables[0], "embedded")

    def _check_state(self, book: Book, tables: tuple[np.ndarray, np.ndarray], what: str) -> None:
        """Both tables whole, counters, conservation."""
        reference, length = self.reference, self.config.max_model_len
        expected_tables = (reference.token_ids_table(), reference.is_token_ids_table())
        for name, shown, expected in zip(("token_ids", "is_token_ids"), tables, expected_tables, strict=True):
            if shown[:, :length].tobytes() != expected.tobytes():
                raise AssertionError(f"{what}, {name}: {shown[:, :length]} is not {expected}")
            assert not shown[:, length:].any(), f"{what}, {name} behind max_model_len"
        stats = book.stats()
        assert stats.dropped_tokens == reference.dropped, what
        assert {Finish(reason): count for reason, count in stats.finished_requests.items()} == {
            reason: count for reason, count in reference.finished.items() if reason
        }, what
        assert stats.submitted_tokens == stats.committed_tokens + sum(stats.dropped_tokens.values()), what
        assert stats.num_rows_free + stats.num_rows_held == self.config.max_num_reqs, what
        shown_counts = (
            stats.submitted_steps, stats.applied_steps, stats.submitted_tokens, stats.committed_tokens,
            stats.invalid_draft_tokens, stats.num_rows_held, stats.admitted_requests, stats.released_requests,
            stats.outputs_dropped_requests, stats.replayed_messages, stats.stale_messages, stats.bad_messages,
        )  # fmt: skip
        expected_counts = (
            reference.step, reference.step, reference.num_submitted_tokens, reference.num_committed_tokens,
            reference.num_invalid_draft_tokens, reference.num_rows_held, self._num_admitted, self._num_released,
            0, 0, 0, 0,
        )  # fmt: skip
        assert shown_counts == expected_counts, what
        rounds, expected_rounds = book.spec_decode_stats(), reference.spec_decode_stats()
        for name in (*vars(expected_rounds), "mean_acceptance_length"):
            assert getattr(rounds, name) == getattr(expected_rounds, name), f"{what}, {name}"

    # Readers

    def hold_frame(self, steps_ago: int) -> None:
        """Takes a frame and keeps it; `submit` looks at all that are kept."""
        self.settle()
        step = self.reference.step - steps_ago
        expected = answer(self.reference.frame, step)
        for book in (self.embedded, self.sidecar):
            frame = answer(book.frame, step)
            if isinstance(frame, Refused):
                assert frame == expected
            else:
                self._held_frames.append((frame, expected))

    def _check_held_frames(self) -> None:
        """A frame shows what it showed, and says so, until enough later steps were submitted; then it says that."""
        kept = []
        for frame, expected in self._held_frames:
            if self.reference.step - frame.step < self.reference.num_frames:
                with frame:
                    assert_frame(frame, expected, "held")
                frame.check()
                kept.append((frame, expected))
            else:
                assert answer(frame.check) == Refused(FrameExpired.__name__)
                assert answer(frame.__exit__, None, None, None) == Refused(FrameExpired.__name__)
        self._held_frames = kept

    def read(self, row: Row) -> None:
        """Committed ids of a row, by the public calls."""
        self.settle()
        expected = answer(self.reference.token_ids, row)
        for book in (self.embedded, self.sidecar):
            ids, outputs = answer(book.token_ids, row), answer(book.output_token_ids, row)
            if isinstance(expected, Refused):
                assert ids == outputs == expected
                continue
            num_prompt_tokens = int(self.reference.frame()["num_prompt_tokens"][row.index])
            assert ids.tolist() == expected
            assert outputs.tolist() == expected[num_prompt_tokens:]
            assert ids.dtype == outputs.dtype == np.int32
            assert not (ids.flags.writeable or outputs.flags.writeable)

    # Between examples

    def held(self) -> list[Row]:
        """The handles that are not stale."""
        rows = enumerate(self.reference._rows)
        return [Row(index, row.generation) for index, row in rows if row.asked is not State.FREE]

    def empty(self) -> None:
        """Releases every row, compares once more, and forgets: step numbers, generations and counters go on."""
        for row in self.held():
            self.release(row)
        self.step([], [])
        self.settle()
        assert self.held() == []
        assert self._deliveries == Deliveries()
        self._held_frames.clear()
        self.log.clear()
        self._names.clear()
        self.handles.clear()
        self.batches.clear()

    def close(self) -> None:
        """Ends both books."""
        self.wake()
        self.embedded.close()
        self.sidecar.close()


class TrioPool:
    """Trios between examples: one a configuration. One that failed is thrown away, as its books may differ."""

    def __init__(self) -> None:
        self._idle: dict[BookConfig, Trio] = {}

    def take(self, config: BookConfig) -> Trio:
        """An empty trio, kept or new."""
        return self._idle.pop(config, None) or Trio(config)

    def give_back(self, trio: Trio, *, has_failed: bool) -> None:
        """Empties the trio and keeps it."""
        try:
            assert not has_failed
            trio.empty()
        except BaseException:
            trio.close()
            if not has_failed:
                raise
        else:
            self._idle[trio.config] = trio

    def close(self) -> None:
        """Ends all that are kept."""
        for trio in self._idle.values():
            trio.close()
