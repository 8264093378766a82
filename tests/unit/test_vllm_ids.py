"""What the plugin for vLLM gives in the place of lists of lists, and that lists it gives again are nobody's."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from asyncbook.integrations import vllm_kernels
from asyncbook.integrations.vllm_ids import ListPool, OneIdEach

IDS = [7, 1000, 30, 30, 1 << 30]


@pytest.fixture
def sampled() -> OneIdEach:
    return OneIdEach(list(IDS), np.array([0, 0, *IDS, 0], np.int32), 2)


def test_it_is_like_a_list_of_lists(sampled: OneIdEach) -> None:
    lists = [[token_id] for token_id in IDS]
    assert sampled == lists
    assert lists == sampled
    assert sampled != lists[:-1]
    assert sampled != tuple(lists)
    assert len(sampled) == len(lists)
    assert list(sampled) == lists
    assert (sampled[0], sampled[-1], sampled[1:4:2], sampled[-2:]) == (lists[0], lists[-1], lists[1:4:2], lists[-2:])
    assert repr(sampled) == repr(lists)
    assert [1000] in sampled
    assert sampled.index([30]) == 2
    assert sampled.column().tolist() == IDS
    assert sampled.column().dtype == np.int32
    with pytest.raises(TypeError, match="unhashable"):
        hash(sampled)


@pytest.mark.parametrize("index", [5, -6])
def test_there_is_no_row_beyond_the_last(sampled: OneIdEach, index: int) -> None:
    with pytest.raises(IndexError):
        sampled[index]


def test_a_row_is_the_same_list_at_every_look(sampled: OneIdEach) -> None:
    del sampled[1][0:]
    sampled[-1].append(3)
    assert sampled == [[7], [], [30], [30], [1 << 30, 3]]
    assert sampled[4] is sampled[-1]
    assert sampled[2] is not sampled[3]
    assert sampled.ids == IDS


def test_elsewhere_it_is_a_list_of_lists(sampled: OneIdEach) -> None:
    copy = pickle.loads(pickle.dumps(sampled))  # as vLLM sends it between its own processes
    assert type(copy) is list
    assert copy == sampled


def test_lists_that_nobody_holds_are_given_again() -> None:
    pool = ListPool()
    addresses = set(map(id, pool.take([1, 2, 3])))
    again = pool.take([4, 5, 6])
    assert again == [[4], [5], [6]]
    assert set(map(id, again)) == addresses


def test_lists_that_somebody_holds_are_not() -> None:
    pool = ListPool()
    held = pool.take([1, 2, 3])[1]
    second = pool.take([4, 5, 6])
    assert second == [[4], [5], [6]]
    assert held == [2]
    third = pool.take([7, 8, 9, 10])  # while all of the second are held
    assert (second, third) == ([[4], [5], [6]], [[7], [8], [9], [10]])
    holder = {"a": third[0]}
    del third
    assert pool.take([0]) == [[0]]
    assert pool.take([0] * 9) == [[0]] * 9
    assert holder == {"a": [7]}


@pytest.mark.parametrize("change", [list.clear, lambda ids: ids.append(9), lambda ids: ids.__setitem__(0, "a")])
def test_what_was_done_to_a_list_is_not_seen_again(change: Any) -> None:
    pool = ListPool()
    for ids in pool.take([1, 2, 3]):
        change(ids)
    del ids
    assert pool.take([4, 5, 6, 7]) == [[4], [5], [6], [7]]
    assert pool.take([8]) == [[8]]
    assert pool.take([]) == []


def test_lists_are_as_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vllm_kernels.lists_are_as_known()  # of the versions of CPython that the tests run with
    monkeypatch.setattr(vllm_kernels, "LIST_WORDS", 6)
    assert not vllm_kernels.lists_are_as_known()
    monkeypatch.undo()
    monkeypatch.setattr(vllm_kernels, "LIST_SIZE", 1)
    assert not vllm_kernels.lists_are_as_known()


@pytest.mark.parametrize("known", [True, False])
def test_lists_are_fetched_and_stay_as_they_are(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_kernels, "lists_are_as_known", lambda: known)
    vllm_kernels.list_fetcher.cache_clear()
    try:
        lists: list[list[int]] = [[], [1], list(range(1000)), [2] * 7]
        vllm_kernels.list_fetcher()(lists)
        vllm_kernels.list_fetcher()([])
        assert lists == [[], [1], list(range(1000)), [2] * 7]
    finally:
        vllm_kernels.list_fetcher.cache_clear()
