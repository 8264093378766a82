"""Calls on which the books, or a book and the reference, once differed; each found by chance, cut down by hand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from asyncbook import RequestParams, Row
from tests.property.compare import Refused
from tests.property.operations import CONFIGS
from tests.property.trio import Trio, TrioBatch, TrioPool

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
