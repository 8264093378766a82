"""The reference, an embedded book and a sidecar book side by side: the same calls, the same answers, the same bytes.

`Trio` takes a call, gives it to all three, and compares. The embedded book is compared after every call; the sidecar as
soon as it has applied the same step (`settle`), with every frame that it wrote meanwhile. A call that is refused
answers with a `Refused`, which must name the same error in all three.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import asyncbook
from asyncbook import (
    Batch,
    Book,
    BookConfig,
    Frame,
    FrameExpired,
    InFlightFull,
    Logprobs,
    NotApplied,
    RequestParams,
    Row,
)
from tests.property.compare import (
    Refused,
    answer,
    assert_counters,
    assert_frame,
    assert_rounds,
    assert_tables,
    padded_tables,
    plain,
)
from tests.property.pace import SidecarPace
from tests.reference import ReferenceBatch, ReferenceBook, ReferenceOutputs, State

TIMEOUT_S = 60.0  # a limit for waits that end in microseconds; only a broken book gets there
NUM_KEPT_HANDLES = 40
NUM_KEPT_BATCHES = 40  # more than the slots in which a book remembers batches


@dataclass(frozen=True)
class TrioBatch:
    """One batch, made by each of the three."""

    name: str
    rows: tuple[Row, ...]
    reference: ReferenceBatch
    embedded: Batch
    sidecar: Batch


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
            max_logprobs=config.max_logprobs,
        )
        self.embedded = asyncbook.open(config)
        self.sidecar: Book = self._make_sidecar(config)
        self._pace = SidecarPace(self.sidecar)
        self._embedded_tables, self._sidecar_tables = padded_tables(self.embedded), padded_tables(self.sidecar)
        self.num_calls = 0
        self.num_refused = 0
        self.handles: list[Row] = []  # given out in the past, stale ones among them
        self.batches: list[TrioBatch] = []
        self._awaited: list[ReferenceOutputs] = []  # deliveries that the sidecar has not made yet
        self._num_due = 0  # as many of them must have come when the last step is applied
        self._unsettled: list[int] = []  # steps whose frames of the sidecar are not compared yet
        self._is_between_steps = False  # something was sent after the last step
        self._held_frames: list[tuple[Frame, dict[str, np.ndarray]]] = []
        self._calls: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = []
        self._names: dict[Row, str] = {}

    def _make_sidecar(self, config: BookConfig) -> Book:
        return asyncbook.spawn(config)

    # Calls

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The same call to all three, which must answer alike."""
        self._record("", name, *args, **kwargs)
        answers = [answer(getattr(book, name), *args, **kwargs) for book in self._books()]
        assert answers[0] == answers[1] == answers[2], f"{name}: {answers}"
        self.num_refused += isinstance(answers[0], Refused)
        self._is_between_steps = True
        self._compare_embedded()
        return answers[0]

    def _books(self) -> tuple[Any, Any, Any]:
        return self.reference, self.embedded, self.sidecar

    def _record(self, result: str, name: str, *args: Any, **kwargs: Any) -> None:
        self.num_calls += 1
        self._calls.append((result, name, args, kwargs))

    def _handle(self, row: Any) -> Any:
        """Remembers a handle that the last call gave out."""
        if isinstance(row, Refused):
            return row
        handle = Row(*row)
        self._names[handle] = f"row_{len(self._names)}"
        self._calls[-1] = (self._names[handle], *self._calls[-1][1:])
        self.handles = [*self.handles[1 - NUM_KEPT_HANDLES :], handle]
        return handle

    def admit(self, request_id: str, prompt: Sequence[int], params: RequestParams, **options: Any) -> Row | Refused:
        return self._handle(self._call("admit", request_id, prompt, params, **options))  # type: ignore[no-any-return]

    def abort(self, row: Row) -> Refused | None:
        return self._call("abort", row)  # type: ignore[no-any-return]

    def preempt(self, row: Row, *, drop_in_flight: bool = False) -> Refused | None:
        return self._call("preempt", row, drop_in_flight=drop_in_flight)  # type: ignore[no-any-return]

    def resume(self, row: Row, num_computed_tokens: int = 0) -> Row | Refused:
        return self._handle(self._call("resume", row, num_computed_tokens=num_computed_tokens))  # type: ignore[no-any-return]

    def rewind(self, row: Row, num_computed_tokens: int) -> Row | Refused:
        return self._handle(self._call("rewind", row, num_computed_tokens))  # type: ignore[no-any-return]

    def release(self, row: Row) -> Refused | None:
        return self._call("release", row)  # type: ignore[no-any-return]

    def batch(self, rows: Sequence[Row], *, num_scheduled_tokens: Sequence[int] | None = None,
              num_draft_tokens: Sequence[int] | None = None) -> TrioBatch | Refused:  # fmt: skip
        name = f"batch_{len(self._calls)}"
        options = {"num_scheduled_tokens": num_scheduled_tokens, "num_draft_tokens": num_draft_tokens}
        self._record(name, "batch", rows, **options)
        made = [answer(book.batch, rows, **options) for book in self._books()]
        if any(isinstance(batch, Refused) for batch in made):
            assert made[0] == made[1] == made[2], f"batch: {made}"
            self.num_refused += 1
            return made[0]  # type: ignore[no-any-return]
        batch = TrioBatch(name, tuple(rows), *made)
        self.batches = [*self.batches[1 - NUM_KEPT_BATCHES :], batch]
        return batch

    def submit(
        self, batch: TrioBatch, sampled: np.ndarray, drafts: np.ndarray | None = None, logprobs: Logprobs | None = None
    ) -> int | Refused:
        """A step. The arrays are overwritten right behind the call, which a book must not mind."""
        self._record("", "submit", batch, sampled, drafts, logprobs)
        what = sampled, drafts, logprobs
        expected = answer(
            self.reference.submit, batch.reference, sampled, draft_token_ids=drafts, logprobs=logprobs
        )  # fmt: skip
        assert self._submit(self.embedded, batch.embedded, *what) == expected
        self._make_room(batch, *what, may_be_submitted=not isinstance(expected, Refused))
        assert self._submit(self.sidecar, batch.sidecar, *what) == expected
        if isinstance(expected, Refused):
            self.num_refused += 1
            return expected
        if self._pace.is_paused:
            assert answer(self.sidecar.frame, expected) == Refused(NotApplied.__name__)
        self._unsettled.append(expected)
        self._is_between_steps = False
        self._compare_embedded()
        self._num_due = len(self._awaited)
        self._compare_held_frames()
        if len(self._unsettled) > self.config.max_in_flight:  # the oldest frame is about to be overwritten
            self.settle()
        return expected  # type: ignore[no-any-return]

    @staticmethod
    def _submit(
        book: Book, batch: Batch, sampled: np.ndarray, drafts: np.ndarray | None, logprobs: Logprobs | None
    ) -> Any:
        mine, my_drafts = sampled.copy("K"), None if drafts is None else drafts.copy("K")
        my_logprobs = None if logprobs is None else Logprobs(*(array.copy("K") for array in logprobs))
        result = answer(book.submit, batch, mine, draft_token_ids=my_drafts, logprobs=my_logprobs)
        for array in (mine, my_drafts, *(my_logprobs or ())):
            if array is not None:
                array.fill(1)
        return result

    def _make_room(
        self, batch: TrioBatch, sampled: np.ndarray, drafts: np.ndarray | None, logprobs: Logprobs | None, *,
        may_be_submitted: bool,
    ) -> None:  # fmt: skip
        """A paused sidecar refuses a step too many; then it goes on."""
        if self._pace.is_full:
            if may_be_submitted:
                messages = self.sidecar.stats().messages
                answered = self._submit(self.sidecar, batch.sidecar, sampled, drafts, logprobs)
                assert answered == Refused(InFlightFull.__name__)
                assert self.sidecar.stats().messages == messages
            self._pace.wake()
        if not self._pace.is_paused:
            self.sidecar.wait_room(TIMEOUT_S)

    def step(self, rows: Sequence[Row], sampled: Any, drafts: Any = None, *, scheduled: Sequence[int] | None = None,
             d: Sequence[int] | None = None) -> int | Refused:  # fmt: skip
        """A batch and its step, for tests that are written by hand."""
        batch = self.batch(rows, num_scheduled_tokens=scheduled, num_draft_tokens=d)
        if isinstance(batch, Refused):
            return batch
        return self.submit(batch, np.array(sampled, np.int32), None if drafts is None else np.array(drafts, np.int32))

    # Waiting for the sidecar

    def pause(self) -> None:
        """The sidecar stands still until its book is full, or somebody waits for it."""
        self._record("", "pause")
        self._pace.pause()

    def settle(self) -> None:
        """Waits until the sidecar has applied every step, and compares all that it shows."""
        self._pace.wake()
        self.sidecar.wait_applied(self.reference.step, TIMEOUT_S)
        for step in self._unsettled:
            with self.sidecar.frame(step) as frame:
                assert_frame(frame, self.reference.frame(step), "sidecar")
        self._unsettled.clear()
        self._compare_sidecar_outputs()
        if not self._is_between_steps:
            assert_tables(self._sidecar_tables, self.reference, "sidecar")
            assert_counters(self.sidecar, self.reference, "sidecar")

    # Comparing

    def _compare_embedded(self) -> None:
        """An embedded book has applied every call when it returns."""
        new = self.reference.poll_outputs()
        self._awaited += new
        self._compare_embedded_outputs(new)
        if not self._is_between_steps:
            assert_frame(self.embedded.frame(), self.reference.frame(), "embedded")
        assert_tables(self._embedded_tables, self.reference, "embedded")
        assert_counters(self.embedded, self.reference, "embedded")

    def _compare_embedded_outputs(self, new: list[ReferenceOutputs]) -> None:
        assert [plain(outputs) for outputs in self.embedded.poll_outputs()] == new, "embedded outputs"

    def _compare_sidecar_outputs(self) -> None:
        """Deliveries of the applied steps are there; of what was called after them, some may be."""
        came: list[ReferenceOutputs] = []
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            came += [plain(outputs) for outputs in self.sidecar.poll_outputs()]
            if len(came) >= self._num_due or time.monotonic() > deadline:
                break
        assert came == self._awaited[: len(came)], "sidecar outputs"
        assert len(came) >= self._num_due, f"the sidecar has not delivered {self._awaited[len(came) :]}"
        del self._awaited[: len(came)]
        self._num_due = 0

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

    def _compare_held_frames(self) -> None:
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
        """Committed ids and draft rounds of a row, by the public calls."""
        self.settle()
        expected = answer(self.reference.token_ids, row)
        for book in (self.embedded, self.sidecar):
            ids, outputs = answer(book.token_ids, row), answer(book.output_token_ids, row)
            rounds = answer(book.spec_decode_stats, row)
            if isinstance(expected, Refused):
                assert ids == outputs == rounds == expected
                continue
            assert_rounds(rounds, self.reference.spec_decode_stats(row), "one row")
            num_prompt_tokens = int(self.reference.frame()["num_prompt_tokens"][row.index])
            assert ids.tolist() == expected
            assert outputs.tolist() == expected[num_prompt_tokens:]
            assert ids.dtype == outputs.dtype == np.int32
            assert not any(array.flags.writeable for array in (ids, outputs))

    # Between examples

    def held(self) -> list[Row]:
        """The handles that are not stale, by row."""
        rows = enumerate(self.reference._rows)
        return [Row(index, row.generation) for index, row in rows if row.asked is not State.FREE]

    def empty(self) -> None:
        """Releases every row, compares once more, and forgets: step numbers, generations and counters go on."""
        for row in self.held():
            self.release(row)
        self.step([], [])
        self.settle()
        assert self.held() == []
        self._held_frames.clear()
        self._calls.clear()
        self._names.clear()
        self.handles.clear()
        self.batches.clear()

    def close(self) -> None:
        """Ends both books."""
        self._pace.wake()
        self.embedded.close()
        self.sidecar.close()

    def script(self) -> str:
        """The calls since the trio was empty, as a test's lines."""
        return "\n".join(
            f"{result + ' = ' if result else ''}trio.{name}("
            + ", ".join([*map(self._text, args), *(f"{key}={self._text(kwargs[key])}" for key in kwargs)])
            + ")"
            for result, name, args, kwargs in self._calls
        )

    def _text(self, value: Any) -> str:
        if isinstance(value, Row):
            return self._names.get(value, repr(value))
        if isinstance(value, TrioBatch):
            return value.name
        if isinstance(value, Logprobs):
            return f"Logprobs({', '.join(map(self._text, value))})"
        if isinstance(value, np.ndarray):
            return f"np.array({value.tolist()}, np.{value.dtype}).reshape({value.shape})"
        if isinstance(value, RequestParams):
            fields = {name: given for name, given in vars(value).items() if given != getattr(RequestParams, name)}
            return f"RequestParams({', '.join(f'{name}={given!r}' for name, given in fields.items())})"
        if isinstance(value, tuple | list):
            return f"[{', '.join(map(self._text, value))}]"
        return repr(value)


class TrioPool:
    """Trios between examples, one a configuration. One that failed is thrown away: its books may differ."""

    def __init__(self) -> None:
        self._idle: dict[BookConfig, Trio] = {}

    def take(self, config: BookConfig) -> Trio:
        """An empty trio, kept or new."""
        return self._idle.pop(config, None) or Trio(config)

    def give_back(self, trio: Trio) -> None:
        """Empties the trio and keeps it."""
        try:
            trio.empty()
        except BaseException:
            trio.close()
            raise
        self._idle[trio.config] = trio

    def close(self) -> None:
        """Ends all that are kept."""
        for trio in self._idle.values():
            trio.close()
