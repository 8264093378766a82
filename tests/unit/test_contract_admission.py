"""`admit`: what it takes, what it gives, and everything that it refuses. On every kind of book."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncbook import (
    Book,
    BookFull,
    DuplicateRequest,
    FinishReason,
    InvalidRequest,
    InvalidToken,
    NotApplied,
    PromptTooLong,
    RequestParams,
    Row,
)
from tests.conftest import (
    Delivered,
    columns,
    delivered,
    grown,
    have,
    refused,
    step,
    tables,
    tokens,
    wait_until,
)

INT32_MAX = 2**31 - 1


def test_rows_are_given_out_lowest_index_first(book: Book) -> None:
    rows = [book.admit(name, [1]) for name in "abcd"]
    assert [row.index for row in rows] == [0, 1, 2, 3]
    for index in (2, 0, 3):
        book.release(rows[index])
    again = [book.admit(name, [1]) for name in "efg"]
    assert again == [Row(index, rows[index].generation + 1) for index in (0, 2, 3)]


def test_admission_shows_in_the_frame_of_the_next_step(book: Book) -> None:
    before = book.frame().num_tokens.copy()
    row = book.admit("a", [1, 2, 3], output_token_ids=[7, 8], num_computed_tokens=4)
    np.testing.assert_array_equal(book.frame().num_tokens, before)
    step(book, [], [])
    assert columns(book, row) == {
        "num_prompt_tokens": 3,
        "num_tokens_no_spec": 5,
        "num_tokens": 5,
        "num_computed_tokens": 4,
        "num_output_tokens": 2,
        "num_accepted_tokens": 0,
        "last_token_id": 8,
        "stop_reason": -1,
        "generation": row.generation,
        "finish_reason": FinishReason.NONE,
    }
    assert book.token_ids(row).tolist() == [1, 2, 3, 7, 8]
    assert book.output_token_ids(row).tolist() == [7, 8]
    assert delivered(book) == {}


def test_tokens_of_a_new_row_are_not_applied_before_the_next_step(book: Book) -> None:
    old = book.admit("old", [9, 9, 9])
    step(book, [], [])
    book.release(old)
    row = book.admit("new", [1])
    for read in (book.token_ids, book.output_token_ids):
        with pytest.raises(NotApplied) as caught:
            read(row)
        assert f"row {row.index}" in str(caught.value)
        assert "'new'" in str(caught.value)
        assert f"step {book.applied_step}" in str(caught.value)
    step(book, [], [])
    assert book.token_ids(row).tolist() == [1]
    assert book.output_token_ids(row).tolist() == []


@pytest.mark.parametrize(
    "prompt",
    [(1, 2), range(1, 4), np.array([1, 2], np.int64), np.array([1, 2], np.uint8), np.arange(6, dtype=np.int32)[::2]],
)
def test_ids_come_as_any_sequence_or_array_of_integers(book: Book, prompt: Any) -> None:
    row = book.admit("a", prompt, output_token_ids=prompt)
    step(book, [], [])
    assert book.token_ids(row).tolist() == 2 * [int(token_id) for token_id in prompt]


def test_numbers_come_as_python_or_numpy_integers(book: Book) -> None:
    params = RequestParams(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        min_tokens=np.int32(1),  # type: ignore[arg-type]
        eos_token_id=np.int64(2),  # type: ignore[arg-type]
        stop_token_ids=np.array([9, 7]),  # type: ignore[arg-type]
    )
    row = book.admit("a", [1, 2, 3], params, num_computed_tokens=np.int64(2))  # type: ignore[arg-type]
    step(book, [row], [2], scheduled=[1])
    step(book, [row], [7])
    assert have(book, row, finish_reason=FinishReason.STOP, stop_reason=7, num_output_tokens=2, num_computed_tokens=4)


@pytest.mark.parametrize("value", [1, np.True_, "yes"])
def test_ignore_eos_that_is_no_bool_is_refused_or_taken_and_hurts_nobody(book: Book, value: Any) -> None:
    neighbour = book.admit("neighbour", [1])
    try:
        row = book.admit("a", [1], RequestParams(eos_token_id=2, ignore_eos=value))
    except InvalidRequest:
        pass
    else:
        step(book, [row], [2])
        assert have(book, row, finish_reason=FinishReason.NONE)
    step(book, [neighbour], [5])
    assert tokens(book, neighbour) == [1, 5]


def test_num_computed_tokens_that_is_a_bool_is_refused_or_taken_and_hurts_nobody(book: Book) -> None:
    neighbour = book.admit("neighbour", [1])
    try:
        row = book.admit("a", [1, 2], num_computed_tokens=True)
    except InvalidRequest:
        pass
    else:
        step(book, [row], [5])
        assert have(book, row, num_computed_tokens=2)
    step(book, [neighbour], [5])
    assert tokens(book, neighbour) == [1, 5]


def test_eos_token_id_is_one_id_or_several(book: Book) -> None:
    for eos_token_id, ids, stop in ((2, [3, 2], 2), ([2, 7], [3, 7], 7), ((2, 7), [3, 2], 2), ((), [2, 7], -1)):
        row = book.admit("a", [1], RequestParams(eos_token_id=eos_token_id))
        step(book, [row], [ids])
        assert have(book, row, stop_reason=stop)
        book.release(row)


def test_any_number_of_stop_ids(book: Book) -> None:
    neighbour = book.admit("neighbour", [1], RequestParams(stop_token_ids=[3]))
    row = book.admit("a", [1], RequestParams(stop_token_ids=range(10, 90), eos_token_id=[90, 91]))
    step(book, [row, neighbour], [[5, 89], [89, 3]])
    assert have(book, row, finish_reason=FinishReason.STOP, stop_reason=89)
    assert have(book, neighbour, finish_reason=FinishReason.STOP, stop_reason=3)
    book.release(row)
    plain = book.admit("plain", [1])  # the same row: nothing of the long list is left
    step(book, [plain], [[89, 90]])
    assert have(book, plain, finish_reason=FinishReason.NONE)


def test_a_stop_id_need_not_be_in_the_vocabulary(book: Book) -> None:
    row = book.admit("a", [1], RequestParams(stop_token_ids=[INT32_MAX, 3], max_tokens=2**40, min_tokens=0))
    step(book, [row], [3])
    assert have(book, row, stop_reason=3)


def test_mask_of_the_prompt(book: Book) -> None:
    row = book.admit("a", [1, 2, 3], prompt_is_token_ids=[True, False, True], output_token_ids=[4])
    step(book, [row], [5], drafts=[[6, 7]])
    assert tables(book)[1][row.index].tolist() == [True, False, *[True] * 5, *[False] * 9]


def test_earlier_outputs_count_and_are_not_delivered_again(book: Book) -> None:
    row = book.admit("a", [1, 2], RequestParams(max_tokens=4), output_token_ids=[7, 8])
    step(book, [row], [9])
    assert delivered(book) == {"a": Delivered([9], num_pieces=1)}
    step(book, [row], [10])
    assert delivered(book) == {"a": Delivered([10], FinishReason.LENGTH, None, 1)}
    assert book.output_token_ids(row).tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("prompt", "outputs", "finish_reason", "stop_reason"),
    [([1], [5, 9], FinishReason.STOP, 9), (list(range(1, 15)), [5, 6], FinishReason.LENGTH, None)],
)
def test_earlier_outputs_that_end_the_request_end_it_at_once(
    book: Book, prompt: list[int], outputs: list[int], finish_reason: FinishReason, stop_reason: int | None
) -> None:
    before = book.stats()
    row = book.admit("a", prompt, RequestParams(stop_token_ids=[9]), output_token_ids=outputs)
    came: dict[str, Delivered] = {}
    wait_until(lambda: bool(came.update(delivered(book)) or came), "the end is delivered without a step")
    assert came == {"a": Delivered([], finish_reason, stop_reason, 1)}
    step(book, [row], [4])
    assert tokens(book, row) == prompt + outputs
    assert grown(book, before) == {
        "admitted_requests": 1, f"finished_{finish_reason.name}": 1, "submitted_tokens": 1, "dropped_finished": 1
    }  # fmt: skip


def test_earlier_stop_before_min_tokens_does_not_end_the_request(book: Book) -> None:
    row = book.admit("a", [1], RequestParams(stop_token_ids=[9], min_tokens=2), output_token_ids=[5, 9])
    step(book, [row], [9])
    assert have(book, row, finish_reason=FinishReason.STOP, num_output_tokens=3)


# Refusals

TOO_LONG = list(range(1, 18))
LIMIT_2 = RequestParams(max_tokens=2)
REFUSALS: dict[str, tuple[type[Exception], list[str], dict[str, Any]]] = {
    "empty prompt": (InvalidRequest, ["'x'", "empty", "at least one"], {"prompt_token_ids": []}),
    "empty array": (InvalidRequest, ["'x'", "empty"], {"prompt_token_ids": np.zeros(0, np.int32)}),
    "id = vocab_size": (InvalidToken, ["'x'", "prompt_token_ids[1]", "100", "0 to 99"], {"prompt_token_ids": [1, 100]}),
    "id = -1": (InvalidToken, ["'x'", "prompt_token_ids[0]", "-1", "0 to 99"], {"prompt_token_ids": [-1]}),
    "id = 2**31": (InvalidToken, [str(2**31)], {"prompt_token_ids": [1, 2**31]}),
    "id = 2**70": (InvalidToken, [str(2**70)], {"prompt_token_ids": [1, 2**70]}),
    "id = -2**70": (InvalidToken, [str(-(2**70))], {"prompt_token_ids": [-(2**70)]}),
    "id wraps in int32": (InvalidToken, [str(2**32 + 5)], {"prompt_token_ids": np.array([1, 2**32 + 5])}),
    "output id": (InvalidToken, ["'x'", "output_token_ids[1]", "100"], {"output_token_ids": [1, 100]}),
    "float ids": (InvalidRequest, ["'x'", "prompt_token_ids", "float64"], {"prompt_token_ids": [1.0, 2.0]}),
    "text": (InvalidRequest, ["'x'", "prompt_token_ids"], {"prompt_token_ids": "hello"}),
    "texts": (InvalidRequest, ["'x'", "prompt_token_ids"], {"prompt_token_ids": ["a", "b"]}),
    "None": (InvalidRequest, ["'x'", "prompt_token_ids"], {"prompt_token_ids": None}),
    "None among ids": (InvalidRequest, ["'x'", "prompt_token_ids"], {"prompt_token_ids": [1, None]}),
    "bools": (InvalidRequest, ["'x'", "bool"], {"prompt_token_ids": [True, False]}),
    "one id": (InvalidRequest, ["'x'", "prompt_token_ids"], {"prompt_token_ids": 5}),
    "two prompts": (InvalidRequest, ["'x'", "[2, 2]"], {"prompt_token_ids": [[1, 2], [3, 4]]}),
    "ragged prompt": (InvalidRequest, ["'x'", "prompt_token_ids"], {"prompt_token_ids": [[1], [2, 3]]}),
    "ragged outputs": (InvalidRequest, ["'x'", "output_token_ids"], {"output_token_ids": [[1], [2, 3]]}),
    "float outputs": (InvalidRequest, ["'x'", "output_token_ids"], {"output_token_ids": [1.5]}),
    "long prompt": (PromptTooLong, ["'x'", "17", "max_model_len = 16"], {"prompt_token_ids": TOO_LONG}),
    "long outputs": (
        PromptTooLong,
        ["'x'", "10 prompt", "7 earlier", "16"],
        {"prompt_token_ids": TOO_LONG[:10], "output_token_ids": TOO_LONG[:7]},
    ),
    "outputs meet max_tokens": (
        InvalidRequest,
        ["'x'", "2 earlier outputs", "max_tokens = 2"],
        {"params": LIMIT_2, "output_token_ids": [5, 6]},
    ),
    "computed < 0": (InvalidRequest, ["'x'", "num_computed_tokens", "-1", "0 to 3"], {"num_computed_tokens": -1}),
    "computed > tokens": (InvalidRequest, ["'x'", "num_computed_tokens", "4", "0 to 3"], {"num_computed_tokens": 4}),
    "computed is a float": (InvalidRequest, ["'x'", "num_computed_tokens", "1.5"], {"num_computed_tokens": 1.5}),
    "computed is text": (InvalidRequest, ["'x'", "num_computed_tokens", "'1'"], {"num_computed_tokens": "1"}),
    "short mask": (InvalidRequest, ["'x'", "prompt_is_token_ids", "[2]", "[3]"], {"prompt_is_token_ids": [True] * 2}),
    "long mask": (InvalidRequest, ["'x'", "prompt_is_token_ids", "[4]", "[3]"], {"prompt_is_token_ids": [True] * 4}),
    "mask of ints": (InvalidRequest, ["'x'", "prompt_is_token_ids", "int64"], {"prompt_is_token_ids": [1, 1, 0]}),
    "ragged mask": (InvalidRequest, ["'x'", "prompt_is_token_ids"], {"prompt_is_token_ids": [[True], [False, True]]}),
    "request_id is a number": (InvalidRequest, ["request_id", "5"], {"request_id": 5}),
    "request_id is bytes": (InvalidRequest, ["request_id", "b'x'"], {"request_id": b"x"}),
    "params is a dict": (InvalidRequest, ["'x'", "params", "RequestParams"], {"params": {"max_tokens": 1}}),
}
BAD_PARAMS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "max_tokens 0": (["max_tokens", "0", "at least 1"], {"max_tokens": 0}),
    "max_tokens < 0": (["max_tokens", "-5", "at least 1"], {"max_tokens": -5}),
    "max_tokens is a float": (["max_tokens", "2.5"], {"max_tokens": 2.5}),
    "max_tokens is text": (["max_tokens", "'2'"], {"max_tokens": "2"}),
    "max_tokens is a bool": (["max_tokens", "True"], {"max_tokens": True}),
    "min_tokens < 0": (["min_tokens", "-1", "at least 0"], {"min_tokens": -1}),
    "min_tokens is None": (["min_tokens", "None"], {"min_tokens": None}),
    "eos < 0": (["eos_token_id", "-1"], {"eos_token_id": -1}),
    "eos is no int32": (["eos_token_id", str(2**31), str(INT32_MAX)], {"eos_token_id": [2, 2**31]}),
    "eos is a float": (["eos_token_id", "1.5"], {"eos_token_id": 1.5}),
    "eos is text": (["eos_token_id", "'x'"], {"eos_token_id": "x"}),
    "eos is a bool": (["eos_token_id", "True"], {"eos_token_id": True}),
    "stop id < 0": (["stop_token_ids", "-1"], {"stop_token_ids": [3, -1]}),
    "stop id is no int32": (["stop_token_ids", str(2**40)], {"stop_token_ids": [2**40]}),
    "stop id is a float": (["stop_token_ids", "3.5"], {"stop_token_ids": [3.5]}),
    "stop id is text": (["stop_token_ids", "'a'"], {"stop_token_ids": ["a"]}),
    "stop ids are one id": (["stop_token_ids", "5"], {"stop_token_ids": 5}),
    "stop ids are None": (["stop_token_ids", "None"], {"stop_token_ids": None}),
    "stop is one string": (["stop", "'END'"], {"stop": "END"}),
    "stop without a tokenizer": (["stop", "tokenizer"], {"stop": ["END"]}),
    "logprobs without max_logprobs": (["logprobs", "max_logprobs"], {"logprobs": 1}),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_admit_refuses(book: Book, what: str) -> None:
    error, fragments, options = REFUSALS[what]
    arguments: dict[str, Any] = {"request_id": "x", "prompt_token_ids": [1, 2, 3]} | options
    held = book.admit("held", [1, 2])
    with refused(book, error, *fragments):
        book.admit(**arguments)
    step(book, [held], [7])
    assert tokens(book, held) == [1, 2, 7]
    assert book.admit("x", [1]).index == 1


@pytest.mark.parametrize("what", BAD_PARAMS)
def test_admit_refuses_params(book: Book, what: str) -> None:
    fragments, fields = BAD_PARAMS[what]
    params = RequestParams(**fields)
    with refused(book, InvalidRequest, *fragments):
        book.admit("x", [1, 2, 3], params)


def test_admit_refuses_a_live_request_id(book: Book) -> None:
    first, other = book.admit("x", [1, 2]), book.admit("other", [3])
    with refused(book, DuplicateRequest, "'x'", f"row {first.index}"):
        book.admit("x", [9])
    assert issubclass(DuplicateRequest, ValueError)
    step(book, [other, first], [5, 6])
    assert tokens(book, first) == [1, 2, 6]


def test_request_id_is_free_after_abort_but_after_a_stop_only_with_the_row(book: Book) -> None:
    aborted = book.admit("x", [1])
    book.abort(aborted)
    again = book.admit("x", [1], RequestParams(stop_token_ids=[9]))
    assert again.index != aborted.index
    step(book, [again], [9])
    assert have(book, again, finish_reason=FinishReason.STOP)
    with refused(book, DuplicateRequest, "'x'"):
        book.admit("x", [1])
    book.release(aborted)  # the row of the first one: the second one's id stays taken
    with refused(book, DuplicateRequest, "'x'"):
        book.admit("x", [1])
    book.release(again)
    book.admit("x", [1])


def test_admit_refuses_what_the_book_has_no_row_for(book: Book) -> None:
    rows = [book.admit(name, [1]) for name in "abcd"]
    with refused(book, BookFull, "4 rows", "'x'"):
        book.admit("x", [1])
    book.abort(rows[2])  # ends the request, but its row is still held
    with refused(book, BookFull, "4 rows", "'x'"):
        book.admit("x", [1])
    book.release(rows[2])
    assert book.admit("x", [1]) == (2, rows[2].generation + 1)


def test_a_wrong_request_is_told_before_a_full_book(book: Book) -> None:
    for name in "abcd":
        book.admit(name, [1])
    with refused(book, InvalidToken):
        book.admit("x", [100])


def test_request_ids_are_any_text(book: Book) -> None:
    names = ["", "é€😀", "a\0b", "x" * 10_000]
    for name in names:
        row = book.admit(name, [1])
        step(book, [row], [5])
        assert delivered(book)[name].token_ids == [5]
        book.release(row)


def test_admit_refuses_a_request_id_that_no_message_can_carry(book: Book) -> None:
    # Half of a surrogate pair, which JSON may bring, has no UTF-8. Both books refuse what one of them must.
    with refused(book, InvalidRequest, "request_id"):
        book.admit("\ud800", [1])
