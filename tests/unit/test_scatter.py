"""Batched updates of plain arrays, against loops over their entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbook.ipc.errors import InvalidBatch
from asyncbook.worker.scatter import append_spans, assign_spans, scatter_columns
from asyncbook.worker.scatter_kernels import WINDOW

DTYPES = [np.int32, np.int64, np.bool_, np.float32]
# The first call with new types compiles, which takes a second.
compiled = settings(deadline=None, max_examples=40)


def ints(*values: int, dtype: type = np.int64) -> np.ndarray:
    return np.array(values, dtype)


def contiguous(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.zeros(shape, dtype)


def row_strided(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Every second row, from an offset, of a table that is wider."""
    whole = np.zeros((2 * shape[0] + 1, *(size + 3 for size in shape[1:])), dtype)
    return whole[1::2][(slice(None), *(slice(2, -1) for _ in shape[1:]))]


def transposed(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.zeros(shape[::-1], dtype).T


# Every combination is a compilation: these have each type and each layout somewhere.
TABLES = [
    (np.int32, np.int64, contiguous),
    (np.float32, np.int64, row_strided),
    (np.bool_, np.int32, transposed),
]
COLUMNS = [
    ("matrix", 3, np.int64, contiguous),
    ("matrix", 1, np.int32, row_strided),
    ("list", 2, np.int32, row_strided),
    ("tuple", 4, np.int64, contiguous),
]


def some_values(rng: np.random.Generator, shape: tuple[int, ...] | int, dtype: type) -> np.ndarray:
    return rng.integers(0, 2 if dtype is np.bool_ else 1000, shape).astype(dtype)


@dataclass
class Spans:
    """Entries that fit a table of [num_rows, width]."""

    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


def some_spans(rng: np.random.Generator, num_rows: int, width: int, n: int, dtype: type = np.int64) -> Spans:
    rows = rng.permutation(num_rows)[:n]
    ends = np.sort(rng.integers(0, width + 1, (n, 2)), axis=1)
    return Spans(rows.astype(dtype), ends[:, 0].astype(dtype), (ends[:, 1] - ends[:, 0]).astype(dtype))


def assign_slowly(table: np.ndarray, spans: Spans, values: np.ndarray | float) -> None:
    taken = 0
    for row, start, length in zip(spans.rows.tolist(), spans.starts.tolist(), spans.lengths.tolist(), strict=True):
        for position in range(length):
            table[row, start + position] = values[taken + position] if isinstance(values, np.ndarray) else values
        taken += length


def append_slowly(batch: dict[str, np.ndarray], rows: np.ndarray, sampled: np.ndarray) -> None:
    for row, ids in zip(rows.tolist(), sampled.tolist(), strict=True):
        for token_id in ids[: ids.index(-1)] if -1 in ids else ids:
            position = batch["num_tokens_no_spec"][row]
            batch["token_ids"][row, position] = token_id
            batch["is_token_ids"][row, position] = True
            batch["num_tokens_no_spec"][row] += 1
        batch["num_tokens"][row] = batch["num_tokens_no_spec"][row]


def assert_refused(message: str, function: Callable[..., None], *arguments: object) -> None:
    """The call is refused with this in its words, and leaves every array as it was."""
    arrays = [a for argument in arguments for a in (argument if isinstance(argument, tuple) else (argument,))]
    before = [array.copy() for array in arrays if isinstance(array, np.ndarray)]
    with pytest.raises(InvalidBatch, match=message):
        function(*arguments)
    for array, old in zip([a for a in arrays if isinstance(a, np.ndarray)], before, strict=True):
        assert np.array_equal(array, old)


class TestScatterColumns:
    @compiled
    @given(
        seed=st.integers(0, 2**32),
        num_rows=st.integers(1, 40),
        kind=st.sampled_from(COLUMNS),
        per_column=st.booleans(),
    )
    def test_equals_a_loop(self, seed, num_rows, kind, per_column) -> None:
        form, num_columns, index_dtype, make = kind
        rng = np.random.default_rng(seed)
        n = int(rng.integers(0, num_rows + 1))
        rows = rng.permutation(num_rows)[:n].astype(index_dtype)
        values = some_values(rng, (num_columns, n) if per_column else n, np.int32)
        if form == "matrix":
            columns = make((num_columns, num_rows), np.int32)
        else:
            columns = tuple(make((num_rows,), np.int32) for _ in range(num_columns))
        expected = np.zeros((num_columns, num_rows), np.int32)
        for column in range(num_columns):
            for i, row in enumerate(rows):
                expected[column, row] = values[column, i] if per_column else values[i]
        scatter_columns(list(columns) if form == "list" else columns, rows, values)
        assert np.array_equal(np.stack(list(columns)), expected)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_dtype_takes_arrays_and_one_number(self, dtype) -> None:
        columns = np.zeros(5, dtype), np.zeros(5, dtype)
        scatter_columns(columns, ints(4, 0), some_values(np.random.default_rng(0), 2, dtype))
        scatter_columns(columns, ints(2), 1)
        assert columns[0][2] == columns[1][2] == 1

    def test_columns_of_several_types(self) -> None:
        columns = np.zeros(3, np.int32), np.zeros(3, np.bool_), np.zeros(3, np.float32)
        scatter_columns(columns, ints(2, 1), ints(1, 0))
        assert [column.tolist() for column in columns] == [[0, 0, 1], [False, False, True], [0.0, 0.0, 1.0]]

    def test_no_entries(self) -> None:
        scatter_columns((np.zeros(3, np.int32), np.zeros(3, np.int32)), ints(), ints())

    @pytest.mark.parametrize("num_columns", [2, 4])
    def test_a_bad_row_is_named(self, num_columns) -> None:
        columns = tuple(np.zeros(5, np.int32) for _ in range(num_columns))
        for form in (columns, np.stack(columns)):
            values = np.ones(3, np.int32)
            assert_refused(r"rows\[1\] is 5, expected 0 to 4", scatter_columns, form, ints(0, 5, 1), values)
            assert_refused(r"rows\[0\] is -1, expected 0 to 4", scatter_columns, form, ints(-1, 3, 1), values)
            assert_refused(r"rows\[2\] is 3, which rows\[0\] is", scatter_columns, form, ints(3, 1, 3), values)

    def test_values_that_do_not_fit(self) -> None:
        pair, rows = (np.zeros(5, np.int32), np.zeros(5, np.int32)), ints(0, 4)
        assert_refused(r"entry 1 is 2147483648, expected what int32", scatter_columns, pair, rows, ints(1, 2**31))
        assert_refused(r"entry 0 is -2147483649, expected", scatter_columns, pair, rows, -(2**31) - 1)
        assert_refused(r"shape \[3\], expected \[2\] or \[2, 2\]", scatter_columns, pair, rows, ints(1, 2, 3))
        for shape in ((3, 2), (1, 2), (2, 3)):
            assert_refused("expected", scatter_columns, pair, rows, np.ones(shape, np.int32))

    def test_columns_that_do_not_fit(self) -> None:
        a = np.zeros(5, np.int32)
        assert_refused(r"columns of \[5, 4\] rows", scatter_columns, (a, a[:4].copy()), ints(0), 1)
        assert_refused("columns is tuple", scatter_columns, (), ints(0), 1)

    def test_types_that_no_kernel_takes(self) -> None:
        a, b, locked = (np.zeros(5, np.int32) for _ in range(3))
        locked.flags.writeable = False
        assert_refused(r"columns\[1\] is read-only", scatter_columns, (a, locked), ints(0), 1)
        assert_refused("rows is list", scatter_columns, (a, b), [0], 1)
        assert_refused(
            r"values is float64 \[1\], expected what int32 can hold", scatter_columns, (a, b), ints(0), np.ones(1)
        )


class TestRowsNamedTwice:
    @compiled
    @given(seed=st.integers(0, 2**32), num_rows=st.integers(2, 500))
    def test_found_wherever_they_are(self, seed, num_rows) -> None:
        rng = np.random.default_rng(seed)
        rows = rng.permutation(num_rows)[: int(rng.integers(2, num_rows + 1))]
        first, second = np.sort(rng.choice(rows.size, 2, replace=False)).tolist()
        rows[second] = rows[first]
        table = np.zeros((num_rows, 2), np.int32)
        message = rf"rows\[{second}\] is {rows[first]}, which rows\[{first}\]"
        assert_refused(message, assign_spans, table, rows, np.zeros_like(rows), np.ones_like(rows), 7)

    @pytest.mark.parametrize("row", [0, WINDOW - 1, WINDOW, 2 * WINDOW + 5])
    def test_found_beyond_the_marks_of_one_window(self, row) -> None:
        columns = np.zeros((2, 2 * WINDOW + 10), np.int32)
        others = np.setdiff1d(np.arange(0, columns.shape[1], 7), [row])
        rows = np.concatenate([[row], others[::-1], [row]])
        assert_refused(rf"rows\[{rows.size - 1}\] is {row}", scatter_columns, columns, rows, 1)
        scatter_columns(columns, rows[:-1], 1)
        assert columns.sum() == 2 * (rows.size - 1)


class TestAssignSpans:
    @compiled
    @given(
        seed=st.integers(0, 2**32),
        num_rows=st.integers(1, 30),
        width=st.integers(1, 40),
        kind=st.sampled_from(TABLES),
        is_fill=st.booleans(),
    )
    def test_equals_a_loop(self, seed, num_rows, width, kind, is_fill) -> None:
        dtype, index_dtype, make = kind
        rng = np.random.default_rng(seed)
        spans = some_spans(rng, num_rows, width, int(rng.integers(0, num_rows + 1)), index_dtype)
        values = 1 if is_fill else some_values(rng, int(spans.lengths.sum()), dtype)
        table, expected = make((num_rows, width), dtype), np.zeros((num_rows, width), dtype)
        assign_slowly(expected, spans, values)
        assign_spans(table, spans.rows, spans.starts, spans.lengths, values)
        assert np.array_equal(table, expected)

    def test_leaves_what_lies_around_a_strided_table(self) -> None:
        whole = np.zeros((6, 10), np.int32)
        assign_spans(whole[1::2, 2:7], ints(2, 0), ints(0, 3), ints(5, 2), 9)
        expected = np.zeros((6, 10), np.int32)
        expected[5, 2:7] = expected[1, 5:7] = 9
        assert np.array_equal(whole, expected)

    def test_the_end_of_the_table(self) -> None:
        table = np.zeros((4, 8), np.int32)
        assign_spans(table, ints(3, 0), ints(7, 8), ints(1, 0), ints(5))
        assert table[3, 7] == 5
        assert table.sum() == 5

    def test_values_of_another_type_that_fit(self) -> None:
        table, mask = np.zeros((2, 3), np.int32), np.zeros((2, 3), np.bool_)
        assign_spans(table, ints(1), ints(0), ints(2), ints(2**31 - 1, -(2**31)))
        assign_spans(mask, ints(1), ints(0), ints(2), ints(1, 0))
        assert table[1].tolist() == [2**31 - 1, -(2**31), 0]
        assert mask[1].tolist() == [True, False, False]

    @pytest.mark.parametrize(
        ("start", "length"),
        [(-1, 1), (8, 1), (7, 2), (0, 9), (0, -1), (9, 0), (2**63 - 1, 2**63 - 1), (-(2**63), 1), (1, 2**63 - 1),
         (-(2**63), -(2**63)), (2**32, 1)],
    )  # fmt: skip
    def test_a_span_outside_is_named(self, start, length) -> None:
        table = np.zeros((4, 8), np.int32)
        message = rf"entry 1 \(row 3\) has start {start} and length {length}, expected a span inside 0 to 8"
        assert_refused(message, assign_spans, table, ints(0, 3), ints(2, start), ints(1, length), 5)

    def test_other_mistakes_are_named(self) -> None:
        table = np.zeros((4, 8), np.int32)
        rows, starts, lengths = ints(0, 3), ints(1, 2), ints(2, 1)
        assert_refused(r"rows\[1\] is 4, expected 0 to 3", assign_spans, table, ints(0, 4), starts, lengths, 1)
        assert_refused(r"rows\[1\] is 0, which rows\[0\]", assign_spans, table, ints(0, 0), starts, lengths, 1)
        assert_refused(r"shape \[2\], expected \[3\]", assign_spans, table, rows, starts, lengths, ints(1, 2))
        assert_refused(r"shape \[1, 3\]", assign_spans, table, rows, starts, lengths, np.ones((1, 3), np.int32))
        assert_refused(r"values\[2\] is 4294967296", assign_spans, table, rows, starts, lengths, ints(1, 2, 2**32))
        assert_refused("expected the same", assign_spans, table, rows, starts, ints(1), 1)
        assert_refused(r"table has shape \[8\]", assign_spans, table[0], rows, starts, lengths, 1)
        assert_refused("table is int16", assign_spans, table.astype(np.int16), rows, starts, lengths, 1)
        assert_refused("starts is float64", assign_spans, table, rows, starts.astype(float), lengths, 1)
        assert_refused("values is NoneType", assign_spans, table, rows, starts, lengths, None)


class TestAppendSpans:
    @compiled
    @given(
        seed=st.integers(0, 2**32),
        num_rows=st.integers(1, 30),
        width=st.integers(6, 40),
        ids=st.integers(1, 6),
        kind=st.sampled_from(TABLES[:3]),
    )
    def test_equals_a_loop(self, seed, num_rows, width, ids, kind) -> None:
        _, index_dtype, make = kind
        dtype = np.int64 if index_dtype is np.int32 else np.int32
        rng = np.random.default_rng(seed)
        n = int(rng.integers(0, num_rows + 1))
        rows = rng.permutation(num_rows)[:n]
        sampled = rng.integers(0, 2**31, (n, ids)).astype(dtype)
        sampled[np.arange(ids) >= rng.integers(0, ids + 1, n)[:, None]] = -1
        batch = {
            "token_ids": make((num_rows, width), np.int32),
            "is_token_ids": make((num_rows, width), np.bool_),
            "num_tokens": np.full(num_rows, 99, np.int32),
            "num_tokens_no_spec": rng.integers(0, width - ids + 1, num_rows).astype(np.int32),
        }
        expected = {name: np.ascontiguousarray(array) for name, array in batch.items()}
        expected = {name: array.copy() for name, array in expected.items()}
        append_slowly(expected, rows, sampled)
        append_spans(**batch, rows=rows.astype(index_dtype), sampled_token_ids=sampled)
        for name, array in batch.items():
            assert np.array_equal(array, expected[name]), name

    def test_without_a_mask(self) -> None:
        token_ids, num_tokens, no_spec = np.zeros((3, 4), np.int32), np.zeros(3, np.int32), np.zeros(3, np.int32)
        append_spans(token_ids, None, num_tokens, no_spec, ints(2), ints(7, 8, dtype=np.int32)[None])
        assert token_ids[2].tolist() == [7, 8, 0, 0]
        assert num_tokens.tolist() == no_spec.tolist() == [0, 0, 2]

    def test_mistakes_are_named(self) -> None:
        token_ids, mask = np.zeros((3, 4), np.int32), np.zeros((3, 4), np.bool_)
        num_tokens, no_spec = np.zeros(3, np.int32), ints(0, 3, -5, dtype=np.int32)

        def assert_append_refused(message: str, rows: np.ndarray, *ids: list[int]) -> None:
            sampled = np.array(ids, np.int64)
            assert_refused(message, append_spans, token_ids, mask, num_tokens, no_spec, rows, sampled)

        full = r"entry 1 \(row 1\) has 3 ids and gets \[6, 7\], expected 0 to 4"
        assert_append_refused(full, ints(0, 1), [5, -1], [6, 7])
        assert_append_refused(r"entry 0 \(row 2\) has -5 ids", ints(2), [5])
        assert_append_refused(r"sampled_token_ids\[1\] \(row 1\) is \[-7, -1\]", ints(0, 1), [5, -1], [-7, -1])
        assert_append_refused(rf"sampled_token_ids\[0\] \(row 0\) is \[{2**31}\]", ints(0), [2**31])
        assert_append_refused(r"rows\[1\] is 3", ints(0, 3), [5], [6])
        assert_append_refused(r"rows\[1\] is 0, which", ints(0, 0), [5], [6])
        assert_append_refused("do not fit", ints(0, 1), [5])
        mask = np.zeros((3, 5), np.bool_)
        assert_append_refused(r"is_token_ids \[3, 5\]", ints(0), [5])


def test_places_beyond_32_bits(tmp_path: Path) -> None:
    """10,000 x 131,072 positions: 5 GB of table, nearly all of it a hole in a file."""
    num_rows, width = 10_000, 131_072
    table = np.asarray(np.memmap(tmp_path / "table", np.int32, "w+", shape=(num_rows, width)))
    rows = ints(9_999, 0, 8_191, 8_192, 4_096, 4_095)
    starts = ints(width - 3, 0, width - 1, 0, 5, width - 2)
    lengths = ints(3, 2, 1, 1, 0, 2)
    assign_spans(table, rows, starts, lengths, np.arange(1, 10, dtype=np.int32))
    taken = 0
    for row, start, length in zip(rows, starts, lengths, strict=True):
        assert table[row, start : start + length].tolist() == list(range(taken + 1, taken + length + 1))
        assert table[row, max(start - 2, 0) : start].sum() == 0
        assert table[row, start + length : start + length + 2].sum() == 0
        taken += length
    with pytest.raises(InvalidBatch, match=r"entry 0 \(row 9999\) has start 131070 and length 3"):
        assign_spans(table, rows, starts + ints(1, 0, 0, 0, 0, 0), lengths, 1)
    no_spec, num_tokens = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    no_spec[rows] = starts
    append_spans(table, None, num_tokens, no_spec, rows.astype(np.int32), np.full((rows.size, 1), 77, np.int32))
    assert (table[rows, starts] == 77).all()
