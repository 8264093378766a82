"""Groups E and G of the cases from the field, as far as they need neither text, nor logprobs, nor a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from asyncbook import Book, InvalidBatch, NotApplied
from tests.conftest import (
    TIMEOUT_S,
    columns,
    delivered,
    have,
    ids_of,
    in_flight,
    refused,
    step,
    tokens,
)

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
