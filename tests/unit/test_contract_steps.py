"""`batch`, `submit` and the room for steps: what they take, and what they refuse. On every kind of book."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncbook
from asyncbook import (
    Book,
    BookConfig,
    ContractError,
    FinishReason,
    InvalidBatch,
)
from asyncbook.ipc.wire import NUM_BATCH_SLOTS
from tests.conftest import (
    SMALL,
    TIMEOUT_S,
    Delivered,
    MakeBook,
    delivered,
    grown,
    have,
    refused,
    step,
    tokens,
)

NO_COUNTS = (  # each is no counts for a batch of two rows
    [1],
    [1, 1, 1],
    [[1, 1]],
    [1.0, 1.0],
    ["1", "1"],
    [1, None],
    [[1], [1, 1]],
    [True, True],
    1,
    "12",
    [1, 2**40],
    [1, 2**70],
    np.array([1, 2**63], np.uint64),
)


# Batches


def test_a_batch_names_rows_in_any_order_and_can_be_used_again(book: Book) -> None:
    rows = [book.admit(name, [index + 1]) for index, name in enumerate("abc")]
    batch = book.batch(iter([rows[2], rows[0], rows[1]]))
    assert len(batch) == 3
    assert batch.rows == (rows[2], rows[0], rows[1])
    step(book, batch, [23, 21, 22])
    step(book, batch, [33, 31, 32])
    step(book, book.batch(rows), [41, 42, 43])
    assert [tokens(book, row) for row in rows] == [[1, 21, 31, 41], [2, 22, 32, 42], [3, 23, 33, 43]]


def test_more_batches_than_the_bookkeeper_remembers(book: Book) -> None:
    rows = [book.admit(name, [1]) for name in "abc"]
    orders = [[(number + place) % 3 for place in range(3)] for number in range(NUM_BATCH_SLOTS + 3)]
    batches = [book.batch([rows[index] for index in order]) for order in orders]
    for _ in range(2):
        for number, (order, batch) in enumerate(zip(orders, batches, strict=True)):
            speaks = number < 3 or number >= NUM_BATCH_SLOTS  # the others' slots are taken in between
            step(book, batch, [10 + index if speaks else -1 for index in order])
    assert [tokens(book, row) for row in rows] == [[1, *[10 + index] * 12] for index in range(3)]


def test_an_empty_batch_publishes_what_happened_between_steps(book: Book) -> None:
    row = book.admit("a", [1, 2])
    nobody: list[Any] = [np.zeros(0, np.int32), np.zeros((0, 3), np.int64)]
    for ids in nobody:
        assert step(book, [], ids) == book.applied_step
    assert have(book, row, num_tokens=2)
    assert delivered(book) == {}


def test_default_schedule_is_what_is_not_computed_yet(book: Book) -> None:
    row = book.admit("a", [1, 2, 3], num_computed_tokens=1)
    batch = book.batch([row])
    step(book, batch, [5])
    assert have(book, row, num_computed_tokens=3, num_tokens=4)
    step(book, batch, [6])
    assert have(book, row, num_computed_tokens=4, num_tokens=5)
    step(book, [row], [[7, -1]], d=[1])
    assert have(book, row, num_computed_tokens=5, num_tokens=6)


def test_a_batch_may_outlive_its_rows(book: Book) -> None:
    before = book.stats()
    row = book.admit("a", [1])
    batch = book.batch([row])
    book.release(row)
    new = book.admit("b", [2])
    step(book, batch, [[5, 6]])
    assert new.index == row.index
    assert tokens(book, new) == [2]
    assert grown(book, before)["dropped_stale"] == 2


def test_batch_refuses_a_row_twice(book: Book) -> None:
    a, b = book.admit("a", [1]), book.admit("b", [1])
    with refused(book, InvalidBatch, f"row {b.index}", "twice", "0", "2"):
        book.batch([b, a, b])


@pytest.mark.parametrize("counts", NO_COUNTS, ids=repr)
@pytest.mark.parametrize("name", ["num_scheduled_tokens", "num_draft_tokens"])
def test_batch_refuses_what_is_no_counts(book: Book, name: str, counts: Any) -> None:
    rows = [book.admit("a", [1]), book.admit("b", [1])]
    with refused(book, InvalidBatch, name):
        book.batch(rows, **{name: counts})


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"num_scheduled_tokens": [1, 0]}, ["num_scheduled_tokens[1]", "0", "1 to"]),
        ({"num_scheduled_tokens": [-1, 1]}, ["num_scheduled_tokens[0]", "-1", "1 to"]),
        ({"num_scheduled_tokens": [3, 2], "num_draft_tokens": [2, 3]}, ["num_scheduled_tokens[1]", "2", "3 to"]),
        ({"num_draft_tokens": [6, 0]}, ["num_draft_tokens[0]", "6", "0 to 5"]),
        ({"num_draft_tokens": [0, -1]}, ["num_draft_tokens[1]", "-1", "0 to 5"]),
    ],
)
def test_batch_refuses_counts_out_of_range(book: Book, options: dict[str, Any], fragments: list[str]) -> None:
    rows = [book.admit("a", [1]), book.admit("b", [1])]
    with refused(book, InvalidBatch, *fragments):
        book.batch(rows, **options)


def test_batch_takes_counts_of_any_integer_type(book: Book) -> None:
    row = book.admit("a", [1, 2, 3])
    for counts in ((1,), np.array([1], np.uint8), np.array([1], np.int64)):
        step(book, book.batch([row], num_scheduled_tokens=counts, num_draft_tokens=[0]), [7])
    assert tokens(book, row) == [1, 2, 3, 7]


# Ids of a step


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("layout", ["contiguous", "column", "reversed", "fortran", "subclass"])
def test_submit_takes_any_memory_layout(book: Book, dtype: type, layout: str) -> None:
    rows = [book.admit(name, [1]) for name in "abc"]
    ids: np.ndarray = np.array([[11, 12], [21, 22], [31, 32]], dtype)
    sampled = {
        "contiguous": ids,
        "column": np.repeat(ids, 2, axis=1)[:, ::2],
        "reversed": ids[::-1, ::-1].copy()[::-1, ::-1],
        "fortran": np.asfortranarray(ids),
        "subclass": ids.view(np.recarray),
    }[layout]
    step(book, rows, sampled, drafts=sampled)
    assert [tokens(book, row) for row in rows] == [[1, 11, 12, 11, 12], [1, 21, 22, 21, 22], [1, 31, 32, 31, 32]]
    read_only = ids[:, 0].copy()
    read_only.flags.writeable = False
    step(book, rows, read_only)
    assert [tokens(book, row)[-1] for row in rows] == [11, 21, 31]


def test_submit_takes_torch_tensors(book: Book) -> None:
    torch: Any = pytest.importorskip("torch")
    row = book.admit("a", [1])
    step(book, [row], torch.tensor([5], dtype=torch.int32), drafts=torch.tensor([[6, 7]]))
    assert tokens(book, row) == [1, 5, 6, 7]
    step(book, [row], torch.tensor([[6, 7, 8]]).expand(1, 3), d=[2])
    assert tokens(book, row) == [1, 5, 6, 7, 8]
    batch = book.batch([row])
    for wrong in (torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1], dtype=torch.int16)):
        with refused(book, InvalidBatch, "sampled_token_ids", str(wrong.dtype)):
            book.submit(batch, wrong)
    with refused(book, InvalidBatch, "sampled_token_ids", "[2]", "1 rows"):
        book.submit(batch, torch.tensor([1, 2]))


def test_ids_may_be_overwritten_as_soon_as_submit_returns(book: Book) -> None:
    row = book.admit("a", [1])
    batch = book.batch([row])
    sampled, drafts = np.array([[5, 6]], np.int32), np.array([[7, 8]], np.int32)
    number = book.submit(batch, sampled, draft_token_ids=drafts)
    sampled[:] = drafts[:] = 99
    book.wait_applied(number, TIMEOUT_S)
    assert tokens(book, row) == [1, 5, 6, 7, 8]


def test_padding_is_no_id(book: Book) -> None:
    before = book.stats()
    row, other = book.admit("a", [1]), book.admit("b", [2])
    step(book, [row, other], [[5, -1, 7], [-1, -1, -1]], drafts=[[6, -1, 7], [-1, 1, 1]])
    assert tokens(book, row) == [1, 5, 6]
    assert tokens(book, other) == [2]
    assert grown(book, before) == {"admitted_requests": 2, "submitted_tokens": 1, "committed_tokens": 1}


WRONG_IDS: dict[str, tuple[Any, list[str]]] = {
    "list": ([1, 2], ["list", "numpy"]),
    "tuple": ((1, 2), ["tuple", "numpy"]),
    "None": (None, ["NoneType", "numpy"]),
    "number": (5, ["int", "numpy"]),
    "bytes": (b"12345678", ["bytes", "numpy"]),
    "float64": (np.array([1.0, 2.0]), ["float64", "int32 or int64"]),
    "int16": (np.array([1, 2], np.int16), ["int16", "int32 or int64"]),
    "uint32": (np.array([1, 2], np.uint32), ["uint32", "int32 or int64"]),
    "bool": (np.array([True, False]), ["bool", "int32 or int64"]),
    "object": (np.array([1, 2], object), ["object", "int32 or int64"]),
    "big-endian": (np.array([1, 2], ">i4"), [">i4", "int32 or int64"]),
    "one row": (np.array([1], np.int32), ["[1]", "2 rows"]),
    "three rows": (np.array([1, 2, 3], np.int32), ["[3]", "2 rows"]),
    "turned": (np.zeros((3, 2), np.int32), ["[3, 2]", "2 rows"]),
    "no rows": (np.zeros(0, np.int32), ["[0]", "2 rows"]),
    "no ids": (np.zeros((2, 0), np.int32), ["[2, 0]", "2 rows"]),
    "3-D": (np.zeros((2, 1, 1), np.int32), ["[2, 1, 1]"]),
    "0-D": (np.array(5, np.int32), ["[]"]),
}


@pytest.mark.parametrize("what", WRONG_IDS)
def test_submit_refuses_ids_of_another_kind(book: Book, what: str) -> None:
    ids, fragments = WRONG_IDS[what]
    batch = book.batch([book.admit("a", [1]), book.admit("b", [1])])
    with refused(book, InvalidBatch, "sampled_token_ids", *fragments):
        book.submit(batch, ids)
    if ids is not None:
        with refused(book, InvalidBatch, "draft_token_ids", *fragments):
            book.submit(batch, np.array([5, 5], np.int32), draft_token_ids=ids)


def test_submit_refuses_more_ids_than_the_book_was_made_for(book: Book) -> None:
    batch = book.batch([book.admit("a", [1])])
    with refused(book, InvalidBatch, "sampled_token_ids", "[1, 7]", "1 to 6"):
        book.submit(batch, np.full((1, 7), 5, np.int32))
    with refused(book, InvalidBatch, "draft_token_ids", "[1, 6]", "1 to 5"):
        book.submit(batch, np.array([5], np.int32), draft_token_ids=np.full((1, 6), 5, np.int32))


def test_a_book_without_drafts_refuses_them(make_book: MakeBook) -> None:
    book = make_book(num_spec_tokens=0)
    row = book.admit("a", [1])
    batch = book.batch([row])
    with refused(book, InvalidBatch, "draft_token_ids", "num_spec_tokens=0"):
        book.submit(batch, np.array([5], np.int32), draft_token_ids=np.array([6], np.int32))
    with refused(book, InvalidBatch, "num_draft_tokens[0]", "1", "0 to 0"):
        book.batch([row], num_draft_tokens=[1])
    with refused(book, InvalidBatch, "sampled_token_ids", "[1, 2]", "1 to 1"):
        book.submit(batch, np.array([[5, 6]], np.int32))
    step(book, batch, [[5]])
    assert tokens(book, row) == [1, 5]


def test_a_batch_of_another_book_is_refused(book: Book) -> None:
    mine = book.admit("mine", [1])
    with asyncbook.open(BookConfig(**(SMALL | {"max_num_reqs": 9}))) as other:
        batch = other.batch([other.admit(str(number), [1]) for number in range(9)])
        with refused(book, ContractError):
            book.submit(batch, np.full(9, 5, np.int32))
    step(book, [mine], [5])
    assert tokens(book, mine) == [1, 5]


# Bad ids end a request, not the call


@pytest.mark.parametrize(
    ("bad", "dtype", "stop_reason"),
    [
        (100, np.int32, 100),
        (-2, np.int32, -2),
        (-(2**31), np.int32, -(2**31)),
        (2**31 - 1, np.int64, 2**31 - 1),
        (2**31, np.int64, -(2**31)),
        (2**32 + 5, np.int64, -(2**31)),
        (-(2**32) - 1, np.int64, -(2**31)),
        (2**63 - 1, np.int64, -(2**31)),
    ],
)
def test_a_bad_id_ends_its_request_alone(book: Book, bad: int, dtype: type, stop_reason: int) -> None:
    before = book.stats()
    row, other = book.admit("a", [1]), book.admit("b", [2])
    step(book, [row, other], np.array([[5, bad, 6], [7, 8, 9]], dtype))
    assert tokens(book, row) == [1, 5]
    assert tokens(book, other) == [2, 7, 8, 9]
    assert have(book, row, finish_reason=FinishReason.ERROR, stop_reason=stop_reason)
    assert delivered(book)["a"] == Delivered([5], FinishReason.ERROR, stop_reason, 1)
    assert grown(book, before) == {
        "admitted_requests": 2, "submitted_tokens": 6, "committed_tokens": 4, "dropped_invalid": 1,
        "dropped_after_finish": 1, "finished_ERROR": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("ids", "scheduled", "stop_reason"), [([100, 5], 1, 100), ([5, 6], 3, None)])
def test_an_error_without_any_id_is_delivered_too(
    book: Book, ids: list[int], scheduled: int, stop_reason: int | None
) -> None:
    row, other = book.admit("a", [1]), book.admit("b", [2])
    number = step(book, [row, other], [ids, [7, -1]], scheduled=[scheduled, 1])
    (outputs,) = book.poll_outputs()
    assert outputs.step == number
    bad, good = outputs
    assert (bad.request_id, bad.token_ids.tolist(), *bad[2:4]) == ("a", [], FinishReason.ERROR, stop_reason)
    assert (good.request_id, good.token_ids.tolist(), *good[2:4]) == ("b", [7], FinishReason.NONE, None)
    assert have(book, row, finish_reason=FinishReason.ERROR, num_output_tokens=0, num_tokens=1)


@pytest.mark.parametrize("bad", [100, -2, 2**31 - 1, 2**31, 2**32 + 5, -(2**40)])
def test_a_bad_draft_cuts_the_drafts_and_is_counted(book: Book, bad: int) -> None:
    before = book.stats()
    row = book.admit("a", [1])
    step(book, [row], [5], drafts=np.array([[6, bad, 7]], np.int64))
    assert tokens(book, row) == [1, 5, 6]
    assert grown(book, before)["invalid_draft_tokens"] == 1
    assert have(book, row, finish_reason=FinishReason.NONE)
