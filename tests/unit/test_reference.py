"""Examples worked out by hand from docs/ledger.md, one or more for each rule and each point that the page decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.reference import (
    COLUMNS,
    LEAST_INT32,
    LIFE,
    Event,
    Finish,
    ReferenceBook,
    ReferenceOutputs,
    ReferenceParams,
    ReferenceRefused,
    ReferenceSpecStats,
    Row,
    State,
)


def make(**options: int) -> ReferenceBook:
    """A small book."""
    return ReferenceBook(**({"max_num_reqs": 4, "max_model_len": 16, "vocab_size": 100} | options))


def columns(book: ReferenceBook, index: int) -> dict[str, int]:
    """The row's columns in the latest frame."""
    return {name: int(column[index]) for name, column in book.frame().items()}


def have(book: ReferenceBook, index: int, **expected: int) -> bool:
    """Whether the row shows these values in the latest frame."""
    return {name: columns(book, index)[name] for name in expected} == expected


def tokens(book: ReferenceBook, index: int, count: int) -> list[int]:
    """The first ids of the row; everything behind them must be zero in both tables."""
    table, flags = book.token_ids_table()[index], book.is_token_ids_table()[index]
    assert not table[count:].any()
    assert not flags[count:].any()
    return [int(token_id) for token_id in table[:count]]


def step(book: ReferenceBook, row: Row, ids: Sequence[int], drafts: Any = None, *, scheduled: int | None = None,
         d: int | None = None) -> int:  # fmt: skip
    """One step of one row."""
    batch = book.batch(
        [row],
        num_scheduled_tokens=None if scheduled is None else [scheduled],
        num_draft_tokens=None if d is None else [d],
    )
    return book.submit(batch, [list(ids)], draft_token_ids=None if drafts is None else [list(drafts)])


def drops(book: ReferenceBook) -> dict[str, int]:
    """The drop counters that are not zero."""
    return {reason: count for reason, count in book.dropped.items() if count}


def refused(name: str) -> Any:
    """The call is refused as this error of the contract."""
    return pytest.raises(ReferenceRefused, match=rf"^{name}: ")


# Columns and tables


def test_frame_zero_and_dtypes() -> None:
    frame = make().frame(0)
    assert set(frame) == set(COLUMNS)
    assert len(frame) == 10
    assert frame["generation"].dtype == np.uint32
    assert frame["finish_reason"].dtype == np.uint8
    assert frame["stop_reason"].dtype == np.int32
    assert not any(column.any() for column in frame.values())


def test_admit_columns_show_in_the_next_frame() -> None:
    book = make()
    row = book.admit("a", [1, 2, 3], output_token_ids=[7, 8], num_computed_tokens=4)
    assert row == (0, 1)
    assert columns(book, 0)["num_tokens"] == 0
    assert tokens(book, 0, 5) == [1, 2, 3, 7, 8]
    assert book.submit(book.batch([]), []) == 1
    assert columns(book, 0) == {
        "num_prompt_tokens": 3,
        "num_tokens_no_spec": 5,
        "num_tokens": 5,
        "num_computed_tokens": 4,
        "num_output_tokens": 2,
        "num_accepted_tokens": 0,
        "last_token_id": 8,
        "stop_reason": -1,
        "generation": 1,
        "finish_reason": 0,
    }
    assert book.poll_outputs() == []


def test_is_token_ids_follows_prompt_outputs_and_drafts() -> None:
    book = make(num_spec_tokens=2)
    row = book.admit("a", [1, 2, 3], prompt_is_token_ids=[True, False, True], output_token_ids=[4])
    step(book, row, [5], [6, 7])
    assert book.is_token_ids_table()[0, :8].tolist() == [True, False, True, True, True, True, True, False]


def test_release_leaves_only_the_generation() -> None:
    book = make(num_spec_tokens=2)
    row = book.admit("a", range(1, 9))
    step(book, row, [5], [6, 7])
    book.release(row)
    book.submit(book.batch([]), [])
    assert columns(book, 0) == dict.fromkeys(COLUMNS, 0) | {"generation": 1}
    assert tokens(book, 0, 0) == []
    assert book.admit("b", [9]) == (0, 2)
    assert tokens(book, 0, 1) == [9]


def test_frames_and_committed_ids() -> None:
    book = make(max_in_flight=1)
    row = book.admit("a", [1, 2])
    with refused("NotApplied"):
        book.token_ids(row)
    for count in range(1, 4):
        assert book.submit(book.batch([row]), [[count]]) == count
        assert book.token_ids(row) == [1, 2, *range(1, count + 1)]
        assert book.frame(1)["num_tokens"][0] == 3
    for step_no in (0, -1):
        with refused("FrameExpired"):
            book.frame(step_no)
    book.release(row)
    with refused("StaleRow"):
        book.token_ids(row)
    with refused("NotApplied"):
        book.token_ids(book.admit("b", [1]))


# The step: scheduled, and rule 1


def test_default_takes_the_whole_prompt_then_one() -> None:
    book = make()
    row = book.admit("a", [1, 2, 3])
    batch = book.batch([row])
    book.submit(batch, np.array([10], dtype=np.int32))
    assert have(book, 0, num_computed_tokens=3, num_tokens=4, last_token_id=10)
    book.submit(batch, np.array([[11]], dtype=np.int64))
    assert have(book, 0, num_computed_tokens=4, num_tokens=5, num_output_tokens=2, last_token_id=11)
    assert columns(book, 0)["num_computed_tokens"] == book.frame(2)["num_computed_tokens"][0]
    assert book.frame(1)["num_computed_tokens"][0] == 3


def test_stale_free_and_finished_rows_drop() -> None:
    book = make(num_spec_tokens=2)
    row = book.admit("a", [1, 2, 3], ReferenceParams(eos_token_id=2))
    batch = book.batch([row])
    book.submit(batch, [[2]])
    book.submit(batch, [[44, 45]])
    assert drops(book) == {"finished": 2}
    assert tokens(book, 0, 4) == [1, 2, 3, 2]
    book.release(row)
    book.submit(batch, [[50, 51, -1]])
    assert drops(book) == {"finished": 2, "stale": 2}
    new = book.admit("b", [5])
    book.submit(batch, [[52]], draft_token_ids=[[53]])
    assert drops(book) == {"finished": 2, "stale": 3}
    assert new.index == row.index
    assert have(book, 0, num_tokens=1, num_output_tokens=0, num_computed_tokens=0, generation=2)
    assert (book.num_submitted_tokens, book.num_committed_tokens) == (6, 1)


# Rule 2


def test_partial_prefill() -> None:
    book = make()
    row = book.admit("a", range(1, 11))
    step(book, row, [99], scheduled=4)
    step(book, row, [98], scheduled=4)
    assert have(book, 0, num_computed_tokens=8, num_tokens=10, num_output_tokens=0)
    assert book.poll_outputs() == []
    step(book, row, [5], scheduled=2)
    assert have(book, 0, num_computed_tokens=10, num_tokens=11, num_output_tokens=1)
    assert drops(book) == {"partial_prefill": 2}
    assert book.poll_outputs() == [ReferenceOutputs(3, ["a"], [[5]], [0], [-1])]


def test_partial_prefill_zeroes_accepted_and_drops_its_drafts() -> None:
    book = make(num_spec_tokens=2)
    row = book.admit("a", [1])
    step(book, row, [5], [6, 7])
    step(book, row, [6, 7, 8], d=2)
    assert have(book, 0, num_accepted_tokens=2)
    row = book.rewind(row, 0)
    step(book, row, [99], [9, 9], scheduled=2)
    assert have(book, 0, num_accepted_tokens=0, num_computed_tokens=2, num_tokens=5, num_tokens_no_spec=5)
    assert tokens(book, 0, 5) == [1, 5, 6, 7, 8]


def test_overscheduled() -> None:
    book = make()
    row = book.admit("a", [1, 2, 3])
    step(book, row, [5], scheduled=4)
    assert have(book, 0, finish_reason=Finish.ERROR, stop_reason=-1, num_computed_tokens=0, num_tokens=3)
    assert drops(book) == {"overscheduled": 1}
    assert book.poll_outputs() == [ReferenceOutputs(1, ["a"], [[]], [4], [-1])]
    assert book.finished[Finish.ERROR] == 1


def test_overscheduled_zeroes_accepted() -> None:
    book = make(num_spec_tokens=2)
    row = book.admit("a", [1])
    step(book, row, [5])
    step(book, row, [6, 7, 8], d=2)
    assert have(book, 0, num_accepted_tokens=2)
    step(book, row, [9], scheduled=2)
    assert have(book, 0, num_accepted_tokens=0, finish_reason=Finish.ERROR)


# Rule 3


def test_stop_before_length_in_one_step() -> None:
    for ids, kept, reason, stop in (
        ([10, 11, 50, 20, 21, 22], [10, 11, 50], Finish.STOP, 50),
        ([10, 11, 12, 13, 14, 50], [10, 11, 12, 13, 14], Finish.LENGTH, -1),
        ([10, 11, 12, 13, 50, 20], [10, 11, 12, 13, 50], Finish.STOP, 50),
    ):
        book = make(num_spec_tokens=5)
        row = book.admit("a", [1], ReferenceParams(max_tokens=5, stop_token_ids=[50]))
        step(book, row, ids)
        m = len(kept)
        assert have(book, 0, num_output_tokens=m, num_tokens=1 + m, num_tokens_no_spec=1 + m, last_token_id=kept[-1])
        assert have(book, 0, finish_reason=reason, stop_reason=stop, num_computed_tokens=m)
        assert drops(book) == {"after_finish": 6 - m}
        assert book.poll_outputs() == [ReferenceOutputs(1, ["a"], [kept], [reason], [stop])]


def test_ignore_eos_and_min_tokens() -> None:
    ids = [7, 2, 5, 9]
    for params, kept in (
        (ReferenceParams(eos_token_id=[2, 7], stop_token_ids=[9], ignore_eos=True), 4),
        (ReferenceParams(eos_token_id=[2, 7], stop_token_ids=[9]), 1),
        (ReferenceParams(eos_token_id=2, min_tokens=1), 2),
        (ReferenceParams(eos_token_id=2, stop_token_ids=[9], min_tokens=2), 4),
        (ReferenceParams(eos_token_id=2, stop_token_ids=[2], ignore_eos=True), 2),
    ):
        book = make(num_spec_tokens=3)
        step(book, book.admit("a", [1], params), ids)
        assert have(book, 0, num_output_tokens=kept, finish_reason=Finish.STOP, stop_reason=ids[kept - 1])


def test_bad_ids_end_only_their_row() -> None:
    for bad, reason in ((-5, -5), (100, 100), (2**31, LEAST_INT32), (2**31 - 1, 2**31 - 1), (-(2**70), LEAST_INT32)):
        book = make(num_spec_tokens=2)
        rows = [book.admit("a", [1]), book.admit("b", [1])]
        book.submit(book.batch(rows), [[8, bad, 9], [5, -1, 9]], draft_token_ids=[[3], [4]])
        assert have(book, 0, finish_reason=Finish.ERROR, stop_reason=reason, num_output_tokens=1, last_token_id=8)
        assert have(book, 1, finish_reason=Finish.NONE, stop_reason=-1, num_output_tokens=1, num_tokens=3)
        assert drops(book) == {"invalid": 1, "after_finish": 1}
        assert tokens(book, 0, 2) == [1, 8]
        assert book.poll_outputs() == [ReferenceOutputs(1, ["a", "b"], [[8], [5]], [4, 0], [reason, -1])]


def test_max_model_len_and_the_full_row() -> None:
    book = make(num_spec_tokens=1)
    rows = [book.admit("a", [1] * 15), book.admit("b", [1] * 16)]
    rows.append(book.admit("c", [1] * 16, ReferenceParams(eos_token_id=7)))
    with refused("PromptTooLong"):
        book.admit("d", [1] * 17)
    book.submit(book.batch(rows), [[7, 8], [7, 8], [7, 8]])
    assert have(book, 0, finish_reason=Finish.LENGTH, num_tokens=16, num_output_tokens=1, num_computed_tokens=15)
    assert tokens(book, 0, 16) == [1] * 15 + [7]
    assert have(book, 1, finish_reason=Finish.LENGTH, num_tokens_no_spec=16, num_tokens=16, num_output_tokens=1)
    assert have(book, 1, last_token_id=7, num_computed_tokens=16)
    assert tokens(book, 1, 16) == [1] * 16
    assert have(book, 2, finish_reason=Finish.STOP, stop_reason=7, num_tokens=16)
    assert drops(book) == {"after_finish": 3}
    assert book.poll_outputs()[0].token_ids == [[7], [7], [7]]


def test_no_ids_and_more_ids_than_drafts() -> None:
    book = make(num_spec_tokens=3)
    row = book.admit("a", [1, 2, 3], num_computed_tokens=3)
    step(book, row, [-1, 9])
    assert have(book, 0, num_computed_tokens=2, num_tokens=3, num_accepted_tokens=0)
    row = book.rewind(row, 0)
    step(book, row, [], scheduled=3, d=3)  # 0 + 3 - (3 + 1): not below 0; covers 3 of 3 tokens, so no partial prefill
    assert have(book, 0, num_computed_tokens=0, finish_reason=Finish.NONE)
    assert book.spec_decode_stats().num_drafts == 0
    step(book, row, [4, 5, 6])  # 3 ids, none declared as drafts: 0 + 3 - (0 + 1 - 3)
    assert have(book, 0, num_computed_tokens=5, num_tokens=6, num_output_tokens=3, num_accepted_tokens=0)
    assert book.spec_decode_stats() == ReferenceSpecStats([0, 0, 0])


# Rules 4 and 5, draft rounds


def test_rounds_and_mean_acceptance_length() -> None:
    book = make(num_spec_tokens=3, max_model_len=32)
    row = book.admit("a", [1])
    step(book, row, [2])
    for ids in ([3, 3, 3, 3], [4, -1, 9, 9], [5, 5, 5, -1], [6, 6]):
        step(book, row, ids, d=3)
        v = len([token_id for token_id in ids if token_id not in (-1, 9)])
        assert have(book, 0, num_accepted_tokens=v - 1)
    assert have(book, 0, num_tokens=12, num_computed_tokens=11)
    stats = book.spec_decode_stats()
    assert stats == ReferenceSpecStats([3, 2, 1], 4, 12, 6, 10)
    assert stats.mean_acceptance_length == 2.5
    assert book.spec_decode_stats(row) == stats
    step(book, row, [7])
    assert have(book, 0, num_accepted_tokens=0)
    assert book.spec_decode_stats() == stats
    assert ReferenceSpecStats([]).mean_acceptance_length == 1.0


def test_statistics_count_verification_not_what_was_kept() -> None:
    book = make(num_spec_tokens=3)
    row = book.admit("a", [1], ReferenceParams(eos_token_id=9), num_computed_tokens=0)
    step(book, row, [2])
    step(book, row, [3, 9, 4, 5], d=3)
    assert book.spec_decode_stats() == ReferenceSpecStats([1, 1, 1], 1, 3, 3, 2)
    assert have(book, 0, num_accepted_tokens=3, num_output_tokens=3, num_computed_tokens=1 + 4 - (4 - 2))


def test_padded_drafts_lower_the_count() -> None:
    book = make(num_spec_tokens=3, max_model_len=64)
    row = book.admit("a", [1])
    for given, n in (([5, -1, 6], 1), ([5, 100, 6], 1), ([5, 6, 7], 3), (None, 3)):
        step(book, row, [2], given)
        before = book.spec_decode_stats().num_draft_tokens
        step(book, row, [2, 3], d=3)
        assert book.spec_decode_stats().num_draft_tokens - before == n
    rounds = book.spec_decode_stats().num_drafts
    step(book, row, [2], [-1, -1, -1])
    step(book, row, [2], d=3)
    assert book.spec_decode_stats().num_drafts == rounds == 4
    assert book.num_invalid_draft_tokens == 1


def test_given_count_ignores_room_and_other_tenants() -> None:
    book = make(num_spec_tokens=3, max_model_len=6)
    row = book.admit("a", [1, 2, 3, 4])
    step(book, row, [2], [5, 6, 7])
    assert have(book, 0, num_tokens=6, num_tokens_no_spec=5)
    step(book, row, [3], d=3)
    assert book.spec_decode_stats().num_draft_tokens == 3
    book.release(row)
    row = book.admit("b", [1])
    step(book, row, [2], [-1])
    book.release(row)
    step(book, book.admit("c", [1]), [2, 3], d=2)
    assert book.spec_decode_stats() == ReferenceSpecStats([1, 0, 0], 2, 5, 1, 3)


def test_given_count_is_of_the_previous_step_and_a_live_handle() -> None:
    book = make(num_spec_tokens=3)
    row = book.admit("a", [1])
    batch = book.batch([row])
    step(book, row, [2], [-1])
    book.submit(book.batch([]), [])
    step(book, row, [3, 4], d=2)  # what was given two steps ago does not count
    assert book.spec_decode_stats() == ReferenceSpecStats([1, 0, 0], 1, 2, 1, 2)
    book.release(row)
    row = book.admit("b", [1])
    book.submit(batch, [[2]], draft_token_ids=[[-1]])  # given under a stale handle
    step(book, row, [3, 4], d=2)
    assert book.spec_decode_stats() == ReferenceSpecStats([2, 0, 0], 2, 4, 2, 4)
    assert book.spec_decode_stats(row) == ReferenceSpecStats([1, 0, 0], 1, 2, 1, 2)


def test_given_count_is_of_drafts_that_the_book_took() -> None:
    book = make(num_spec_tokens=3)
    row = book.admit("a", [1, 2, 3])
    step(book, row, [9], [5], scheduled=1)  # a partial prefill: its drafts are dropped with its ids
    step(book, row, [4, 5], scheduled=4, d=2)
    assert book.spec_decode_stats().num_draft_tokens == 2
    batch = book.batch([row], num_draft_tokens=[2])
    book.preempt(row)
    book.submit(batch, [[6]], draft_token_ids=[[5]])  # preempted: not taken
    book.submit(batch, [[6]])
    assert book.spec_decode_stats().num_draft_tokens == 6
    row = book.resume(row)
    step(book, row, [6], [5])
    step(book, book.rewind(row, 7), [6], d=2)  # a new handle of the same row
    assert book.spec_decode_stats().num_draft_tokens == 7


def test_drafts_are_written_as_many_as_fit_and_go_at_the_next_step() -> None:
    book = make(num_spec_tokens=5, max_model_len=10)
    rows = [book.admit("a", [1] * 7), book.admit("b", [1] * 9), book.admit("c", [1])]
    book.submit(book.batch(rows), [[2], [2], [2]], draft_token_ids=[[3, 4, 5, 6, 7], [3, 4, 5, 6, 7], [3, -7, 5]])
    assert have(book, 0, num_tokens=10, num_tokens_no_spec=8)
    assert tokens(book, 0, 10) == [1] * 7 + [2, 3, 4]
    assert have(book, 1, num_tokens=10, num_tokens_no_spec=10, finish_reason=Finish.LENGTH)
    assert tokens(book, 2, 3) == [1, 2, 3]
    assert book.num_invalid_draft_tokens == 1
    step(book, rows[2], [4])
    assert have(book, 0, num_tokens=8)
    assert tokens(book, 0, 8) == [1] * 7 + [2]
    assert tokens(book, 2, 3) == [1, 2, 4]


def test_drafts_go_with_a_finish() -> None:
    book = make(num_spec_tokens=2)
    row = book.admit("a", [1], ReferenceParams(max_tokens=1))
    step(book, row, [2], [3, 4])
    assert have(book, 0, num_tokens=2, finish_reason=Finish.LENGTH)
    assert tokens(book, 0, 2) == [1, 2]


# The life of a row


def test_life_table_is_the_page() -> None:
    assert len(LIFE) == 27
    assert (State.FREE, Event.ABORT) not in LIFE
    assert (State.RUNNING, Event.RESUME) not in LIFE
    assert (State.PREEMPTED, Event.REWIND) not in LIFE
    assert all((State.FINISHED, event) in LIFE for event in Event if event is not Event.ADMIT)
    assert {state for state, event in LIFE if event is Event.STEP} == set(State)


def test_preempt_delivers_what_is_in_flight() -> None:
    book = make(num_spec_tokens=2)
    row = book.admit("a", range(1, 13), num_computed_tokens=11)
    batch = book.batch([row])
    step(book, row, [5, 6], [3, 4], d=1)
    book.preempt(row)
    assert tokens(book, 0, 14) == [*range(1, 13), 5, 6]
    book.submit(batch, [[7]])
    assert have(book, 0, num_computed_tokens=0, num_output_tokens=3, num_accepted_tokens=0, num_tokens=15)
    book.submit(batch, [[8]], draft_token_ids=[[9]])
    assert have(book, 0, num_computed_tokens=0, num_output_tokens=4, num_tokens=16, finish_reason=Finish.LENGTH)
    assert [delivery.token_ids for delivery in book.poll_outputs()] == [[[5, 6]], [[7]], [[8]]]


def test_preempt_keeps_accepted_and_writes_no_drafts() -> None:
    book = make(num_spec_tokens=2)
    row = book.admit("a", [1])
    step(book, row, [2])
    step(book, row, [3, 4], d=2)
    book.preempt(row)
    book.submit(book.batch([]), [])
    assert have(book, 0, num_accepted_tokens=1, num_computed_tokens=0)
    step(book, row, [5, 6], [7, 8], d=2)  # launched before, delivered after: a round like any other
    assert have(book, 0, num_accepted_tokens=1, num_tokens=6, num_tokens_no_spec=6, num_computed_tokens=0)
    assert book.spec_decode_stats() == ReferenceSpecStats([2, 0], 2, 4, 2, 4)


def test_preempt_drops_what_is_in_flight() -> None:
    book = make()
    row = book.admit("a", [1, 2, 3])
    batch = book.batch([row])
    book.preempt(row)
    book.preempt(row, drop_in_flight=True)
    book.submit(batch, [[7]])
    assert have(book, 0, num_output_tokens=0, num_computed_tokens=0)
    assert drops(book) == {"preempted": 1}
    book.preempt(row)  # as asked: delivers again
    book.submit(batch, [[8]])
    assert have(book, 0, num_output_tokens=1, last_token_id=8)


def test_partial_prefill_in_flight_over_a_preemption() -> None:
    book = make()
    row = book.admit("a", range(1, 11))
    step(book, row, [99], scheduled=3)
    parts = [book.batch([row], num_scheduled_tokens=[count]) for count in (3, 4, 1, 9)]
    book.preempt(row)
    book.submit(parts[0], [98])  # 3 + 3 < 10
    assert have(book, 0, num_output_tokens=0, num_computed_tokens=0)
    assert drops(book) == {"partial_prefill": 2}
    book.submit(parts[1], [5])  # 6 + 4 = 10: a token; remembered 10
    assert have(book, 0, num_output_tokens=1, num_computed_tokens=0, num_tokens=11)
    book.submit(parts[2], [6])  # 10 + 1 = 11: a token
    book.submit(parts[3], [7])  # never overscheduled
    assert have(book, 0, num_output_tokens=3, finish_reason=Finish.NONE)
    assert drops(book) == {"partial_prefill": 2}


def test_resume_and_the_prefill_boundary() -> None:
    book = make()
    row = book.admit("a", [1, 2, 3], output_token_ids=[10, 11])
    old = book.batch([row])
    book.preempt(row, drop_in_flight=True)
    row = book.resume(row)
    assert row == (0, 2)
    book.submit(old, [[55]])
    assert drops(book) == {"stale": 1}
    step(book, row, [99], scheduled=4)
    assert have(book, 0, num_computed_tokens=4, num_output_tokens=2, generation=2)
    step(book, row, [12], scheduled=1)
    assert have(book, 0, num_computed_tokens=5, num_output_tokens=3)
    assert tokens(book, 0, 6) == [1, 2, 3, 10, 11, 12]
    assert book.poll_outputs() == [ReferenceOutputs(3, ["a"], [[12]], [0], [-1])]
    book.preempt(row)
    step(book, book.resume(row, num_computed_tokens=6), [13])
    assert have(book, 0, num_computed_tokens=6, num_output_tokens=4)


def test_rewind_sets_and_keeps_drafts_until_the_next_step() -> None:
    book = make(num_spec_tokens=2)
    row = book.admit("a", [1, 2, 3])
    step(book, row, [4], [5, 6])
    new = book.rewind(row, 1)
    assert new == (0, 2)
    assert tokens(book, 0, 6) == [1, 2, 3, 4, 5, 6]
    with refused("StaleRow"):
        book.rewind(row, 1)
    book.submit(book.batch([]), [])
    assert have(book, 0, num_computed_tokens=1, num_tokens=4)
    step(book, book.rewind(new, 3), [7])
    assert have(book, 0, num_computed_tokens=4, num_tokens=5)


def test_rewind_beyond_what_is_committed_ends_with_error() -> None:
    for scheduled in (None, 1):
        book = make()
        row = book.rewind(book.admit("a", [1, 2, 3]), 16)
        step(book, row, [7], scheduled=scheduled)
        assert have(book, 0, finish_reason=Finish.ERROR, num_computed_tokens=16, num_output_tokens=0)
        assert drops(book) == {"overscheduled": 1}


def test_abort_wins_over_the_step_and_frees_the_id() -> None:
    book = make(num_spec_tokens=1)
    row = book.admit("x", [1], ReferenceParams(eos_token_id=2))
    batch = book.batch([row])
    step(book, row, [5], [6])
    book.poll_outputs()
    book.abort(row)
    assert tokens(book, 0, 2) == [1, 5]
    assert book.poll_outputs() == [ReferenceOutputs(1, ["x"], [[]], [Finish.ABORT], [-1])]
    new = book.admit("x", [3])
    assert new == (1, 1)
    assert (book.num_rows_free, book.num_rows_held) == (2, 2)
    book.submit(batch, [[2]])
    assert have(book, 0, finish_reason=Finish.ABORT, stop_reason=-1, num_output_tokens=1)
    assert drops(book) == {"finished": 1}
    book.abort(row)
    book.release(row)
    assert book.poll_outputs() == []
    with refused("DuplicateRequest"):
        book.admit("x", [3])
    step(book, new, [4])
    assert book.poll_outputs()[0].request_ids == ["x"]


def test_release_aborts_first_and_a_step_frees_no_id() -> None:
    book = make()
    row = book.admit("a", [1], ReferenceParams(max_tokens=1))
    other = book.admit("b", [1])
    step(book, row, [5])
    book.poll_outputs()
    with refused("DuplicateRequest"):
        book.admit("a", [1])
    book.abort(row)  # changes nothing in the book
    book.release(row)
    book.release(other)
    assert book.poll_outputs() == [ReferenceOutputs(1, ["b"], [[]], [Finish.ABORT], [-1])]
    assert book.num_rows_free == 4
    assert book.admit("a", [1]) == (0, 2)


def test_finished_rows_take_every_event() -> None:
    book = make()
    row = book.admit("a", [1], ReferenceParams(max_tokens=1))
    step(book, row, [5])
    before = columns(book, 0)
    book.preempt(row)
    row = book.resume(row, num_computed_tokens=0)
    row = book.rewind(row, 0)
    assert row == (0, 3)
    book.submit(book.batch([]), [])
    assert columns(book, 0) == before | {"generation": 3}
    book.abort(row)
    assert book.resume(row) == (0, 4)


# Outputs


def test_outputs_are_in_batch_order_without_the_silent() -> None:
    book = make()
    a, b, c = (book.admit(name, [1, 2]) for name in "abc")
    book.submit(book.batch([c, b, a], num_scheduled_tokens=[2, 1, 2]), [[7], [8], [9]])
    assert book.poll_outputs() == [ReferenceOutputs(1, ["c", "a"], [[7], [9]], [0, 0], [-1, -1])]
    assert book.poll_outputs() == []


# Admission


def test_earlier_outputs_that_end_the_request() -> None:
    book = make(max_num_reqs=8)
    book.admit("a", [1], ReferenceParams(eos_token_id=9), output_token_ids=[9, 9])
    book.admit("b", [1] * 14, output_token_ids=[2, 3])
    book.admit("c", [1], ReferenceParams(eos_token_id=9, min_tokens=2), output_token_ids=[3, 9])
    book.admit("d", [1], ReferenceParams(eos_token_id=9), output_token_ids=[9, 3])
    book.admit("e", [9], ReferenceParams(eos_token_id=9))
    assert book.poll_outputs() == [
        ReferenceOutputs(0, ["a"], [[]], [Finish.STOP], [9]),
        ReferenceOutputs(0, ["b"], [[]], [Finish.LENGTH], [-1]),
    ]
    book.submit(book.batch([]), [])
    assert book.frame()["finish_reason"].tolist() == [1, 2, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("InvalidRequest", {"prompt_token_ids": []}),
        ("InvalidRequest", {"params": ReferenceParams(max_tokens=0)}),
        ("InvalidRequest", {"params": ReferenceParams(min_tokens=-1)}),
        ("InvalidRequest", {"params": ReferenceParams(max_tokens=2), "output_token_ids": [1, 2]}),
        ("InvalidRequest", {"num_computed_tokens": -1}),
        ("InvalidRequest", {"num_computed_tokens": 4, "output_token_ids": [1]}),
        ("InvalidRequest", {"prompt_is_token_ids": [True]}),
        ("InvalidToken", {"prompt_token_ids": [1, 100]}),
        ("InvalidToken", {"output_token_ids": [-1]}),
        ("PromptTooLong", {"output_token_ids": [1] * 15}),
        ("DuplicateRequest", {"request_id": "live"}),
        ("BookFull", {}),
    ],
)
def test_admission_is_refused(name: str, options: dict[str, Any]) -> None:
    book = make(max_num_reqs=1)
    book.admit("live", [1])
    with refused(name) as caught:
        book.admit(**({"request_id": "new", "prompt_token_ids": [1, 2]} | options))
    assert caught.value.name == name
    assert (book.num_rows_free, book.poll_outputs()) == (0, [])
    assert tokens(book, 0, 1) == [1]


def test_calls_on_rows_are_refused() -> None:
    book = make(num_spec_tokens=2)
    row = book.admit("a", [1, 2])
    with refused("InvalidBatch"):
        book.batch([row, row])
    for scheduled, drafts in (([0], None), ([1], [2]), (None, [3]), (None, [-1]), ([1, 1], None), (None, [])):
        with refused("InvalidBatch"):
            book.batch([row], num_scheduled_tokens=scheduled, num_draft_tokens=drafts)
    batch = book.batch([row])
    for sampled, new_drafts in (([[1], [2]], None), ([[1, 2, 3, 4]], None), ([[1]], [[1, 2, 3]]), ([[1]], [])):
        with refused("InvalidBatch"):
            book.submit(batch, sampled, draft_token_ids=new_drafts)
    for count in (-1, 17):
        with refused("InvalidRequest"):
            book.rewind(row, count)
    with refused("InvalidRequest"):
        book.resume(row)
    book.preempt(row)
    with refused("InvalidRequest"):
        book.rewind(row, 0)
    with refused("InvalidRequest"):
        book.resume(row, num_computed_tokens=17)
    assert (book.step, book.num_submitted_tokens) == (0, 0)
    assert book.resume(row, num_computed_tokens=16) == (0, 2)
    for call in (book.abort, book.preempt, book.resume, book.release):
        with refused("StaleRow"):
            call(row)
    with refused("StaleRow"):
        book.batch([row])
    book.release(Row(0, 2))
    for stale in (Row(0, 2), Row(9, 1), Row(-1, 1)):
        with refused("StaleRow"):
            book.release(stale)
    with refused("NotApplied"):
        book.frame(1)
