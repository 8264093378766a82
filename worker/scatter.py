"""Batched updates for anybody's numpy arrays: several columns, ragged spans of a table, new ids appended to both.

Each function is one pass of compiled code, in place. Every index and value is checked before anything is written, in
int64: a bad one is an `InvalidBatch` that names the entry, what was expected and what came, and nothing is written.
Rows may come in any order; a row named twice is an error.

Indices (`rows`, `starts`, `lengths`) are int32 or int64 arrays of shape [n]. Tables and columns are int32, int64, bool,
float32 or float64, contiguous or strided. Values are of the array's own type, or of another whose numbers it can hold
(integers that fit, any number into floats), and must not overlap what is written.

The first call with new types compiles for a second or two, once per machine. A call keeps the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
from numba.core.errors import NumbaError
from numpy import ndarray

from asyncbook.ipc.errors import InvalidBatch
from asyncbook.worker.scatter_kernels import (
    COUNT,
    NUM_KINDS,
    PADDING,
    REPEATED,
    ROW,
    SHAPE,
    SPAN,
    VALUE,
    append,
    assign,
    scatter_matrix,
    scatter_pair,
    scatter_tuple,
)

Scalar = int | float | bool | np.generic
Columns = np.ndarray | tuple[np.ndarray, ...] | list[np.ndarray]
INDEX_TYPES = (np.dtype(np.int32), np.dtype(np.int64))
REFUSALS = (NumbaError, TypeError, ValueError, OverflowError)  # what numba raises where no kernel fits the arguments
VALUE_TYPES = tuple(np.dtype(name) for name in ("int32", "int64", "bool", "float32", "float64"))
VALUE_TYPE_NAMES = " or ".join(map(str, VALUE_TYPES))


def scatter_columns(columns: Columns, rows: np.ndarray, values: np.ndarray | Scalar) -> None:
    """`column[rows] = values` for several columns at once.

    `columns`: the rows of one array [columns, R], which costs least; or a tuple or list of arrays [R]. `rows`: int [n].
    `values`: [n], the same for every column; or [columns, n]; or one number. Raises `InvalidBatch`.
    """
    # One row costs little more than a look at the arguments: the fewer looks, the better.
    try:
        if type(columns) is ndarray:
            code = scatter_matrix(columns, rows, values)
        elif len(columns) == 2:
            first, second = columns
            code = scatter_pair(first, second, rows, values)
        else:
            code = scatter_tuple(tuple(columns), rows, values)
    except REFUSALS as error:
        _refuse_types(error, _named_columns(columns), {"rows": rows}, values)
    if code:
        _refuse_columns(code, tuple(columns), rows, values)


def assign_spans(
    table: np.ndarray, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, values: np.ndarray | Scalar
) -> None:
    """`table[rows[i], starts[i] : starts[i] + lengths[i]] = ...` for every entry i.

    `table`: [R, L]. `rows`, `starts`, `lengths`: int [n]. `values`: [sum of lengths], the spans' values one after the
    other; or one number for all. Raises `InvalidBatch`.
    """
    try:
        # numba looks at the type of an int much faster than at that of a bool.
        code = assign(table, rows, starts, lengths, +values if type(values) is bool else values)
    except REFUSALS as error:
        _refuse_types(error, {"table": table}, {"rows": rows, "starts": starts, "lengths": lengths}, values)
    if code:
        _refuse_spans(code, table, rows, starts, lengths, values)


def append_spans(
    token_ids: np.ndarray,
    is_token_ids: np.ndarray | None,
    num_tokens: np.ndarray,
    num_tokens_no_spec: np.ndarray,
    rows: np.ndarray,
    sampled_token_ids: np.ndarray,
) -> None:
    """What a step does to the arrays of a batch: row `rows[i]` gets the ids of `sampled_token_ids[i]` before its first
    -1, written behind its first `num_tokens_no_spec` ids.

    `token_ids`: int [R, L]. `is_token_ids`: bool [R, L], True for the new ids; None: there is none. `num_tokens`,
    `num_tokens_no_spec`: int [R], both become the new number of ids. `rows`: int [n]. `sampled_token_ids`: int [n, w],
    -1 pads. An id below -1, or more ids than there is room for, is an error. Raises `InvalidBatch`.
    """
    try:
        code = append(token_ids, is_token_ids, num_tokens, num_tokens_no_spec, rows, sampled_token_ids)
    except REFUSALS as error:
        targets = {"num_tokens": num_tokens, "num_tokens_no_spec": num_tokens_no_spec, "token_ids": token_ids}
        if is_token_ids is not None:
            targets["is_token_ids"] = is_token_ids
        _refuse_types(error, targets, {"rows": rows}, sampled_token_ids, "sampled_token_ids")
    if code:
        _refuse_append(code, token_ids, is_token_ids, num_tokens, num_tokens_no_spec, rows, sampled_token_ids)


# What was wrong


def _shape(array: np.ndarray) -> str:
    return str(list(array.shape))


def _refuse_rows(kind: int, i: int, rows: np.ndarray, num_rows: int) -> NoReturn:
    row = int(rows[i])
    if kind == REPEATED:
        first = int(np.flatnonzero(rows == row)[0])
        raise InvalidBatch(f"rows[{i}] is {row}, which rows[{first}] is as well, expected every row once")
    assert kind == ROW
    raise InvalidBatch(f"rows[{i}] is {row}, expected 0 to {num_rows - 1}")


def _refuse_columns(code: int, columns: tuple[np.ndarray, ...], rows: np.ndarray, values: Any) -> NoReturn:
    i, kind = divmod(code, NUM_KINDS)
    if kind == SHAPE:
        raise InvalidBatch(f"columns of {[len(column) for column in columns]} rows, expected the same number in each")
    if kind == COUNT:
        expected = f"[{rows.size}] or [{len(columns)}, {rows.size}]"
        raise InvalidBatch(f"values have shape {_shape(values)}, expected {expected} for {rows.size} rows")
    if kind == VALUE:
        value = np.atleast_1d(values)[..., i].tolist()
        raise InvalidBatch(f"the value of entry {i} is {value}, expected what {_dtypes(columns)} can hold")
    _refuse_rows(kind, i, rows, len(columns[0]))


def _refuse_spans(
    code: int, table: np.ndarray, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, values: Any
) -> NoReturn:
    i, kind = divmod(code, NUM_KINDS)
    if kind == SHAPE:
        shapes = f"{_shape(rows)}, {_shape(starts)} and {_shape(lengths)}"
        raise InvalidBatch(f"rows, starts and lengths have shapes {shapes}, expected the same")
    if kind == SPAN:
        came = f"start {starts[i]} and length {lengths[i]}"
        raise InvalidBatch(f"entry {i} (row {rows[i]}) has {came}, expected a span inside 0 to {table.shape[1]}")
    if kind == COUNT:
        total = int(lengths.sum())
        raise InvalidBatch(f"values have shape {_shape(values)}, expected [{total}], the sum of lengths")
    if kind == VALUE:
        value = np.asarray(values).reshape(-1)[i]
        raise InvalidBatch(f"values[{i}] is {value}, expected what {table.dtype} can hold")
    _refuse_rows(kind, i, rows, len(table))


def _refuse_append(
    code: int,
    token_ids: np.ndarray,
    is_token_ids: np.ndarray | None,
    num_tokens: np.ndarray,
    num_tokens_no_spec: np.ndarray,
    rows: np.ndarray,
    ids: np.ndarray,
) -> NoReturn:
    i, kind = divmod(code, NUM_KINDS)
    if kind == SHAPE:
        mask = "" if is_token_ids is None else f", is_token_ids {_shape(is_token_ids)}"
        tables = f"token_ids {_shape(token_ids)}{mask}"
        columns = f"num_tokens {_shape(num_tokens)}, num_tokens_no_spec {_shape(num_tokens_no_spec)}"
        raise InvalidBatch(f"{tables}, {columns}, rows {_shape(rows)} and sampled_token_ids {_shape(ids)} do not fit")
    if kind == VALUE:
        expected = f"ids that {token_ids.dtype} can hold, or {PADDING}"
        raise InvalidBatch(f"sampled_token_ids[{i}] (row {rows[i]}) is {ids[i].tolist()}, expected {expected}")
    if kind == SPAN:
        came = f"{num_tokens_no_spec[rows[i]]} ids and gets {ids[i].tolist()}"
        raise InvalidBatch(f"entry {i} (row {rows[i]}) has {came}, expected 0 to {token_ids.shape[1]} in all")
    _refuse_rows(kind, i, rows, len(token_ids))


def _named_columns(columns: Any) -> dict[str, Any]:
    if isinstance(columns, tuple | list) and columns:
        return {f"columns[{which}]": column for which, column in enumerate(columns)}
    return {"columns": columns}


def _refuse_types(
    error: Exception, targets: dict[str, Any], indices: dict[str, Any], values: Any, values_name: str = "values"
) -> NoReturn:
    """Says which argument no kernel can be made for; an error that is not about types is raised as it came."""
    for name, target in targets.items():
        if not isinstance(target, np.ndarray) or target.dtype not in VALUE_TYPES:
            raise InvalidBatch(f"{name} is {_type(target)}, expected an array of {VALUE_TYPE_NAMES}")
        ndim = 2 if name in ("table", "token_ids", "is_token_ids", "columns") else 1
        if target.ndim != ndim:
            raise InvalidBatch(f"{name} has shape {_shape(target)}, expected {ndim} dimensions")
        if not target.flags.writeable:
            raise InvalidBatch(f"{name} is read-only")
    for name, array in indices.items():
        if not isinstance(array, np.ndarray) or array.dtype not in INDEX_TYPES or array.ndim != 1:
            raise InvalidBatch(f"{name} is {_type(array)}, expected an array of int32 or int64 of shape [n]")
    if not isinstance(values, np.ndarray | Scalar):
        raise InvalidBatch(f"{values_name} is {_type(values)}, expected an array or a number")
    expected = f"what {_dtypes(targets.values())} can hold"
    raise InvalidBatch(f"{values_name} is {_type(values)}, expected {expected}") from error


def _type(value: Any) -> str:
    return f"{value.dtype} {_shape(value)}" if isinstance(value, np.ndarray) else type(value).__name__


def _dtypes(arrays: Iterable[np.ndarray]) -> str:
    return " and ".join(sorted({str(array.dtype) for array in arrays}))
