"""The contract of logprobs, but for the cases from the field: what is taken, what is refused, where it goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from asyncbook import Book, BookConfig, InvalidBatch, InvalidRequest, Logprobs, RequestParams
from asyncbook.ipc.layout import MAX_LOGPROBS
from tests.conftest import SMALL, MakeBook, grown, in_flight, refused, step
from tests.logprobs import delivered_logprobs, logprobs_of

TOP_2 = RequestParams(logprobs=2)
IDS = np.array([5, 6], np.int32)
PAIR = logprobs_of(IDS, [[-0.5, -1.5, -2.5], [-1.0, -2.0, -3.0]])
A, B = [[(5, -0.5, 1), (6, -1.5, 1), (7, -2.5, 2)]], [[(6, -1.0, 1), (7, -2.0, 1), (8, -3.0, 2)]]


@pytest.fixture
def book(make_book: MakeBook) -> Book:
    """A small empty book with logprobs."""
    return make_book(max_logprobs=2)


def pair(book: Book) -> list[Any]:
    """Two requests that want all there is."""
    return [book.admit(name, [1], TOP_2) for name in "ab"]


# What is taken


class Lists(NamedTuple):
    """vLLM's LogprobsLists."""

    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: list[int] | None = None


class Tensors(NamedTuple):
    """vLLM's LogprobsTensors."""

    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any
    cu_num_generated_tokens: list[int] | None = None
    cu_num_generated_tokens_tensor: Any = None


TAKEN: dict[str, Any] = {
    "int64": Logprobs(PAIR[0].astype(np.int64), PAIR[1], PAIR[2].astype(np.int64)),
    "int64 ids": Logprobs(PAIR[0].astype(np.int64), PAIR[1], PAIR[2]),
    "one id a row in three dimensions": Logprobs(*(array[:, None] for array in PAIR)),
    "ranks in two dimensions": Logprobs(PAIR[0], PAIR[1], PAIR[2][:, None]),
    "Fortran order": Logprobs(*(np.asfortranarray(array) for array in PAIR)),
    "strided": Logprobs(*(np.repeat(array, 2, axis=0)[::2] for array in PAIR)),
    "any object": SimpleNamespace(**PAIR._asdict()),
    "lists of vLLM": Lists(*PAIR),
    "tensors of vLLM": Tensors(*(torch.from_numpy(array.copy()) for array in PAIR)),
    "torch": Logprobs(*(torch.from_numpy(array.copy()) for array in PAIR)),
    "rows by their starts": Lists(*(np.repeat(array, [2, 1], axis=0) for array in PAIR), [0, 2]),
    "rows by their starts and the end": Lists(*(np.repeat(array, [1, 3], axis=0) for array in PAIR), [0, 1, 4]),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(book: Book, name: str) -> None:
    step(book, pair(book), IDS, logprobs=TAKEN[name])
    assert delivered_logprobs(book) == {"a": (A, -0.5, False), "b": (B, -1.0, False)}


def test_read_only_arrays_are_taken(book: Book) -> None:
    arrays = [array.copy() for array in PAIR]
    for array in arrays:
        array.flags.writeable = False
    step(book, pair(book), IDS, logprobs=Logprobs(*arrays))
    assert delivered_logprobs(book) == {"a": (A, -0.5, False), "b": (B, -1.0, False)}


def test_rows_of_several_ids_by_their_starts(book: Book) -> None:
    ids = np.array([[5, 6, -1], [7, -1, -1]], np.int32)  # vLLM's: three rows of logprobs for r0, one for r1
    flat = logprobs_of(np.array([5, 6, 99, 7], np.int32), [-1.0, -2.0, -9.0, -3.0])
    step(book, pair(book), ids, logprobs=Lists(*flat, [0, 3, 4]))
    came = delivered_logprobs(book)
    assert came["a"] == ([[(5, -1.0, 1)], [(6, -2.0, 1)]], -3.0, False)
    assert came["b"] == ([[(7, -3.0, 1)]], -3.0, False)


def test_what_was_submitted_may_be_written_over(book: Book) -> None:
    rows, mine = pair(book), Logprobs(*(array.copy() for array in PAIR))
    with in_flight(book):
        number = book.submit(book.batch(rows), IDS, logprobs=mine)
        for array in mine:
            array.fill(77)
    book.wait_applied(number)
    assert delivered_logprobs(book) == {"a": (A, -0.5, False), "b": (B, -1.0, False)}


def test_a_sampled_id_among_the_top_ids_comes_once(book: Book) -> None:
    given = Logprobs(np.array([[6, 5, 6]], np.int32), np.array([[-2, -1, -2]], np.float32), np.array([2], np.int32))
    step(book, [book.admit("a", [1], TOP_2)], IDS[1:], logprobs=given)
    (outputs,) = book.poll_outputs()
    assert outputs.logprobs is not None
    assert outputs.logprobs.token_ids.tolist() == [6, 5, 6]  # as the sampler gave them: a row of 1 + k
    (request,) = outputs
    assert request.logprobs == [[(6, -2.0, 2), (5, -1.0, 1)]]


# What did not come


@pytest.mark.parametrize("given", [0, 1, 2])
def test_what_did_not_come_is_missing(book: Book, given: int) -> None:
    before = book.stats()
    row, other = book.admit("a", [1], TOP_2), book.admit("b", [1])
    logprobs = logprobs_of(IDS, given=given) if given else None
    step(book, [row, other], IDS, logprobs=logprobs)
    (outputs,) = book.poll_outputs()
    assert outputs.logprobs is not None
    token_ids, values, ranks = outputs.logprobs.arrays_of(0)
    assert token_ids.tolist() == [[5, 6, 7][:given] + [-1] * (3 - given)]
    np.testing.assert_array_equal(values, [[-0.5, -1.5, -2.5][:given] + [np.nan] * (3 - given)])
    assert ranks.tolist() == [1 if given else 0]
    assert outputs.logprobs.has_nan.tolist() == [False, False]
    assert outputs.logprobs.of(0) == [[(5, -0.5, 1), (6, -1.5, 1)][:given]]
    np.testing.assert_array_equal(outputs.logprobs.cumulative, [-0.5 if given else np.nan, np.nan])
    assert {name: count for name, count in grown(book, before).items() if "logprobs" in name} == {"missing_logprobs": 1}


def test_logprobs_of_another_id_are_missing(book: Book) -> None:
    step(book, pair(book), IDS, logprobs=Logprobs(PAIR[0][::-1].copy(), *PAIR[1:]))
    assert [entries for entries, *_ in delivered_logprobs(book).values()] == [[[]], [[]]]


# What is refused


WRONG: dict[str, tuple[Any, tuple[str, ...]]] = {
    "too many": (logprobs_of(IDS, given=4), ("[2, 4]", "1 to 3")),
    "none at all": (Logprobs(*(array[..., :0] for array in PAIR[:2]), PAIR[2]), ("[2, 0]", "1 to 3")),
    "a row too few": (Logprobs(*(array[:1] for array in PAIR)), ("[1, 3]", "[2, 1, 3] or [2, 3]")),
    "values of another shape": (Logprobs(PAIR[0], PAIR[1][:, :2], PAIR[2]), ("logprobs.logprobs", "[2, 2]", "[2, 3]")),
    "ranks of another shape": (Logprobs(*PAIR[:2], PAIR[2][:1]), ("sampled_token_ranks", "[1]", "[2]")),
    "several ids a row": (logprobs_of(np.ones((2, 2), np.int32)), ("[2, 2, 1]", "2 rows with 1 ids")),
    "float64": (Logprobs(PAIR[0], PAIR[1].astype(np.float64), PAIR[2]), ("logprobs.logprobs", "float64", "float32")),
    "float ids": (Logprobs(PAIR[1], PAIR[1], PAIR[2]), ("logprob_token_ids", "float32", "int32 or int64")),
    "uint32 ranks": (Logprobs(*PAIR[:2], PAIR[2].astype(np.uint32)), ("sampled_token_ranks", "uint32")),
    "bfloat16": (Logprobs(PAIR[0], torch.zeros(2, 3, dtype=torch.bfloat16), PAIR[2]), ("bfloat16",)),
    "a list": (Logprobs(PAIR[0].tolist(), *PAIR[1:]), ("logprob_token_ids", "list", "numpy")),
    "no logprobs": (PAIR[1], ("ndarray", "asyncbook.Logprobs")),
    "starts of another length": (Lists(*PAIR, [0]), ("cu_num_generated_tokens", "[1]", "[2] or [3]")),
    "starts out of range": (Lists(*PAIR, [0, 2]), ("cu_num_generated_tokens", "[0, 2]")),
    "starts that fall": (Lists(*PAIR, [1, 0]), ("cu_num_generated_tokens", "[1, 0]")),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(book: Book, name: str) -> None:
    wrong, fragments = WRONG[name]
    rows = pair(book)
    batch = book.batch(rows)
    with refused(book, InvalidBatch, *fragments):
        book.submit(batch, IDS, logprobs=wrong)
    step(book, batch, IDS, logprobs=PAIR)
    assert delivered_logprobs(book) == {"a": (A, -0.5, False), "b": (B, -1.0, False)}


def test_a_book_without_refuses_them(make_book: MakeBook) -> None:
    book = make_book()
    row = book.admit("a", [1])
    with refused(book, InvalidBatch, "max_logprobs"):
        book.submit(book.batch([row]), IDS[:1], logprobs=logprobs_of(IDS[:1]))
    with refused(book, InvalidRequest, "'b'", "logprobs is 0", "max_logprobs"):
        book.admit("b", [1], RequestParams(logprobs=0))
    step(book, [row], IDS[:1])
    (outputs,) = book.poll_outputs()
    assert outputs.logprobs is None
    (request,) = outputs
    assert request.logprobs is request.cumulative_logprob is None


@pytest.mark.parametrize(
    ("logprobs", "fragment"), [(3, "max_logprobs = 2"), (-1, "logprobs is -1"), (True, "True"), ("2", "'2'")]
)
def test_more_than_the_book_holds_is_refused(book: Book, logprobs: Any, fragment: str) -> None:
    with refused(book, InvalidRequest, "logprobs", fragment):
        book.admit("a", [1], RequestParams(logprobs=logprobs))


@pytest.mark.parametrize("value", [-1, MAX_LOGPROBS + 1, 1.0, True])
def test_a_config_of_no_book(value: Any) -> None:
    with pytest.raises(ValueError, match=f"max_logprobs is {value!r}, expected an int from 0 to {MAX_LOGPROBS}"):
        BookConfig(**SMALL, max_logprobs=value)


# Where it goes


def table(book: Book) -> np.ndarray:
    """int32 [max_num_reqs, values]: the entries of all rows."""
    return book._layout.logprobs.view(book._segment.readable())


def test_nothing_is_left_in_a_released_row(book: Book) -> None:
    rows = pair(book)
    step(book, rows, IDS, logprobs=PAIR)
    assert table(book)[rows[0].index].any()
    book.release(rows[0])
    step(book, rows[1:], IDS[1:], logprobs=Logprobs(*(array[1:].copy() for array in PAIR)))
    assert not table(book)[rows[0].index].any()
    again = book.admit("c", [1], RequestParams(logprobs=1))
    step(book, [again], IDS[:1], logprobs=Logprobs(*(array[:1].copy() for array in PAIR)))
    assert delivered_logprobs(book)["c"] == ([A[0][:2]], -0.5, False)


def test_an_abort_delivers_what_waits(book: Book) -> None:
    rows = pair(book)
    batch = book.batch(rows)
    with in_flight(book):
        number = book.submit(batch, IDS, logprobs=PAIR)
        book.abort(rows[0])
        book.release(rows[1])
    book.wait_applied(number)
    step(book, [], [])
    assert delivered_logprobs(book) == {"a": (A, -0.5, False), "b": (B, -1.0, False)}


def test_a_full_row_has_logprobs_of_its_last_id(make_book: MakeBook) -> None:
    book = make_book(max_logprobs=1)
    row = book.admit("a", [1] * book.config.max_model_len, RequestParams(logprobs=1))
    step(book, [row], IDS[:1], logprobs=logprobs_of(IDS[:1], given=2))
    assert delivered_logprobs(book)["a"] == ([[(5, -0.5, 1), (6, -1.5, 1)]], -0.5, False)


def test_a_request_that_comes_back_starts_anew(book: Book) -> None:
    row = book.admit("a", [1], TOP_2, output_token_ids=[3, 4])
    one = Logprobs(*(array[:1].copy() for array in PAIR))
    step(book, [row], IDS[:1], logprobs=one)
    step(book, [row], IDS[:1], logprobs=one)
    assert delivered_logprobs(book)["a"] == (2 * A, -1.0, False)


def test_a_new_handle_keeps_them(book: Book) -> None:
    row = book.admit("a", [1], TOP_2)
    one = Logprobs(*(array[:1].copy() for array in PAIR))
    old = book.batch([row])
    with in_flight(book):
        book.preempt(row)
        book.submit(old, IDS[:1], logprobs=one)  # delivered
        row = book.resume(row, num_computed_tokens=1)
    book.wait_room()
    step(book, old, IDS[:1], logprobs=one)  # stale
    step(book, [row], IDS[:1], logprobs=one)
    assert delivered_logprobs(book)["a"] == (2 * A, -1.0, False)
