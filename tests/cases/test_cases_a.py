"""Group A of the cases from the field: batch rows. What `tests/README.md` lists as left out is left out here."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from asyncbook import (
    Book,
    DuplicateRequest,
    FinishReason,
    NotApplied,
    PromptTooLong,
    RequestParams,
    Row,
    StaleRow,
)
from tests.conftest import (
    Delivered,
    MakeBook,
    columns,
    delivered,
    grown,
    have,
    in_flight,
    refused,
    step,
    tables,
    tokens,
    wait_until,
)

# A1: a tuple swap of two row views leaves both rows equal. Rows of a book never move.

MASKS = ([1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0, 1, 0])


def test_a1_rows_do_not_alias_in_any_order(book: Book) -> None:
    rows = [
        book.admit(name, [index + 1] * 8, prompt_is_token_ids=np.array(mask, bool))
        for index, (name, mask) in enumerate(zip("abc", MASKS, strict=True))
    ]
    orders = [*itertools.permutations(range(3), 2), (1, 2, 0), (2, 0, 1)]
    ids: list[list[int]] = [[], [], []]
    for number, order in enumerate(orders):  # swaps of two, then a cycle of three
        step(book, [rows[index] for index in order], [10 * number + index for index in order])
        for index in order:
            ids[index].append(10 * number + index)
    for index, mask in enumerate(MASKS):
        assert tokens(book, rows[index]) == [index + 1] * 8 + ids[index]
        is_token_ids = tables(book)[1][rows[index].index]
        assert is_token_ids[:8].tolist() == [bool(flag) for flag in mask]
        assert is_token_ids.sum() == sum(mask) + len(ids[index])
        assert have(book, rows[index], num_output_tokens=len(ids[index]), last_token_id=ids[index][-1])


def test_a1_rows_share_no_memory(book: Book) -> None:
    for table in tables(book):
        for one, other in itertools.combinations(table, 2):
            assert not np.shares_memory(one, other)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a1_batch_order_changes_no_row(book: Book, order: tuple[int, ...]) -> None:
    rows = [book.admit(name, [index + 1]) for index, name in enumerate("abc")]
    sampled = [[11, 12, -1], [21, 22, 23], [31, -1, -1]]
    drafts = [[1, -1], [2, 3], [-1, -1]]
    step(book, [rows[index] for index in order], [sampled[index] for index in order],
         drafts=[drafts[index] for index in order])  # fmt: skip
    assert [tokens(book, row) for row in rows] == [[1, 11, 12, 1], [2, 21, 22, 23, 2, 3], [3, 31]]


# A2: the last tenant's restriction meets the new request. (Sampling masks themselves are not in a book.)


@pytest.mark.parametrize(
    "params",
    [
        RequestParams(max_tokens=1),
        RequestParams(stop_token_ids=[13], eos_token_id=[5, 6, 7, 8, 9]),
        RequestParams(min_tokens=9, eos_token_id=13),
        RequestParams(ignore_eos=True, eos_token_id=13),
    ],
)
def test_a2_a_reused_row_has_none_of_the_options_before(book: Book, params: RequestParams) -> None:
    before = [book.admit(name, [1], params) for name in "abcd"]
    for index in (1, 3, 0):
        book.release(before[index])
    plain = [book.admit(name, [1]) for name in "ef"]
    picky = book.admit("g", [1], RequestParams(eos_token_id=13))
    assert [row.index for row in (*plain, picky)] == [0, 1, 3]
    step(book, [*plain, before[2], picky], [[4, 13, 2], [5, 13, 2], [-1, -1, -1], [2, 13, 2]])
    for row, ids in zip(plain, ([4, 13, 2], [5, 13, 2]), strict=True):
        assert have(book, row, finish_reason=FinishReason.NONE)
        assert tokens(book, row) == [1, *ids]
    assert have(book, picky, finish_reason=FinishReason.STOP, stop_reason=13, num_output_tokens=2)


# A4: only the first n entries are copied, so that the tail still names another request's.


def test_a4_a_reused_row_is_clean_behind_its_tokens(book: Book) -> None:
    first = book.admit("first", [1, 2, 3, 4, 5], prompt_is_token_ids=[True] * 5)
    second = book.admit("second", [6, 7, 8])
    step(book, [first, second], [[9, 9], [9, -1]], drafts=[[9, 9, 9, 9, 9], [-1] * 5])
    book.release(first)
    third = book.admit("third", [6, 7, 8], prompt_is_token_ids=[True, False, True])
    assert third.index == first.index
    step(book, [], [])
    token_ids, is_token_ids = (table[third.index] for table in tables(book))
    assert token_ids.tolist() == [6, 7, 8, *[0] * 13]
    assert is_token_ids.tolist() == [True, False, True, *[False] * 13]
    assert have(book, third, num_tokens=3, num_prompt_tokens=3, num_output_tokens=0)
    assert tokens(book, second) == [6, 7, 8, 9]


def test_a4_readmission_is_clean_too(book: Book) -> None:
    row = book.admit("a", list(range(1, 15)))
    step(book, [row], [99])
    book.release(row)
    again = book.admit("a", [1, 2], output_token_ids=[5])
    step(book, [again], [6])
    assert tables(book)[0][again.index].tolist() == [1, 2, 5, 6, *[0] * 12]
    assert tables(book)[1][again.index].tolist() == [True] * 4 + [False] * 12


@pytest.mark.parametrize("how", ["release", "abort and release", "stop and release"])
def test_a4_a_freed_row_is_zero_however_it_ended(book: Book, how: str) -> None:
    row = book.admit("a", [1, 2, 3], RequestParams(stop_token_ids=[42]))
    step(book, [row], [[42 if how.startswith("stop") else 9]], drafts=[[7, 7]])
    if how.startswith("abort"):
        book.abort(row)
    book.release(row)
    step(book, [], [])
    assert not any(table[row.index].any() for table in tables(book))
    assert {name for name, value in columns(book, row).items() if value} == {"generation"}


# A6: "finished" rides on the next non-empty step and is lost or late.


def test_a6_a_row_is_freed_in_a_step_with_nobody_in_it(book: Book) -> None:
    row = book.admit("a", [1, 2, 3])
    step(book, [row], [5])
    book.release(row)
    step(book, [], [])
    assert columns(book, row) == dict.fromkeys(columns(book, row), 0) | {"generation": row.generation}
    assert book.stats().num_rows_held == 0
    assert delivered(book)["a"] == Delivered([5], FinishReason.ABORT, None, 2)
    new = book.admit("b", [7])
    assert new == (0, row.generation + 1)
    step(book, [new], [8])
    assert tokens(book, new) == [7, 8]


def test_a6_aborting_all_frees_all_without_a_step(book: Book) -> None:
    rows = [book.admit(name, [1]) for name in "abc"]
    number = step(book, rows, [5, 6, 7])
    book.poll_outputs()
    for row in rows:
        book.abort(row)
    for row in rows:
        book.release(row)
    came: dict[str, Delivered] = {}
    wait_until(lambda: came.update(delivered(book)) or len(came) == 3, "all three ends are delivered")
    assert came == {name: Delivered([], FinishReason.ABORT, None, 1) for name in "abc"}
    assert book.applied_step == number
    assert book.stats().num_rows_free == 4
    assert [book.admit(name, [1]).index for name in "wxyz"] == [0, 1, 2, 3]


# A7: two live requests under one id.


def test_a7_a_duplicate_is_refused_and_the_first_finishes(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    first = book.admit("x", [1], RequestParams(max_tokens=2))
    for _ in range(3):
        with refused(book, DuplicateRequest, "'x'", f"row {first.index}"):
            book.admit("x", [2, 3])
    step(book, [first], [5])
    step(book, [first], [6])
    assert delivered(book) == {"x": Delivered([5, 6], FinishReason.LENGTH, None, 2)}
    counts = book.stats()
    assert min(counts.dropped_tokens.values()) >= 0
    assert counts.num_rows_held == 1
    book.close()


# A8: an abort meant for the old request ends the new one of the same id.


def test_a8_an_abort_names_a_generation(book: Book) -> None:
    old = book.admit("x", [1])
    book.abort(old)
    new = book.admit("x", [2])
    book.abort(old)  # once more, late: its row still stands for the old request
    step(book, [new], [5])
    assert have(book, new, finish_reason=FinishReason.NONE)
    book.release(old)
    with refused(book, StaleRow, f"row {old.index}"):
        book.abort(old)
    step(book, [new], [6])
    assert tokens(book, new) == [2, 5, 6]


def test_a8_an_abort_of_the_row_s_last_tenant_is_no_abort_of_the_new_one(book: Book) -> None:
    old = book.admit("x", [1])
    book.release(old)
    new = book.admit("x", [2])
    assert new.index == old.index
    with refused(book, StaleRow, f"generation {new.generation}"):
        book.abort(old)
    with refused(book, StaleRow):
        book.abort(Row(new.index, new.generation + 1))
    step(book, [new], [5])
    book.poll_outputs()
    assert have(book, new, finish_reason=FinishReason.NONE, num_output_tokens=1)


# A9: after a resume the row holds wrong ids, outputs twice, or takes the prompt's end for the prefill's.


def test_a9_preempted_and_resumed_in_its_row(book: Book) -> None:
    row = book.admit("a", [1, 2, 3])
    step(book, [row], [10])
    step(book, [row], [11])
    assert delivered(book)["a"].token_ids == [10, 11]
    book.preempt(row)
    row = book.resume(row, num_computed_tokens=0)
    step(book, [row], [99], scheduled=[4])
    assert have(book, row, num_computed_tokens=4, num_tokens=5, num_output_tokens=2, num_prompt_tokens=3)
    assert tokens(book, row) == [1, 2, 3, 10, 11]
    assert delivered(book) == {}
    step(book, [row], [12])
    assert book.output_token_ids(row).tolist() == [10, 11, 12]
    assert delivered(book)["a"].token_ids == [12]


def test_a9_readmitted_after_another_request_had_the_row(book: Book) -> None:
    row = book.admit("a", [1, 2, 3])
    step(book, [row], [10])
    step(book, [row], [11])
    book.release(row)
    other = book.admit("other", [7] * 9)
    step(book, [other], [8])
    book.release(other)
    book.poll_outputs()
    again = book.admit("a", [1, 2, 3], output_token_ids=[10, 11])
    assert again.index == row.index
    before = book.stats()
    step(book, [again], [99], scheduled=[4])
    assert tokens(book, again) == [1, 2, 3, 10, 11]
    assert have(book, again, num_tokens=5, num_output_tokens=2, num_prompt_tokens=3, num_computed_tokens=4)
    assert grown(book, before)["dropped_partial_prefill"] == 1
    step(book, [again], [12])
    assert book.output_token_ids(again).tolist() == [10, 11, 12]
    assert delivered(book)["a"].token_ids == [12]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5])
def test_a9_the_boundary_is_num_tokens_for_every_chunk(book: Book, chunk: int) -> None:
    row = book.admit("a", [1, 2, 3], output_token_ids=[10, 11])
    computed = 0
    while computed + chunk < 5:
        computed += chunk
        step(book, [row], [99], scheduled=[chunk])
        assert have(book, row, num_computed_tokens=computed, num_tokens=5)
    step(book, [row], [12], scheduled=[5 - computed])
    assert have(book, row, num_computed_tokens=5, num_tokens=6, last_token_id=12)


# A11: one token more than max_model_len kills the engine.


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a11_prompts_that_nearly_fill_the_row(book: Book, dtype: type) -> None:
    params = RequestParams(max_tokens=10)
    almost = book.admit("15", [1] * 15, params)
    full = book.admit("16", [1] * 16, params)
    neighbour = book.admit("neighbour", [1])
    with refused(book, PromptTooLong, "17", "16"):
        book.admit("17", [1] * 17, params)
    step(book, [almost, full, neighbour], np.array([7, 7, 7], dtype))
    for row, num_tokens in ((almost, 16), (full, 16)):
        assert have(
            book, row, num_tokens=num_tokens, num_tokens_no_spec=num_tokens, num_output_tokens=1, last_token_id=7,
            finish_reason=FinishReason.LENGTH, stop_reason=-1,
        )  # fmt: skip
    assert tokens(book, almost) == [1] * 15 + [7]
    assert tokens(book, full) == [1] * 16
    assert tokens(book, neighbour) == [1, 7]
    ends = delivered(book)
    assert ends["15"] == ends["16"] == Delivered([7], FinishReason.LENGTH, None, 1)


def test_a11_a_full_row_stops_by_its_stop_id_and_takes_one_id_only(book: Book) -> None:
    stops = book.admit("stops", [1] * 16, RequestParams(stop_token_ids=[9]))
    takes = book.admit("takes", [1] * 16)
    below = book.admit("below", [2] * 16)
    step(book, [stops, takes], [[9, 8], [7, 8]])
    assert have(book, stops, finish_reason=FinishReason.STOP, stop_reason=9, num_output_tokens=1)
    assert have(book, takes, finish_reason=FinishReason.LENGTH, num_output_tokens=1, last_token_id=7)
    assert tokens(book, below) == [2] * 16
    assert {name: request.token_ids for name, request in delivered(book).items()} == {"stops": [9], "takes": [7]}


def test_a11_several_ids_at_the_end_of_the_row(book: Book) -> None:
    before = book.stats()
    row = book.admit("a", [1] * 14)
    below = book.admit("below", [2])
    step(book, [row], [[5, 6, 7, 8]], drafts=[[3, 3]])
    assert tokens(book, row) == [1] * 14 + [5, 6]
    assert tokens(book, below) == [2]
    assert have(book, row, finish_reason=FinishReason.LENGTH, num_output_tokens=2)
    assert grown(book, before)["dropped_after_finish"] == 2


# A13: a dummy token for each prefill chunk reaches the client.


def test_a13_prefill_chunks_deliver_nothing(book: Book) -> None:
    row = book.admit("a", list(range(1, 11)))
    neighbour = book.admit("neighbour", [1])
    numbers = []
    for chunk, sampled in ((4, 99), (4, 98), (2, 5)):
        numbers.append(step(book, [row, neighbour], [sampled, 7], scheduled=[chunk, 1]))
    assert have(book, row, num_tokens=11, num_output_tokens=1, num_computed_tokens=10, last_token_id=5)
    mine = [(outputs.step, delta.token_ids.tolist()) for outputs in book.poll_outputs() for delta in outputs
            if delta.request_id == "a"]  # fmt: skip
    assert mine == [(numbers[2], [5])]


@pytest.mark.parametrize("padding", [-1, 99, 100, -7])
def test_a13_whatever_is_sampled_for_a_chunk_is_nobody_s_token(book: Book, padding: int) -> None:
    row = book.admit("a", list(range(1, 11)))
    step(book, [row], [[padding, padding]], scheduled=[9])
    assert have(book, row, finish_reason=FinishReason.NONE, num_output_tokens=0, last_token_id=10, num_tokens=10)
    step(book, [row], [5])
    assert delivered(book)["a"].token_ids == [5]


def test_a13_chunks_in_flight(book: Book) -> None:
    row = book.admit("a", list(range(1, 11)))
    chunks = [book.batch([row], num_scheduled_tokens=[chunk]) for chunk in (8, 2)]
    with in_flight(book):
        for batch, sampled in zip(chunks, (99, 5), strict=True):
            number = book.submit(batch, np.array([sampled], np.int32))
        if book.sidecar_pid is not None:
            with pytest.raises(NotApplied):
                book.frame(number)
    book.wait_applied(number, 60)
    assert tokens(book, row) == [*range(1, 11), 5]
