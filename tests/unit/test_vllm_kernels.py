"""The kernels of the plugin for vLLM against obvious loops. They need no vLLM; `tests/vllm` tests them inside it."""

from __future__ import annotations

import numpy as np
import pytest

from asyncbook.integrations.vllm_book import ids_of, padded
from asyncbook.integrations.vllm_ids import OneIdEach
from asyncbook.integrations.vllm_kernels import MAX_STOP_IDS, find_plain, runner_kernels

ROWS, LENGTH, VOCAB_SIZE = 7, 12, 20


class Batch:
    """Arrays as vLLM has them, a few ids in each row."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.token_ids = np.zeros((ROWS, LENGTH), np.int32)
        self.is_token_ids = np.zeros((ROWS, LENGTH), np.bool_)
        self.num_tokens = rng.integers(0, 6, ROWS).astype(np.int32)
        self.is_discarded = rng.random(ROWS) < 0.3

    def known(self, flat: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """What the kernels are told once."""
        arrays = (self.is_discarded, self.token_ids, self.is_token_ids, self.num_tokens)
        addresses = [array.ctypes.data for array in arrays]
        return np.array([*addresses, LENGTH, VOCAB_SIZE, flat.ctypes.data, ends.ctypes.data], np.int64)

    def append(self, row: int, ids: list[int]) -> None:
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(ids)] = ids
        self.is_token_ids[row, start : start + len(ids)] = True
        self.num_tokens[row] += len(ids)

    def equals(self, other: Batch) -> bool:
        return all(np.array_equal(vars(self)[name], vars(other)[name]) for name in vars(self))


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_take_sampled(seed: int, width: int, start: int) -> None:
    rng = np.random.default_rng([seed, width])
    mine, expected = (Batch(np.random.default_rng(seed)) for _ in range(2))
    sampled = rng.integers(-1 if width > 1 else 0, VOCAB_SIZE + (3 if width > 1 else 0), (ROWS, width)).astype(np.int32)
    flat, ends = np.full(start + ROWS * width + 1, 77, np.int32), np.zeros(ROWS, np.int64)
    known = mine.known(flat, ends)
    outputs: list[list[int]] = [[1] * row for row in range(ROWS)]  # the first has no memory of its own
    code = runner_kernels()[0](sampled.ctypes.data, start, ROWS, width, known.ctypes.data, id(outputs))
    assert code == expected.is_discarded.sum()
    assert outputs == [[1] * row for row in range(ROWS)]
    assert flat[:start].tolist() == [77] * start
    assert flat[-1] == 77
    flat = flat[start:]
    starts = [0, *ends.tolist()]
    for row in range(ROWS):
        ids = [] if expected.is_discarded[row] else sampled[row].tolist()
        if width > 1:
            ids = [token_id for token_id in ids if token_id != -1 and token_id < VOCAB_SIZE]
        expected.append(row, ids)
        assert flat[starts[row] : starts[row + 1]].tolist() == ids
    assert mine.equals(expected)


@pytest.mark.parametrize("seed", range(5))
def test_take_placeholders(seed: int) -> None:
    mine, expected = (Batch(np.random.default_rng(seed)) for _ in range(2))
    known = mine.known(np.zeros(0, np.int32), np.zeros(0, np.int64))
    outputs: list[list[int]] = [[] for _ in range(ROWS)]
    code = runner_kernels()[1](ROWS - 1, known.ctypes.data, id(outputs))
    assert code == expected.is_discarded[: ROWS - 1].sum()
    for row in range(ROWS - 1):
        expected.append(row, [] if expected.is_discarded[row] else [-1])
    assert mine.equals(expected)


@pytest.mark.parametrize("which", ["sampled", "placeholders"])
def test_a_row_without_room_is_named_and_nothing_is_written(which: str) -> None:
    mine, expected = (Batch(np.random.default_rng(1)) for _ in range(2))
    for batch in (mine, expected):
        batch.is_discarded[:] = False
        batch.num_tokens[3] = LENGTH
    sampled, flat, ends = np.ones((ROWS, 1), np.int32), np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int64)
    known = mine.known(flat, ends)
    if which == "sampled":
        code = runner_kernels()[0](sampled.ctypes.data, 0, ROWS, 1, known.ctypes.data, 0)
    else:
        code = runner_kernels()[1](ROWS, known.ctypes.data, 0)
    assert -1 - code == 3
    assert mine.equals(expected)


# Of a row with 10 tokens, in blocks of 8, that ends at 14: what comes, and whether it only grows.
@pytest.mark.parametrize(
    ("num_tokens", "ids", "is_plain"),
    [
        (10, [5], True),
        (10, [5, 5, 5], True),
        (10, [5, 5, 5, 5], False),  # its length ends it
        (10, [], False),
        (10, [9], False),  # the end of the sequence
        (10, [5, 11], False),  # a stop id
        (10, [12], True),  # another row's stop id
        (7, [5], False),  # a block is full
        (8, [5], False),  # its last token is computed only now
        (9, [5], True),
    ],
)
def test_find_plain(num_tokens: int, ids: list[int], is_plain: bool) -> None:
    columns = [np.array([3, value], np.int32) for value in (num_tokens, 14, 9)]
    stops = np.full((2, MAX_STOP_IDS), -1, np.int32)
    stops[0, 0], stops[1, :2] = 12, (10, 11)
    slots, counts = np.array([-1, 1], np.int32), np.array([1, len(ids)], np.int32)
    found = np.full(2, 7, np.uint8)
    number = find_plain(slots, counts, np.array([5, *ids], np.int32), 8, *columns, stops, found)
    assert (number, found.tolist()) == (int(is_plain), [0, int(is_plain)])
    assert columns[0].tolist() == [3, num_tokens + len(ids) * is_plain]


@pytest.mark.parametrize("index", [[], [2], [3, 0, 1]])
def test_ids_of(index: list[int]) -> None:
    lists = [[5], [6], [7], [8]]
    expected = np.array([lists[row] for row in index], np.int32).reshape(-1, 1)
    for sampled in (lists, OneIdEach([5, 6, 7, 8], np.array([0, 5, 6, 7, 8], np.int32), 1)):
        ids = ids_of(sampled, index)
        assert np.array_equal(ids, expected)
        assert ids.dtype == np.int32
        assert ids.flags.c_contiguous
    assert ids_of([[1, 2], [], [3]], [2, 0]).tolist() == [[3, -1], [1, 2]]


def test_padded() -> None:
    assert padded([[1], [2]]).tolist() == [[1], [2]]
    assert padded([[1, 2], [], [3]]).tolist() == [[1, 2], [-1, -1], [3, -1]]
    assert padded([[], []]).tolist() == [[-1], [-1]]
    assert padded([]).shape == (0, 1)
