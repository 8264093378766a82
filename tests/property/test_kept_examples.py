"""Calls on which the books, or a book and the reference, once differed, and calls that find a fault of
`tools/mutate.py` which random ones find by luck only. Cut down by hand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import asyncbook
from asyncbook import RequestParams, Row
from tests.property.compare import Refused
from tests.property.operations import CONFIGS
from tests.property.trio import Trio, TrioBatch, TrioPool
from tests.reference import Finish

DEFAULT = RequestParams()


@pytest.fixture(params=["many in flight", "ring"])
def trio(trio_pool: TrioPool, request: pytest.FixtureRequest) -> Iterator[Trio]:
    """Three empty books that are compared once more behind the test."""
    trio = trio_pool.take(CONFIGS[request.param])
    yield trio
    trio_pool.give_back(trio)


def row_of(answer: Row | Refused) -> Row:
    assert isinstance(answer, Row)
    return answer


def batch_of(answer: TrioBatch | Refused) -> TrioBatch:
    assert isinstance(answer, TrioBatch)
    return answer


def test_a_preempted_row_may_be_scheduled_for_any_number(trio: Trio) -> None:
    # A running row would end as overscheduled. A preempted one delivers, and what it is taken to have computed must
    # not wrap around: its later ids would be those of a partial prefill.
    row = row_of(trio.admit("request", [4, 1, 0, 2], DEFAULT))
    most = batch_of(trio.batch([row], num_scheduled_tokens=[2**31 - 1]))
    trio.preempt(row)
    trio.submit(most, np.array([3], np.int32))
    trio.submit(most, np.array([3], np.int32))
    trio.step([row], [2], scheduled=[1])
    trio.settle()
    assert trio.sidecar.token_ids(row).tolist() == [4, 1, 0, 2, 3, 3, 2]


def test_ids_of_an_empty_batch_may_not_be_too_wide_either(trio: Trio) -> None:
    empty = batch_of(trio.batch([]))
    for width, is_refused in ((0, True), (1, False), (3, False), (4, True)):
        answer = trio.submit(empty, np.zeros((0, width), np.int32))
        assert (answer == Refused("InvalidBatch")) is is_refused


@pytest.mark.parametrize("num_stop_ids", [3, 5, 9])
def test_many_stop_ids_leave_those_of_a_neighbour(num_stop_ids: int) -> None:
    # A new book: the memory for stop ids grows once, with the first request that has many.
    with asyncbook.open(CONFIGS["many in flight"]) as book:
        rows = [
            book.admit("few", [1], RequestParams(stop_token_ids=(3,))),
            book.admit("many", [1], RequestParams(stop_token_ids=(4,) * num_stop_ids)),
        ]
        book.submit(book.batch(rows), np.array([3, 4], np.int32))
        assert book.frame().finish_reason.tolist() == [Finish.STOP, Finish.STOP, 0, 0]
