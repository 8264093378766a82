"""What the decoder and the ledger do with messages that no runner meant.

`Fuzzed` is a sidecar without its sockets: the real duty cycle, ledger, checkpoints and outputs logs, over memory of
its own. It is fed right messages, made for the state that the book is in, and mutated ones. Whatever comes, the book
must stay one that right messages could have made: `check` says what that means, `others_unchanged` that a message
changes nothing but what it names.
"""

from __future__ import annotations

import mmap
import random
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from asyncbook.ipc import wire
from asyncbook.ipc.errors import BadMessage
from asyncbook.ipc.layout import Counter, Field, FinishReason, Layout
from asyncbook.ipc.outputs_log import OutputsLogReader
from asyncbook.worker.duty import DutyCycle
from asyncbook.worker.idle import Idle
from asyncbook.worker.life import State

LAYOUT = Layout(max_num_reqs=4, max_model_len=24, num_spec_tokens=3, max_in_flight=2, max_logprobs=2)
VOCAB_SIZE = 50
NO_BYTES = memoryview(b"")
NUMBERS = [0, 1, -1, 2, 3, 4, 5, 24, 25, 49, 50, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**63 - 1,
           -(2**63), 2**64 - 1]  # fmt: skip
PUBLIC = slice(0, Field.FINISH_REASON + 1)
# What a list that a row is on says of it: a step may take any row off.
MARKS = [Field.IS_TOUCHED, Field.IS_PENDING, Field.IS_DIRTY, Field.NUM_DELIVERED]


class FakeChannel:
    """Where the duty cycle gets its messages from."""

    def __init__(self) -> None:
        self.data: bytes | None = None

    def receive_command(self) -> bytes | None:
        data, self.data = self.data, None
        return data

    def send_event(self, event: wire.Event, timeout_ms: int = 0) -> bool:
        return True

    def receive_from_subscriber(self) -> None:
        return None


class NoWait:
    """An idle policy that is never asked."""

    def worked(self) -> None:
        pass

    def idle(self) -> Idle:
        raise AssertionError


class Fuzzed:
    """A book's writer, and what it may be asked."""

    def __init__(self, predecessor: Fuzzed | None = None) -> None:
        """A new book, or one that takes over what another left."""
        layout = self.layout = LAYOUT
        self.memory = memoryview(mmap.mmap(-1, layout.total_bytes)) if predecessor is None else predecessor.memory
        self._channel = FakeChannel()
        self.duty = DutyCycle(
            layout,
            self.memory,
            VOCAB_SIZE,
            typing.cast(Any, self._channel),
            NoWait(),
            is_restart=predecessor is not None,
        )
        self.ledger = self.duty._ledger
        runner_part = self.memory[layout.runner_offset : layout.runner_end]
        self._reader = (  # the runner's own, whatever becomes of its sidecar
            OutputsLogReader(layout, self.memory, runner_part) if predecessor is None else predecessor._reader
        )
        self.num_bad = self.num_applied = self.num_gaps = self.num_records = 0

    @property
    def next_seq(self) -> int:
        return self.ledger.applied_seq + 1

    def feed(self, data: bytes) -> bool:
        """One message through the duty cycle; whether it was applied. Anything but `BadMessage` is a fault."""
        counters = self.ledger.tables.counters
        bad_before, seq_before = int(counters[Counter.BAD_MESSAGES]), self.ledger.applied_seq
        self._channel.data = data
        try:
            message = self.duty._next_message()
            if message is not None:
                self.duty._apply(message)
        except BadMessage:  # out of order: a real sidecar ends here and says so
            self.duty._early = None
            self.num_gaps += 1
            return False
        self.num_bad += int(counters[Counter.BAD_MESSAGES]) - bad_before
        was_applied = self.ledger.applied_seq != seq_before
        self.num_applied += was_applied
        return was_applied

    def read_outputs(self) -> int:
        """Takes what is delivered, as a runner does; how many records came."""
        num_records = 0
        while (record := self._reader.take()) is not None:
            columns = record.columns
            offsets = columns.offsets
            assert offsets[0] == 0
            assert (np.diff(offsets) >= 0).all()
            assert columns.token_ids.size == offsets[-1]
            assert ((columns.token_ids >= 0) & (columns.token_ids < VOCAB_SIZE)).all()
            assert set(columns.finish_reasons.tolist()) <= {*map(int, FinishReason)}
            num_records += 1
        self.num_records += num_records
        return num_records

    # What must hold

    def check(self) -> None:
        """The book is one that right messages could have made."""
        work, tables, layout = self.ledger.work, self.ledger.tables, self.layout
        n = layout.max_num_reqs
        state = work[Field.STATE]
        num_tokens, no_spec = work[Field.NUM_TOKENS], work[Field.NUM_TOKENS_NO_SPEC]
        assert ((num_tokens >= no_spec) & (no_spec >= 0) & (num_tokens <= layout.max_model_len)).all()
        computed = work[Field.NUM_COMPUTED_TOKENS]
        assert ((computed >= 0) & (computed <= layout.max_model_len + 1)).all()
        assert not np.delete(work[:, n:], int(Field.IS_DIRTY), axis=0).any(), "beyond the last row"
        assert not tables.token_ids[:, layout.max_model_len :].any(), "beyond the last position"
        assert not tables.is_token_ids[:, layout.max_model_len :].any()
        assert tables.is_token_ids.view(np.uint8).max() <= 1
        assert ((tables.token_ids >= 0) & (tables.token_ids < VOCAB_SIZE)).all()
        for row in range(n):
            assert not tables.token_ids[row, num_tokens[row] :].any(), f"row {row} is not zero behind its tokens"
            assert not tables.is_token_ids[row, num_tokens[row] :].any()
            if state[row] == State.FREE:
                assert not np.delete(work[PUBLIC, row], int(Field.GENERATION)).any(), f"free row {row} is not zero"
            else:
                assert 1 <= work[Field.NUM_PROMPT_TOKENS, row] <= no_spec[row]
                assert 0 <= work[Field.NUM_DELIVERED, row] <= work[Field.NUM_OUTPUT_TOKENS, row]
                assert (state[row] == State.FINISHED) == (work[Field.FINISH_REASON, row] != FinishReason.NONE)
        self._check_counters(int((state != State.FREE).sum()))
        self._check_lists()

    def _check_counters(self, num_held: int) -> None:
        counters = self.ledger.tables.counters
        assert (counters >= 0).all()
        assert not counters[self.layout.num_counters :].any()
        assert counters[Counter.ADMITTED] - counters[Counter.RELEASED] == num_held
        dropped = counters[Counter.DROPPED_STALE : Counter.DROPPED_AFTER_FINISH + 1].sum()
        assert counters[Counter.SUBMITTED_TOKENS] == counters[Counter.COMMITTED_TOKENS] + dropped
        assert counters[Counter.ACCEPTED_PER_POS :].sum() == counters[Counter.ACCEPTED_TOKENS]

    def _check_lists(self) -> None:
        lists, lengths = self.ledger.lists, self.ledger.lengths
        for which in range(lists.shape[0]):
            rows = lists[which, : lengths[which]].tolist()
            assert len(set(rows)) == len(rows) <= self.layout.max_num_reqs
            assert all(0 <= row < self.layout.max_num_reqs for row in rows)

    def snapshot(self) -> tuple[np.ndarray, ...]:
        """All that a message could change, and none but a right one may."""
        ledger = self.ledger
        tables = ledger.tables
        return (
            ledger.work.copy(),
            tables.token_ids.copy(),
            tables.is_token_ids.copy(),
            tables.row_counters.copy(),
            ledger.stop_ids.copy(),
            ledger.lengths.copy(),
            np.delete(tables.counters, [Counter.BAD_MESSAGES, Counter.REPLAYED_MESSAGES]),
        )

    def unchanged(self, before: tuple[np.ndarray, ...]) -> bool:
        """Whether nothing is other than it was."""
        return all(np.array_equal(old, new) for old, new in zip(before, self.snapshot(), strict=True))

    def others_unchanged(self, before: tuple[np.ndarray, ...], rows: set[int]) -> bool:
        """Whether no row but these is other than it was."""
        others = [row for row in range(self.layout.max_num_reqs) if row not in rows]
        columns = np.ones(len(Field), np.bool_)
        columns[MARKS] = False
        after = self.snapshot()
        is_same = np.array_equal(before[0][columns][:, others], after[0][columns][:, others])
        return is_same and all(np.array_equal(before[i][others], after[i][others]) for i in (1, 2, 3))

    def named_rows(self, data: bytes) -> set[int]:
        """Rows that a message may change. A step takes the drafts of any row."""
        message = wire.decode_command(data)
        if isinstance(message, wire.Step):
            return set(range(self.layout.max_num_reqs))
        return {message.row} if hasattr(message, "row") else set()


class Traffic:
    """Messages for a book as it is, some of them mutated. All from one seed."""

    def __init__(self, fuzzed: Fuzzed, seed: int) -> None:
        self._fuzzed = fuzzed
        self._random = random.Random(seed)
        self._makers: list[Callable[[int], wire.AnyCommand]] = [
            self._admit, self._admit, self._describe, self._describe, self._step, self._step, self._step, self._step,
            self._row_message, self._row_message, self._release, lambda seq: wire.Barrier(seq), self._restore,
        ]  # fmt: skip

    def right(self) -> bytes:
        """A message that makes sense, or nearly: its kind and numbers are random, its place in the order is right."""
        return wire.encode(self._random.choice(self._makers)(self._fuzzed.next_seq))

    def mutated(self) -> bytes:
        """A message with one to three of its parts replaced, or with its bytes changed."""
        data = self.right()
        for _ in range(self._random.choice([1, 1, 1, 2, 3])):
            data = self._random.choice(MUTATIONS)(self._random, data)
        return data

    def _ids(self, count: int) -> memoryview:
        return wire.as_bytes(np.array([self._random.randrange(VOCAB_SIZE) for _ in range(count)], np.int32))

    def _admit(self, seq: int) -> wire.AnyCommand:
        ledger, pick = self._fuzzed.ledger, self._random
        free = np.flatnonzero(ledger.work[Field.STATE, : LAYOUT.max_num_reqs] == State.FREE).tolist()
        row = pick.choice(free or [0])
        num_prompt, num_outputs = pick.randint(1, 18), pick.choice([0, 0, 2, 5])
        return wire.Admit(
            seq,
            row,
            int(ledger.generation[row]) + 1,
            pick.randrange(100),
            "request",
            self._ids(num_prompt),
            self._ids(num_outputs),
            pick.choice([None, memoryview(bytes(pick.choice([0, 1]) for _ in range(num_prompt)))]),
            pick.randint(0, num_prompt),
            pick.choice([2**31 - 1, num_outputs + pick.randint(1, 9)]),
            pick.choice([0, 3]),
            [pick.randrange(VOCAB_SIZE) for _ in range(pick.choice([0, 1, 3]))],
            [pick.randrange(VOCAB_SIZE) for _ in range(pick.choice([0, 1, 6]))],
            pick.choice([True, False]),
            logprobs_width=pick.choice([0, 0, 1, 2, 3]),
        )

    def _row(self) -> tuple[int, int]:
        row = self._random.randrange(LAYOUT.max_num_reqs)
        return row, int(self._fuzzed.ledger.generation[row])

    def _describe(self, seq: int) -> wire.AnyCommand:
        pick, ledger = self._random, self._fuzzed.ledger
        rows = pick.sample(range(LAYOUT.max_num_reqs), pick.randint(0, LAYOUT.max_num_reqs))
        drafts = [pick.randint(0, LAYOUT.num_spec_tokens) for _ in rows]
        scheduled = [pick.choice([-1, d + 1, max(d, 1), d + pick.randint(1, 20)]) for d in drafts]
        # Mostly what the rows' requests want, as a right runner says it.
        wanted = ledger.work[Field.LOGPROBS_WIDTH, rows].tolist()
        widths = [width if pick.random() < 0.8 else pick.randint(0, 1 + LAYOUT.max_logprobs) for width in wanted]
        fields = np.array([rows, ledger.generation[rows].astype(np.int32), scheduled, drafts, widths], np.int32)
        return wire.DescribeBatch(seq, pick.randrange(3), wire.as_bytes(fields))

    def _step(self, seq: int) -> wire.AnyCommand:
        pick, ledger = self._random, self._fuzzed.ledger
        slot = pick.randrange(3)
        batch = ledger._batches[slot]
        n = 0 if batch is None else batch.shape[1]
        width, draft_width = pick.randint(1, 1 + LAYOUT.num_spec_tokens), pick.randint(0, LAYOUT.num_spec_tokens)
        sampled = np.array([pick.choice([*range(VOCAB_SIZE), -1, -1, -7, 2**31 - 1]) for _ in range(n * width)])
        drafts = np.array([pick.choice([*range(VOCAB_SIZE), -1, -1, 99]) for _ in range(n * draft_width)])
        ids = (wire.as_bytes(array.astype(np.int32)) for array in (sampled, drafts))
        given = pick.randint(0, 1 + LAYOUT.max_logprobs)
        widths = [] if batch is None else batch[wire.BatchField.LOGPROBS_WIDTH].tolist()
        size = width * sum(1 + 2 * min(wanted, given) for wanted in widths if wanted and given)
        entries = memoryview(pick.randbytes(4 * size))
        return wire.Step(seq, ledger.step + 1, slot, width, next(ids), draft_width, next(ids), given, entries)

    def _row_message(self, seq: int) -> wire.AnyCommand:
        pick = self._random
        row, generation = self._row()
        number = pick.randint(0, LAYOUT.max_model_len)
        return pick.choice(
            [
                wire.Abort(seq, row, generation),
                wire.Preempt(seq, row, generation, pick.choice([True, False])),
                wire.Resume(seq, row, generation + 1, number),
                wire.Rewind(seq, row, generation + 1, number),
            ]
        )

    def _release(self, seq: int) -> wire.AnyCommand:
        return wire.Release(seq, *self._row())

    def _restore(self, seq: int) -> wire.AnyCommand:
        rows = [
            wire.RestoredRow(row, "request", [1, 2], [], False, True)
            for row in range(self._random.randint(0, LAYOUT.max_num_reqs))
        ]
        return wire.Restore(seq - 1, rows, [wire.RestoredBatch(0, NO_BYTES)])


# Mutations


def _flip(pick: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(pick.choice([1, 1, 2, 8])):
        if changed:
            changed[pick.randrange(len(changed))] ^= 1 << pick.randrange(8)
    return bytes(changed)


def _cut(pick: random.Random, data: bytes) -> bytes:
    return data[: pick.randrange(len(data) + 1)]


def _lengthen(pick: random.Random, data: bytes) -> bytes:
    more = pick.choice([b"\x00", b"\xc0", pick.randbytes(9), data, b"\x91" * 2000])
    return data + more if pick.random() < 0.5 else more + data


def _splice(pick: random.Random, data: bytes) -> bytes:
    at = pick.randrange(len(data) + 1)
    return data[:at] + pick.randbytes(pick.randint(1, 6)) + data[at + pick.randint(0, 6) :]


def _other_bytes(pick: random.Random, data: bytes) -> bytes:
    """Arrays of ids: cut, longer, or with numbers at the ends of their range."""
    match pick.randrange(4):
        case 0:
            return data[: pick.randrange(len(data) + 1)]
        case 1:
            return data + pick.randbytes(pick.choice([1, 4, 16, 64]))
        case 2:
            return pick.randbytes(pick.choice([0, 4, 16, len(data)]))
    ids = bytearray(data[: len(data) // 4 * 4])
    if ids:
        place = 4 * pick.randrange(len(ids) // 4)
        ids[place : place + 4] = (pick.choice(NUMBERS) % 2**32).to_bytes(4, "little")
    return bytes(ids)


def _other_value(pick: random.Random, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return pick.choice([True, False, None, 1, b""])
    if isinstance(value, int):
        return pick.choice([pick.choice(NUMBERS), value + 1, value - 1]) % 2**64 if pick.random() < 0.5 else (
            pick.choice([number for number in NUMBERS if number < 2**63])
        )  # fmt: skip
    if isinstance(value, bytes):
        return _other_bytes(pick, value)
    if isinstance(value, str):
        return pick.choice(["", "\x00", "x" * 5000, "\N{SNOWMAN}", 5])
    if isinstance(value, list):
        return pick.choice([
            [], [pick.choice(NUMBERS)], [pick.randrange(VOCAB_SIZE)] * pick.choice([1, 30, 70_000]), value * 2, [None],
            [[pick.randrange(-1, 6), [1]]], [[0, b"1234"]],
        ])  # fmt: skip
    return value


def _field(pick: random.Random, data: bytes) -> bytes:
    """Another value in one field. The rest is right, so this gets further than changed bytes."""
    try:
        fields = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data
    if not isinstance(fields, list) or len(fields) < 2:
        return data
    # Seldom the tag and the sequence number, with which everything else is looked at.
    place = pick.randrange(len(fields)) if pick.random() < 0.05 else pick.randrange(2, max(3, len(fields)))
    if place < len(fields):
        fields[place] = _other_value(pick, fields[place])
    return msgspec.msgpack.encode(fields)


def _number_of_fields(pick: random.Random, data: bytes) -> bytes:
    try:
        fields = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data
    if not isinstance(fields, list) or not fields:
        return data
    return msgspec.msgpack.encode([*fields, 1] if pick.random() < 0.5 else fields[:-1])


MUTATIONS = [_field, _field, _field, _field, _field, _flip, _flip, _cut, _lengthen, _splice, _number_of_fields]


# A run


def run(seed: int, num_mutated: int, *, check_every: int = 1) -> Fuzzed:
    """Feeds this many mutated messages, right ones between them. What a message changes is looked at for one in
    `check_every`, and the whole book as often."""
    fuzzed = Fuzzed()
    traffic = Traffic(fuzzed, seed)
    for number in range(num_mutated):
        fuzzed.feed(traffic.right())
        data = traffic.mutated()
        is_looked_at = number % check_every == 0
        before = fuzzed.snapshot() if is_looked_at else None
        was_applied = fuzzed.feed(data)
        if before is not None:
            if was_applied:
                assert fuzzed.others_unchanged(before, fuzzed.named_rows(data)), data
            else:
                assert fuzzed.unchanged(before), data
            fuzzed.check()
        if number % 7 == 0:
            fuzzed.read_outputs()
    fuzzed.check()
    return fuzzed


def run_restores(seed: int, num_mutated: int) -> int:
    """Takes a book over again and again, each time with a mutated `Restore`. One that is refused ends the sidecar;
    after one that is taken, the book goes on. Returns how many were taken."""
    pick = random.Random(seed)
    fuzzed = Fuzzed()
    traffic = Traffic(fuzzed, seed)
    for _ in range(60):
        fuzzed.feed(traffic.right())
    num_taken = 0
    for _ in range(num_mutated):
        fuzzed.ledger.apply(wire.Barrier(fuzzed.next_seq))
        assert fuzzed.duty._bookkeeper._checkpoints is not None
        fuzzed.duty._bookkeeper._checkpoints.write()
        right = restore_of(fuzzed)
        data = right
        for _ in range(pick.choice([1, 1, 2])):
            data = pick.choice(MUTATIONS)(pick, data)
        for candidate in (data, right):
            heir = Fuzzed(fuzzed)
            before = heir.snapshot()
            heir.feed(candidate)
            if not heir.duty._waits_for_restore:
                break
            assert heir.unchanged(before), data
        assert not heir.duty._waits_for_restore, "a right one was refused"
        num_taken += candidate is data
        fuzzed = heir
        traffic = Traffic(fuzzed, pick.randrange(2**32))
        for _ in range(8):
            fuzzed.feed(traffic.right())
        fuzzed.check()
        fuzzed.read_outputs()
    return num_taken


def restore_of(fuzzed: Fuzzed) -> bytes:
    """What the runner sends to a sidecar that takes over at this point."""
    ledger = fuzzed.ledger
    counts = ledger.work[Field.NUM_STOP_IDS]
    rows = [
        wire.RestoredRow(row, "request", ledger.stop_ids[row, : counts[row]].tolist(), [], False, True)
        for row in np.flatnonzero(ledger.work[Field.STATE]).tolist()
    ]
    batches = [
        wire.RestoredBatch(slot, wire.as_bytes(batch))
        for slot, batch in enumerate(ledger._batches)
        if batch is not None
    ]
    return wire.encode(wire.Restore(ledger.applied_seq, rows, batches))
