"""Messages whose bytes are fine and whose numbers are not: each is refused by the ledger with nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncbook
from asyncbook import BookConfig, InvalidRequest, RequestParams
from asyncbook.ipc import wire
from asyncbook.ipc.errors import BadMessage
from asyncbook.ipc.layout import Field
from tests.fuzz import LAYOUT, NO_BYTES, VOCAB_SIZE, Fuzzed, restore_of

GOOD: dict[str, Any] = {
    "row": 1, "generation": 1, "request_no": 7, "request_id": "a", "prompt_token_ids": [1, 2, 3],
    "output_token_ids": [4], "is_token_ids": b"\x01\x00\x01", "num_computed_tokens": 2, "max_tokens": 9,
    "min_tokens": 1, "eos_token_ids": [5], "stop_token_ids": [6, 7, 8, 9, 10], "ignore_eos": False,
}  # fmt: skip


def ids(values: Any) -> memoryview:
    return wire.as_bytes(np.array(values, np.int32))


def admission(seq: int, **other: Any) -> wire.Admit:
    """An admission that is right but for some fields. Lists of ids become their bytes."""
    fields = GOOD | other
    for name in ("prompt_token_ids", "output_token_ids"):
        value = fields[name]
        fields[name] = memoryview(value) if isinstance(value, bytes) else ids(value)
    if fields["is_token_ids"] is not None:
        fields["is_token_ids"] = memoryview(fields["is_token_ids"])
    return wire.Admit(seq, **fields)


def batch(
    *, rows: Any = (0,), generations: Any = (1,), scheduled: Any = (-1,), drafts: Any = (0,), widths: Any = (0,)
) -> memoryview:
    return ids([rows, generations, scheduled, drafts, widths])


@pytest.fixture
def fuzzed() -> Fuzzed:
    """Row 0 is held and has a step behind it; the batch in slot 0 names it."""
    book = Fuzzed()
    book.feed(wire.encode(admission(1, row=0)))
    book.feed(wire.encode(wire.DescribeBatch(2, 0, batch())))
    book.feed(wire.encode(wire.Step(3, 1, 0, 1, ids([11]), 0, NO_BYTES)))
    assert book.ledger.applied_seq == 3
    assert book.ledger.work[Field.NUM_TOKENS, 0] == 5
    return book


def is_refused(fuzzed: Fuzzed, message: wire.AnyCommand) -> bool:
    """By the ledger itself, and by the duty cycle, which counts it; the next right message is applied."""
    before = fuzzed.snapshot()
    with pytest.raises(BadMessage):
        fuzzed.ledger.apply(message)
    num_bad = fuzzed.num_bad
    assert not fuzzed.feed(wire.encode(message))
    assert fuzzed.num_bad == num_bad + 1
    assert fuzzed.unchanged(before)
    fuzzed.check()
    return fuzzed.feed(wire.encode(wire.Barrier(fuzzed.next_seq)))


BAD_FIELDS: list[tuple[str, Any]] = [
    *(("row", value) for value in (-1, LAYOUT.max_num_reqs, 2**31, 2**63 - 1, -(2**63))),
    *(("generation", value) for value in (0, 2, -1, 2**32, 2**63 - 1)),
    *(("request_no", value) for value in (-1, 2**31, 2**63 - 1)),
    *(("prompt_token_ids", value) for value in ([], [VOCAB_SIZE], [-1], [1] * 24, b"123", b"12345")),
    *(("output_token_ids", value) for value in ([VOCAB_SIZE], [-(2**31)], [1] * 22, b"1")),
    *(("is_token_ids", value) for value in (b"", b"\x01\x01", b"\x01\x00\x02", b"\xff\x00\x00", b"\x01" * 4)),
    *(("num_computed_tokens", value) for value in (-1, 5, 2**31, 2**63 - 1)),
    *(("max_tokens", value) for value in (0, 1, -1, 2**31, -(2**63))),
    *(("min_tokens", value) for value in (-1, 2**31, 2**63 - 1)),
    *(("logprobs_width", value) for value in (-1, 2 + LAYOUT.max_logprobs, 2**31, 2**63 - 1, -(2**63))),
    *((name, value) for name in ("stop_token_ids", "eos_token_ids") for value in (
        [-1], [2**31], [1, -(2**63)], [1] * (wire.MAX_STOP_IDS + 1))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS, ids=lambda value: str(value)[:24])
def test_an_admission_with_one_wrong_field(fuzzed: Fuzzed, name: str, value: Any) -> None:
    assert is_refused(fuzzed, admission(fuzzed.next_seq, **{name: value}))
    assert fuzzed.feed(wire.encode(admission(fuzzed.next_seq)))


@pytest.mark.parametrize(
    "message",
    [
        lambda seq: wire.DescribeBatch(seq, 32, batch()),
        lambda seq: wire.DescribeBatch(seq, -1, batch()),
        lambda seq: wire.DescribeBatch(seq, 0, memoryview(b"123")),
        lambda seq: wire.DescribeBatch(seq, 0, ids([[0] * 5] * 5)),
        lambda seq: wire.DescribeBatch(seq, 0, batch(rows=[4])),
        lambda seq: wire.DescribeBatch(seq, 0, batch(rows=[-1])),
        lambda seq: wire.DescribeBatch(seq, 0, batch(drafts=[4])),
        lambda seq: wire.DescribeBatch(seq, 0, batch(drafts=[-1])),
        lambda seq: wire.DescribeBatch(seq, 0, batch(widths=[-1])),
        lambda seq: wire.DescribeBatch(seq, 0, batch(widths=[2 + LAYOUT.max_logprobs])),
        lambda seq: wire.DescribeBatch(seq, 0, batch(scheduled=[0])),
        lambda seq: wire.DescribeBatch(seq, 0, batch(scheduled=[-2])),
        lambda seq: wire.DescribeBatch(seq, 0, batch(scheduled=[1], drafts=[2])),
        lambda seq: wire.Step(seq, 2, 0, 0, NO_BYTES, 0, NO_BYTES),
        lambda seq: wire.Step(seq, 2, 0, 5, ids([1] * 5), 0, NO_BYTES),
        lambda seq: wire.Step(seq, 2, 0, -1, NO_BYTES, 0, NO_BYTES),
        lambda seq: wire.Step(seq, 2, 0, 1, memoryview(b"123"), 0, NO_BYTES),
        lambda seq: wire.Step(seq, 2, 0, 1, ids([1]), 4, ids([1] * 4)),
        lambda seq: wire.Step(seq, 2, 0, 1, ids([1]), -1, NO_BYTES),
        lambda seq: wire.Step(seq, 2, 0, 2**62, ids([1]), 0, NO_BYTES),
        lambda seq: wire.Step(seq, 2, 0, 1, ids([1]), 0, NO_BYTES, -1, NO_BYTES),
        lambda seq: wire.Step(seq, 2, 0, 1, ids([1]), 0, NO_BYTES, 2**62, NO_BYTES),
        lambda seq: wire.Step(seq, 2, 0, 1, ids([1]), 0, NO_BYTES, 2 + LAYOUT.max_logprobs, NO_BYTES),
        lambda seq: wire.Step(seq, 2, 0, 1, ids([1]), 0, NO_BYTES, 1, ids([1, 1, 0])),  # nobody wants it
        lambda seq: wire.Step(seq, 3, 0, 1, ids([1]), 0, NO_BYTES),
        lambda seq: wire.Step(seq, 2, 1, 1, ids([1]), 0, NO_BYTES),
        lambda seq: wire.Step(seq, 2, -32, 1, ids([1]), 0, NO_BYTES),
        lambda seq: wire.Rewind(seq, 0, 2, -1),
        lambda seq: wire.Rewind(seq, 0, 2, 25),
        lambda seq: wire.Rewind(seq, 0, 2, 2**63 - 1),
        lambda seq: wire.Resume(seq, 0, 2, 2**31),
        lambda seq: wire.Resume(seq, 0, 2, 0),  # it is not preempted
        lambda seq: wire.Abort(seq, 2**40, 1),
        lambda seq: wire.Preempt(seq, 4, 1, False),
        lambda seq: wire.Release(seq, -5, 1),
    ],
)
def test_a_message_with_a_wrong_number(fuzzed: Fuzzed, message: Callable[[int], wire.AnyCommand]) -> None:
    assert is_refused(fuzzed, message(fuzzed.next_seq))


def test_the_last_generation_is_not_left_behind(fuzzed: Fuzzed) -> None:
    fuzzed.ledger.generation[0] = 2**32 - 1
    assert is_refused(fuzzed, wire.Rewind(fuzzed.next_seq, 0, 2**32, 0))


# What a sidecar that takes over is told


def restored(fuzzed: Fuzzed, message: wire.Restore) -> bool:
    """Whether a sidecar that takes the book over goes on with this; where not, it has changed nothing."""
    checkpoints = fuzzed.duty._bookkeeper._checkpoints
    assert checkpoints is not None
    checkpoints.write()
    heir = Fuzzed(fuzzed)
    before = heir.snapshot()
    heir.feed(wire.encode(message))
    if heir.duty._waits_for_restore:
        assert heir.unchanged(before)
        assert heir.num_gaps == 1  # it ends, and says why
    return not heir.duty._waits_for_restore


STOP_IDS = [6, 7, 8, 9, 10, 5]


@pytest.mark.parametrize(
    ("rows", "batches"),
    [
        ([], []),  # row 0 has six stop ids: a step would look for them beyond the room for four
        ([(0, [])], []),
        ([(0, STOP_IDS[:-1])], []),
        ([(0, [1] * 7)], []),
        ([(0, [-1] * 6)], []),
        ([(0, [2**40] * 6)], []),
        ([(0, STOP_IDS), (1, [])], []),
        ([(0, STOP_IDS), (-1, [])], []),
        ([(-4, STOP_IDS)], []),
        ([(0, STOP_IDS), (2**62, [])], []),
        ([(0, STOP_IDS)], [(32, batch())]),
        ([(0, STOP_IDS)], [(-1, batch())]),
        ([(0, STOP_IDS)], [(0, memoryview(b"1"))]),
        ([(0, STOP_IDS)], [(0, batch(rows=[9]))]),
        ([(0, STOP_IDS)], [(0, batch(widths=[9]))]),
    ],
)
def test_a_restore_that_is_wrong(fuzzed: Fuzzed, rows: Any, batches: Any) -> None:
    message = wire.Restore(
        fuzzed.ledger.applied_seq,
        [wire.RestoredRow(row[0], "request", row[1], [], False, True) for row in rows],
        [wire.RestoredBatch(*described) for described in batches],
    )
    assert not restored(fuzzed, message)


def test_a_restore_that_is_right(fuzzed: Fuzzed) -> None:
    right = wire.decode_command(restore_of(fuzzed))
    assert isinstance(right, wire.Restore)
    assert restored(fuzzed, right)


def test_a_restore_at_another_time_is_skipped(fuzzed: Fuzzed) -> None:
    before = fuzzed.snapshot()
    assert not fuzzed.feed(restore_of(fuzzed))
    assert fuzzed.num_bad == 1
    assert fuzzed.unchanged(before)
    assert fuzzed.feed(wire.encode(wire.Barrier(fuzzed.next_seq)))


def test_a_sidecar_that_takes_over_takes_nothing_before_its_restore(fuzzed: Fuzzed) -> None:
    heir = Fuzzed(fuzzed)
    before = heir.snapshot()
    heir.feed(wire.encode(wire.Step(heir.next_seq, 2, 0, 1, ids([1]), 0, NO_BYTES)))
    assert heir.num_gaps == 1
    assert heir.unchanged(before)


# What crashed the decoder


@pytest.mark.parametrize("depth", [2000, 300_000])
def test_a_nested_message_is_bad(depth: int) -> None:
    for data in (b"\x95\x08\x01\x02\x03" + b"\x91" * depth, b"\x91" * depth, b"\x81" * depth):
        with pytest.raises(BadMessage):
            wire.decode_command(data)
        with pytest.raises(BadMessage):
            wire.decode_event(data)


def test_a_message_with_a_field_more_is_bad() -> None:
    release = wire.encode(wire.Release(1, 2, 3))
    with pytest.raises(BadMessage):
        wire.decode_command(b"\x95" + release[1:] + b"\x04")


def test_kinds_of_bad_messages_are_few(fuzzed: Fuzzed, caplog: pytest.LogCaptureFixture) -> None:
    for row in range(100, 200):
        fuzzed.feed(wire.encode(wire.Release(fuzzed.next_seq, row, 1)))
        fuzzed.feed(b"\xc1" * row)
    assert fuzzed.num_bad == 200
    assert len(caplog.records) == 2


# What the runner refuses by name, so that no message of its own is refused


@pytest.mark.parametrize(
    ("request_id", "params", "fragment"),
    [
        ("x" * (wire.MAX_REQUEST_ID_BYTES + 1), RequestParams(), str(wire.MAX_REQUEST_ID_BYTES)),
        ("a", RequestParams(stop_token_ids=range(wire.MAX_STOP_IDS), eos_token_id=1), str(wire.MAX_STOP_IDS)),
    ],
)
def test_what_is_too_long_for_a_message(request_id: str, params: RequestParams, fragment: str) -> None:
    with asyncbook.open(BookConfig(max_num_reqs=2, max_model_len=8, vocab_size=100)) as book:
        with pytest.raises(InvalidRequest, match=fragment):
            book.admit(request_id, [1], params)
        many = RequestParams(stop_token_ids=range(wire.MAX_STOP_IDS))
        assert book.admit("x" * wire.MAX_REQUEST_ID_BYTES, [1], many).index == 0
