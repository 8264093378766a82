"""Groups E and G of the cases from the field, as far as they need neither text nor a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from asyncbook import Book, InvalidBatch, Logprobs, NotApplied, RequestParams
from tests.conftest import (
    TIMEOUT_S,
    MakeBook,
    columns,
    delivered,
    have,
    ids_of,
    in_flight,
    refused,
    step,
    tokens,
)
from tests.logprobs import delivered_logprobs, logprobs_of

# E1: values that are no numbers. They come out as they went in, and a NaN is told.


INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("values", "has_nan", "cumulative"),
    [
        ([-INFINITY, NAN, -0.5], True, NAN),
        ([NAN, -INFINITY, -0.5], True, NAN),
        ([-0.5, -INFINITY, -1.0], False, -INFINITY),
        ([-0.5, -0.25, -0.0], False, -0.75),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_e1_values_that_are_no_numbers_are_kept_and_told(
    make_book: MakeBook, values: list[float], has_nan: bool, cumulative: float, at_once: bool
) -> None:
    book = make_book(max_logprobs=0)
    before = book.stats().nan_logprobs
    row, other = (book.admit(name, [1], RequestParams(logprobs=0)) for name in ("a", "b"))
    ids = np.array([[5, 6, 7], [8, -1, -1]], np.int32)
    given = logprobs_of(ids, [values, [-1.0, NAN, NAN]])
    if at_once:
        step(book, [row, other], ids, logprobs=given)
    else:
        for j in range(3):
            one = Logprobs(*(array[:1, j].copy() for array in given))
            step(book, [row], ids[:1, j].copy(), logprobs=one)
        step(book, [other], ids[1:, 0].copy(), logprobs=Logprobs(*(array[1:, 0].copy() for array in given)))
    requests = delivered_logprobs(book)
    entries, total, told = requests["a"]
    np.testing.assert_array_equal([one[0][1] for one in entries], np.array(values, np.float32))
    np.testing.assert_array_equal(total, cumulative)
    assert told is has_nan
    assert requests["b"] == ([[(8, -1.0, 1)]], -1.0, False)
    assert book.stats().nan_logprobs - before == sum(np.isnan(values))


def test_e1_a_nan_among_the_top_ids_is_told_too(make_book: MakeBook) -> None:
    book = make_book(max_logprobs=2)
    row = book.admit("a", [1], RequestParams(logprobs=2))
    ids = np.array([5], np.int32)
    step(book, [row], ids, logprobs=logprobs_of(ids, [[-0.5, -INFINITY, NAN]]))
    (outputs,) = book.poll_outputs()
    assert outputs.logprobs is not None
    assert outputs.logprobs.has_nan.tolist() == [True]
    np.testing.assert_array_equal(outputs.logprobs.logprobs, np.array([-0.5, -INFINITY, NAN], np.float32))
    assert outputs.logprobs.cumulative.tolist() == [-0.5]


# E3: the most that anybody in the batch asks for is returned to all; a neighbour's option changes a row.


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]])
def test_e3_each_gets_what_it_asked_for(make_book: MakeBook, order: list[int]) -> None:
    book = make_book(max_logprobs=3)
    asked = [1, 3, None, 0]
    rows = [book.admit(f"r{i}", [1], RequestParams(logprobs=k)) for i, k in enumerate(asked)]
    ids = np.array([10, 20, 30, 40], np.int32)
    given = logprobs_of(ids, -np.arange(16.0).reshape(4, 4), ranks=[1, 2, 3, 4])
    step(book, [rows[i] for i in order], ids[order], logprobs=Logprobs(*(array[order] for array in given)))
    (outputs,) = book.poll_outputs()
    requests = {request.request_id: request for request in outputs}
    assert requests["r0"].logprobs == [[(10, -0.0, 1), (11, -1.0, 1)]]
    assert requests["r1"].logprobs == [[(20, -4.0, 2), (21, -5.0, 1), (22, -6.0, 2), (23, -7.0, 3)]]
    assert requests["r2"].logprobs is requests["r2"].cumulative_logprob is None
    assert requests["r3"].logprobs == [[(40, -12.0, 4)]]
    assert outputs.logprobs is not None
    assert outputs.logprobs.num_logprobs.tolist() == [-1 if asked[i] is None else asked[i] for i in order]


def test_e3_a_neighbour_changes_nothing(make_book: MakeBook) -> None:
    book = make_book(max_logprobs=3)
    ids = np.array([10, 20], np.int32)
    for neighbour in (None, 0, 3):
        rows = [
            book.admit("a", [1], RequestParams(logprobs=1)),
            book.admit("b", [1], RequestParams(logprobs=neighbour)),
        ]
        step(book, rows, ids, logprobs=logprobs_of(ids, given=4))
        assert delivered_logprobs(book)["a"] == ([[(10, -0.5, 1), (11, -1.5, 1)]], -0.5, False)
        for row in rows:
            book.release(row)
        step(book, [], [])
        book.poll_outputs()


# E6: a delivery without tokens counts as the first token.


@pytest.mark.parametrize("chunks", [[4, 2], [5, 1], [1, 1, 4], [6]])
def test_e6_no_delivery_before_the_first_token(book: Book, chunks: list[int]) -> None:
    row = book.admit("a", [1, 2, 3, 4, 5, 6])
    first_token_steps = []
    for chunk in chunks:
        number = step(book, [row], [7], scheduled=[chunk])
        for outputs in book.poll_outputs():
            assert outputs.token_ids.tolist() == [7]
            assert outputs.request_ids == ["a"]
            first_token_steps.append(outputs.step)
    assert first_token_steps == [number]


def test_e6_a_row_without_news_is_in_no_delivery(book: Book) -> None:
    chunked, decoding = book.admit("chunked", [1, 2, 3, 4, 5, 6]), book.admit("decoding", [1])
    step(book, [chunked, decoding], [7, 8], scheduled=[4, 1])
    assert list(delivered(book)) == ["decoding"]
    step(book, [chunked, decoding], [[7], [-1]], scheduled=[2, 1])
    assert list(delivered(book)) == ["chunked"]


# E4, its counts: chunks and a preemption never give a negative or a short count. (Prompt logprobs are not in a book.)


@pytest.mark.parametrize("chunks", [[4, 2], [5, 1]])
@pytest.mark.parametrize("preempts", [False, True])
def test_e4_chunks_and_a_restart_count_the_prompt_once(book: Book, chunks: list[int], preempts: bool) -> None:
    row = book.admit("a", [1, 2, 3, 4, 5, 6])
    if preempts:
        step(book, [row], [99], scheduled=[chunks[0]])
        book.preempt(row)
        row = book.resume(row)
        step(book, [], [])
        assert have(book, row, num_computed_tokens=0, num_tokens=6, num_output_tokens=0)
    for chunk in chunks:
        step(book, [row], [7], scheduled=[chunk])
        assert min(value for name, value in columns(book, row).items() if name != "stop_reason") >= 0
    assert have(book, row, num_computed_tokens=6, num_prompt_tokens=6, num_tokens=7, num_output_tokens=1)
    assert delivered(book)["a"].token_ids == [7]


def test_e4_a_prompt_loaded_from_outside(book: Book) -> None:
    row = book.admit("a", [1, 2, 3, 4, 5, 6], num_computed_tokens=6)
    step(book, [row], [7])
    assert have(book, row, num_computed_tokens=6, num_tokens=7, num_output_tokens=1)
    step(book, [row], [8])
    assert have(book, row, num_computed_tokens=7, num_tokens=8)


# G1: memory is written anew while a copy of it is pending.


def test_g1_what_was_submitted_may_be_written_over(book: Book) -> None:
    row = book.admit("a", [1])
    batch = book.batch([row])
    pinned, drafts = np.array([[1, 2, 3]], np.int32), np.array([[4, 5]], np.int32)
    with in_flight(book):
        book.submit(batch, pinned, draft_token_ids=drafts)
        pinned[:] = 9
        drafts[:] = 9
        number = book.submit(batch, pinned)
        pinned[:] = 8
    book.wait_applied(number, TIMEOUT_S)
    assert tokens(book, row) == [1, 1, 2, 3, 9, 9, 9]


@pytest.mark.parametrize("later", [1, 2, 3])
def test_g1_a_frame_being_copied_is_not_written(book: Book, later: int) -> None:
    row = book.admit("a", [1])
    number = step(book, [row], [[1, 2, 3]])
    frame = book.frame(number)
    for _ in range(later):  # one buffer a step in flight, and one for the reader
        step(book, [row], [9])
    with frame:
        copied = {name: np.array(getattr(frame, name)) for name in columns(book, row)}
    assert copied["last_token_id"][row.index] == 3
    assert copied["num_tokens"][row.index] == 4


# G2: a number is read before it is there.


def test_g2_nothing_is_read_before_it_is_applied(book: Book, kind: str) -> None:
    row = book.admit("a", [1])
    step(book, [row], [5], drafts=[[6, 7, 8]])
    batch = book.batch([row], num_draft_tokens=[3])
    with in_flight(book):
        number = book.submit(batch, ids_of([[6, 7, 8, 9]]))
        if kind != "embedded":
            with pytest.raises(NotApplied, match=f"step {number}"):
                book.frame(number)
            assert book.frame().step == number - 1
            assert have(book, row, num_accepted_tokens=0)  # and says of which step it is
    book.wait_applied(number, TIMEOUT_S)
    assert int(book.frame(number).num_accepted_tokens[row.index]) == 3


# G5: a write through a list of indices is lost; a repeated index counts once.


def test_g5_rows_by_any_index_are_written_and_counted(book: Book) -> None:
    rows = [book.admit(name, [1]) for name in "abcd"]
    step(book, [rows[0], rows[2]], [5, 5])
    assert [columns(book, row)["num_output_tokens"] for row in rows] == [1, 0, 1, 0]
    assert [tokens(book, row) for row in rows] == [[1, 5], [1], [1, 5], [1]]


def test_g5_what_comes_through_a_list_of_indices_arrives(book: Book) -> None:
    rows = [book.admit(name, [1]) for name in "abc"]
    everything = np.array([[11, 12, 13], [21, 22, 23], [31, 32, 33], [41, 42, 43]])
    batch = book.batch(rows, num_scheduled_tokens=np.array([9, 1, 1, 1])[[1, 2, 3]])
    step(book, batch, everything[[2, 0, 3]][:, [2, 0]], drafts=everything[[0, 0, 0]])
    assert [tokens(book, row) for row in rows] == [
        [1, 33, 31, 11, 12, 13], [1, 13, 11, 11, 12, 13], [1, 43, 41, 11, 12, 13]
    ]  # fmt: skip


def test_g5_a_repeated_row_is_refused_and_a_repeated_position_counts_twice(book: Book) -> None:
    rows = [book.admit(name, [1]) for name in "ab"]
    with refused(book, InvalidBatch, "twice"):
        book.batch([rows[1], rows[1]])
    before = book.spec_decode_stats().num_accepted_tokens_per_pos
    step(book, rows, [[5, 6, 7], [5, 6, -1]], d=[2, 2])
    after = book.spec_decode_stats().num_accepted_tokens_per_pos
    assert [new - old for new, old in zip(after, before, strict=True)] == [2, 1, 0, 0, 0]
