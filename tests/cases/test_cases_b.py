"""Group B of the cases from the field: async scheduling. Ids arrive for rows that have changed since their launch."""

from __future__ import annotations

import numpy as np
import pytest

from asyncbook import Book, FinishReason, FrameExpired, InFlightFull, RequestParams
from tests.conftest import (
    SMALL,
    TIMEOUT_S,
    Delivered,
    MakeBook,
    columns,
    delivered,
    grown,
    have,
    ids_of,
    in_flight,
    step,
    tables,
    tokens,
)

VOCAB_SIZE = int(SMALL["vocab_size"])


def no_padding(book: Book) -> bool:
    """No -1, nor any other id that is none, anywhere in the table."""
    token_ids = tables(book)[0]
    return bool((token_ids >= 0).all() and (token_ids < VOCAB_SIZE).all())


# B1: -1 placeholders are counted, or index the last entry of the vocabulary.


def test_b1_padding_is_counted_nowhere(make_book: MakeBook) -> None:
    book = make_book(vocab_size=8)
    rows = [book.admit("r0", [1]), book.admit("r1", [2])]
    step(book, rows, [5, 2])
    step(book, rows, [[-1, -1], [-1, -1]])  # a step that sampled nothing: placeholders only
    step(book, rows, [[7, -1], [-1, -1]])
    counts = [np.bincount(book.output_token_ids(row), minlength=8).tolist() for row in rows]
    assert counts == [[0, 0, 0, 0, 0, 1, 0, 1], [0, 0, 1, 0, 0, 0, 0, 0]]
    assert not (tables(book)[0] < 0).any()
    assert [columns(book, row)["num_output_tokens"] for row in rows] == [2, 1]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_b1_padding_never_touches_the_last_column(book: Book, dtype: type) -> None:
    row, below = book.admit("a", [1]), book.admit("b", [2])
    last = SMALL["max_model_len"] - 1
    for _ in range(3):
        step(book, [row, below], np.array([[5, -1, -1], [-1, -1, -1]], dtype), drafts=np.full((2, 5), -1, dtype))
        for table in tables(book):
            assert not table[:, last].any()
    assert tokens(book, row) == [1, 5, 5, 5]
    assert tokens(book, below) == [2]


# B3: draft placeholders of a request that skipped a step reach the model.


@pytest.mark.parametrize("drafts", [[-1, -1], [6, -1], [6, 7]])
@pytest.mark.parametrize("skipped", [1, 2])
def test_b3_drafts_are_gone_when_their_row_skips_a_step(book: Book, drafts: list[int], skipped: int) -> None:
    row, other = book.admit("a", [1]), book.admit("b", [2])
    step(book, [row, other], [5, 5], drafts=[drafts, [9, -1]])
    real = [token_id for token_id in drafts if token_id != -1]
    assert tokens(book, row) == [1, 5, *real]
    assert no_padding(book)
    for _ in range(skipped):
        step(book, [other], [6], drafts=[[8]])
        assert tokens(book, row) == [1, 5]
        assert have(book, row, num_tokens=2, num_tokens_no_spec=2)
    step(book, [row, other], [[7, -1], [7, -1]])
    assert tokens(book, row) == [1, 5, 7]
    assert no_padding(book)


def test_b3_drafts_given_before_the_skip_count_for_no_later_round(book: Book) -> None:
    row = book.admit("a", [1])
    step(book, [row], [5], drafts=[[6, -1]])
    step(book, [], [])
    before = book.spec_decode_stats()
    step(book, [row], [[7, 8, 9]], d=[2])  # the engine's own drafts: it knows them, the book does not
    after = book.spec_decode_stats()
    assert after.num_draft_tokens - before.num_draft_tokens == 2
    assert after.num_accepted_tokens - before.num_accepted_tokens == 2


# B5: after a stop one more id is still on its way.


def test_b5_an_id_behind_the_stop_is_ignored(book: Book) -> None:
    before = book.stats()
    row = book.admit("a", [1], RequestParams(eos_token_id=2))
    batch = book.batch([row])
    with in_flight(book):
        book.submit(batch, ids_of([2]))
        number = book.submit(batch, ids_of([44]))
    book.wait_applied(number, TIMEOUT_S)
    assert tokens(book, row) == [1, 2]
    assert have(book, row, finish_reason=FinishReason.STOP, stop_reason=2, num_output_tokens=1, last_token_id=2)
    assert delivered(book) == {"a": Delivered([2], FinishReason.STOP, 2, 1)}
    assert grown(book, before) == {
        "admitted_requests": 1, "submitted_tokens": 2, "committed_tokens": 1, "dropped_finished": 1, "finished_STOP": 1
    }  # fmt: skip


def test_b5_a_row_handed_on_before_the_late_id_keeps_clean(book: Book) -> None:
    row = book.admit("a", [1], RequestParams(eos_token_id=2))
    batch = book.batch([row])
    step(book, batch, [2])
    book.release(row)
    new = book.admit("new", [3])
    assert new.index == row.index
    step(book, batch, [44])
    assert tokens(book, new) == [3]
    assert delivered(book) == {"a": Delivered([2], FinishReason.STOP, 2, 1)}


# B6: a late output of the old request is applied to the new one of the same id.


@pytest.mark.parametrize("same_row", [False, True])
@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("sent_before", [False, True])
def test_b6_a_late_id_belongs_to_its_generation(book: Book, same_row: bool, name: str, sent_before: bool) -> None:
    before = book.stats()
    old = book.admit("x", [1])
    batch = book.batch([old])
    with in_flight(book):
        if sent_before:
            book.submit(batch, ids_of([40]))
        (book.release if same_row else book.abort)(old)
        new = book.admit(name, [3])
        number = book.submit(batch, ids_of([50]))
    book.wait_applied(number, TIMEOUT_S)
    assert (new.index == old.index) == same_row
    assert book.output_token_ids(new).tolist() == []
    assert have(book, new, num_output_tokens=0, finish_reason=FinishReason.NONE, num_computed_tokens=0)
    growth = grown(book, before)
    assert growth["dropped_stale" if same_row else "dropped_finished"] == 1
    assert growth.get("committed_tokens", 0) == sent_before
    # One request or two under the id, their outputs do not mix: the old one's, then an end, then the new one's.
    pieces = [(delta.request_id, delta.token_ids.tolist(), delta.finish_reason) for outputs in book.poll_outputs()
              for delta in outputs]  # fmt: skip
    assert [token_id for _, ids, _ in pieces for token_id in ids] == ([40] if sent_before else [])
    assert pieces[-1] == ("x", [], FinishReason.ABORT)
    step(book, [new], [60])
    assert delivered(book) == {name: Delivered([60], num_pieces=1)}


# B7: a ring of slots wraps onto one that is not read yet.


def test_b7_nothing_unread_is_overwritten(make_book: MakeBook, kind: str) -> None:
    book = make_book(max_in_flight=5)
    row, padded = book.admit("r", [1]), book.admit("padded", [2])
    alone, both = book.batch([row]), book.batch([padded, row])
    base = step(book, alone, [16])
    unread = book.frame(base)
    sent = []
    with in_flight(book):
        for number in range(8):
            batch, ids = (alone, [17 + number]) if number % 2 else (both, [-1, 17 + number])
            try:
                book.submit(batch, ids_of(ids))
                sent.append(17 + number)
            except InFlightFull:
                assert kind != "embedded"
                assert number >= 5
        assert len(sent) == (8 if kind == "embedded" else 5)
        if kind != "embedded":
            unread.check()
            assert int(unread.last_token_id[row.index]) == 16
    book.wait_applied(base + len(sent), TIMEOUT_S)
    assert tokens(book, row) == [1, 16, *sent]
    assert tokens(book, padded) == [2]
    assert delivered(book)["r"].token_ids == [16, *sent]


def test_b7_a_frame_given_to_a_later_step_says_so(book: Book) -> None:
    row = book.admit("r", [1])
    number = step(book, [row], [17])
    frame = book.frame(number)
    for _ in range(3):
        step(book, [row], [18])
    frame.check()
    assert int(frame.last_token_id[row.index]) == 17
    step(book, [row], [18])
    with pytest.raises(FrameExpired):
        frame.check()


# B8: frames in flight over a preemption drain against counters that were reset.


@pytest.mark.parametrize("delivers", [True, False])
@pytest.mark.parametrize("explicit", [True, False])
def test_b8_in_flight_over_a_preemption(book: Book, delivers: bool, explicit: bool) -> None:
    row = book.admit("a", list(range(1, 13)), num_computed_tokens=11)
    step(book, [row], [5])
    assert have(book, row, num_computed_tokens=12)
    batch = book.batch([row], num_scheduled_tokens=[1] if explicit else None)
    book.poll_outputs()
    before = book.stats()
    book.preempt(row, drop_in_flight=not delivers)
    for token_id in (7, 8):
        step(book, batch, [token_id])
        assert have(book, row, num_computed_tokens=0, num_accepted_tokens=0)
    outputs = [5, 7, 8] if delivers else [5]
    assert have(book, row, num_output_tokens=len(outputs), num_tokens=12 + len(outputs))
    row = book.resume(row)
    step(book, [row], [9])
    assert have(book, row, num_computed_tokens=12 + len(outputs), num_output_tokens=len(outputs) + 1)
    assert book.output_token_ids(row).tolist() == [*outputs, 9]
    assert delivered(book)["a"].token_ids == [*outputs[1:], 9]
    growth = grown(book, before)
    assert growth.get("dropped_preempted", 0) == (0 if delivers else 2)
    assert growth["committed_tokens"] == (3 if delivers else 1)


def test_b8_applied_before_the_preemption_or_behind_it(book: Book) -> None:
    row = book.admit("a", [1, 2])
    batch = book.batch([row])
    step(book, batch, [5])
    with in_flight(book):
        book.submit(batch, ids_of([7]))  # launched and sent before the preemption: applied as always
        book.preempt(row, drop_in_flight=True)
        number = book.submit(batch, ids_of([8]))
    book.wait_applied(number, TIMEOUT_S)
    assert tokens(book, row) == [1, 2, 5, 7]
    assert have(book, row, num_computed_tokens=0)


def test_b8_an_end_in_flight_ends_the_request(book: Book) -> None:
    row = book.admit("a", [1], RequestParams(stop_token_ids=[9]))
    batch = book.batch([row])
    step(book, batch, [5])
    book.preempt(row)
    step(book, batch, [9])
    step(book, batch, [6])
    assert have(book, row, finish_reason=FinishReason.STOP, stop_reason=9, num_computed_tokens=0)
    assert tokens(book, row) == [1, 5, 9]
    row = book.resume(row)
    step(book, [row], [6])
    assert tokens(book, row) == [1, 5, 9]
    assert delivered(book)["a"] == Delivered([5, 9], FinishReason.STOP, 9, 2)


@pytest.mark.parametrize("explicit", [False, True])
def test_b8_preempted_and_resumed_again_and_again(book: Book, explicit: bool) -> None:
    row = book.admit("a", [1, 2])
    ids: list[int] = []
    for turn in range(4):
        scheduled = [columns(book, row)["num_tokens_no_spec"]] if explicit and turn else None
        batch = book.batch([row], num_scheduled_tokens=scheduled)
        step(book, batch, [10 + turn])
        book.preempt(row)
        step(book, book.batch([row], num_scheduled_tokens=[1]), [20 + turn])
        ids += [10 + turn, 20 + turn]
        row = book.resume(row)
    step(book, [], [])
    assert book.output_token_ids(row).tolist() == ids
    assert have(book, row, num_computed_tokens=0, num_output_tokens=8)
    assert delivered(book)["a"].token_ids == ids


# B9: what is reserved and what is delivered follow different rules for the last prefill chunk.


def test_b9_exactly_the_last_chunk_delivers(book: Book) -> None:
    prompt, decoding = book.admit("prompt", list(range(1, 11))), book.admit("decoding", [1])
    step(book, [decoding], [50])
    book.poll_outputs()
    came = []
    for scheduled, sampled in (([8, 1], [99, 51]), ([2, 1], [5, 52]), ([1, 1], [6, 53])):
        step(book, [prompt, decoding], sampled, scheduled=scheduled)
        came.append({name: request.token_ids for name, request in delivered(book).items()})
        for row in (prompt, decoding):
            assert min(value for name, value in columns(book, row).items() if name != "stop_reason") >= 0
    assert came == [{"decoding": [51]}, {"prompt": [5], "decoding": [52]}, {"prompt": [6], "decoding": [53]}]
    assert have(book, prompt, num_output_tokens=2, num_computed_tokens=11)


@pytest.mark.parametrize("chunk", range(1, 11))
def test_b9_for_every_split_of_the_prompt(book: Book, chunk: int) -> None:
    row = book.admit("a", list(range(1, 11)))
    computed, came = 0, []
    while computed < 10:
        size = min(chunk, 10 - computed)
        step(book, [row], [42], scheduled=[size])
        computed += size
        assert have(book, row, num_computed_tokens=computed)
        came.append(len(delivered(book)))
    assert came == [0] * (len(came) - 1) + [1]
    assert have(book, row, num_output_tokens=1)


# B11: ids of the step before are taken in the order of the rows of the step after.


def test_b11_another_order_of_the_batch(book: Book) -> None:
    a, b = book.admit("a", [1]), book.admit("b", [2])
    step(book, [a, b], [10, 20], drafts=[[1, 2], [3, 4]])
    c = book.admit("c", [7, 8])
    inputs = {row: tokens(book, row)[-3:] for row in (a, b)}
    assert inputs == {a: [10, 1, 2], b: [20, 3, 4]}
    step(book, [b, c, a], [[3, 4, 21], [30, -1, -1], [1, 11, -1]], d=[2, 0, 2], drafts=[[5, 5], [6, 6], [7, 7]])
    assert tokens(book, a) == [1, 10, 1, 11, 7, 7]
    assert tokens(book, b) == [2, 20, 3, 4, 21, 5, 5]
    assert tokens(book, c) == [7, 8, 30, 6, 6]
    accepted = {row: columns(book, row)["num_accepted_tokens"] for row in (a, b, c)}
    assert accepted == {a: 1, b: 2, c: 0}
    step(book, [c, a, b], [[31], [12], [22]])
    assert [tokens(book, row)[-1] for row in (a, b, c)] == [12, 22, 31]
