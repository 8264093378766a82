"""The kernels of `scatter`: each checks everything, then writes. See there for shapes and types.

A kernel returns 0, or what is wrong first: one of SHAPE to VALUE, plus NUM_KINDS times the entry.
"""

# Compiled: numba infers the types, and calls an intrinsic without its typing context.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs
# mypy: disable-error-code="call-arg,var-annotated,assignment,attr-defined"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import literal_unroll, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic, overload
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype

from asyncbook.ipc.jit import bare, generic_kernel, rule

PADDING = -1

SHAPE, COUNT, ROW, REPEATED, SPAN, VALUE = 1, 2, 3, 4, 5, 6
NUM_KINDS = 8

# Rows that do not ascend are marked in bits on the stack, this many rows at a time.
MARK_WORDS = 512
WINDOW = 64 * MARK_WORDS


# Decided by types, while a kernel is compiled


def index_type(indices):
    """Refuses what is no [n] array of int32 or int64."""


def holds(target, value):
    """Whether `target`, an array, can hold `value`."""


def num_values(values):
    """How many values there are for a column, or for all spans; -1: one scalar for all."""


def num_value_rows(values):
    """How many rows of values there are, one a column; -1: all columns get the same."""


def value_at(values, which, i):
    """The value of entry i in column `which`."""


@overload(index_type)
def _index_type(indices):
    if not isinstance(indices, types.Array) or indices.ndim != 1 or indices.dtype not in (types.int32, types.int64):
        raise TypingError("an index array is int32 or int64 of one dimension")
    return lambda indices: None


@overload(holds)
def _holds(target, value):
    dtype = target.dtype
    if dtype not in (types.int32, types.int64, types.boolean, types.float32, types.float64):
        raise TypingError("a table or column is int32, int64, bool, float32 or float64")
    if value == dtype or (isinstance(dtype, types.Float) and isinstance(value, types.Number | types.Boolean)):
        return lambda target, value: True
    if isinstance(dtype, types.Boolean) and isinstance(value, types.Integer):
        return lambda target, value: value == 0 or value == 1
    if isinstance(dtype, types.Integer) and isinstance(value, types.Boolean):
        return lambda target, value: True
    if isinstance(dtype, types.Integer) and isinstance(value, types.Integer) and value.signed:
        least, most = dtype.minval, dtype.maxval
        return lambda target, value: least <= value <= most
    raise TypingError("the array cannot hold the values")


def _value_dimensions(values):
    """0 for a scalar, 1 for [n], 2 for [columns, n]."""
    if isinstance(values, types.Number | types.Boolean):
        return 0
    if isinstance(values, types.Array) and values.ndim in (1, 2):
        return values.ndim
    raise TypingError("values are a scalar, [n] or [columns, n]")


@overload(num_values)
def _num_values(values):
    if _value_dimensions(values) == 0:
        return lambda values: -1
    if _value_dimensions(values) == 1:
        return lambda values: values.shape[0]
    return lambda values: values.shape[1]


@overload(num_value_rows)
def _num_value_rows(values):
    if _value_dimensions(values) == 2:
        return lambda values: values.shape[0]
    return lambda values: -1


@overload(value_at)
def _value_at(values, which, i):
    if _value_dimensions(values) == 0:
        return lambda values, which, i: values
    if _value_dimensions(values) == 1:
        return lambda values, which, i: values[i]
    return lambda values, which, i: values[which, i]


@intrinsic
def marks_on_stack(typing_context):
    """MARK_WORDS uint64, uninitialised, gone when the kernel returns."""

    def generate(context, builder, signature, arguments):
        words = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(64), MARK_WORDS))
        return builder.bitcast(words, ir.IntType(64).as_pointer())

    return types.CPointer(types.uint64)(), generate


@intrinsic
def matrix_at(typing_context, address, num_rows, row_size, element):
    """C-contiguous [num_rows, row_size] of a numba type at an address. Owns nothing."""

    def generate(context, builder, signature, arguments):
        address, num_rows, row_size, _ = arguments
        array_type = signature.return_type
        array = context.make_array(array_type)(context, builder)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(array_type.dtype)))
        data = builder.inttoptr(address, array.data.type)
        strides = [builder.mul(row_size, itemsize), itemsize]
        populate_array(array, data, [num_rows, row_size], strides, itemsize, None)
        return array._getvalue()

    array_type = types.Array(element.instance_type, 2, "C")
    return array_type(types.int64, types.int64, types.int64, element), generate


# Checks


@rule
def find_bad_row(rows, num_rows):
    """The code of the first entry that is out of range or names a row again, or 0. O(n), a window of rows at a time."""
    for i in range(rows.shape[0]):
        if rows[i] < 0 or rows[i] >= num_rows:
            return ROW + NUM_KINDS * i
    marks = marks_on_stack()
    for first in range(0, num_rows, WINDOW):
        for word in range((min(num_rows - first, WINDOW) + 63) >> 6):
            marks[word] = 0
        for i in range(rows.shape[0]):
            offset = np.int64(rows[i]) - first
            if 0 <= offset < WINDOW:
                bit = np.uint64(1) << np.uint64(offset & 63)
                if marks[offset >> 6] & bit:
                    return REPEATED + NUM_KINDS * i
                marks[offset >> 6] |= bit
    return 0


@rule
def check_rows(rows, num_rows):
    """0 where every row is in range and named once. Rows that ascend are right when the first and the last are."""
    n = rows.shape[0]
    is_ascending = True
    for i in range(1, n):
        is_ascending &= rows[i - 1] < rows[i]
    if is_ascending and (n == 0 or (rows[0] >= 0 and rows[n - 1] < num_rows)):
        return 0
    return find_bad_row(rows, num_rows)


@rule
def check_span(width, start, length):
    """Whether a span lies in the width. Exact for any int64, since the difference cannot wrap where it decides."""
    return (start >= 0) & (length >= 0) & (length <= width - start)


@rule
def check_spans(table, num_rows, width, rows, starts, lengths, values):
    """0 where every span lies inside the table and there is one value a position."""
    index_type(rows)
    index_type(starts)
    index_type(lengths)
    if starts.shape[0] != rows.shape[0] or lengths.shape[0] != rows.shape[0]:
        return SHAPE
    code = check_rows(rows, num_rows)
    if code != 0:
        return code
    total = np.int64(0)
    is_inside = True
    for i in range(rows.shape[0]):
        start, length = np.int64(starts[i]), np.int64(lengths[i])
        is_inside &= check_span(width, start, length)
        total += length
    if not is_inside:
        for i in range(rows.shape[0]):
            if not check_span(width, np.int64(starts[i]), np.int64(lengths[i])):
                return SPAN + NUM_KINDS * i
    if num_value_rows(values) >= 0 or (num_values(values) >= 0 and num_values(values) != total):
        return COUNT
    for i in range(abs(num_values(values))):
        if not holds(table, value_at(values, 0, i)):
            return VALUE + NUM_KINDS * i
    return 0


@rule
def check_columns(num_columns, rows, values):
    """0 where there are values for all columns, and for each of them one a row."""
    index_type(rows)
    if num_values(values) >= 0 and num_values(values) != rows.shape[0]:
        return COUNT
    if num_value_rows(values) >= 0 and num_value_rows(values) != num_columns:
        return COUNT
    return 0


@rule
def check_column(column, num_rows, values, which):
    """0 where the column has all rows and can hold its values."""
    if column.shape[0] != num_rows:
        return SHAPE
    for i in range(abs(num_values(values))):
        if not holds(column, value_at(values, which, i)):
            return VALUE + NUM_KINDS * i
    return 0


# Kernels. What was checked is not negative: unsigned indices spare the test for a place counted from the end.


@rule
def write_column(column, rows, values, which):
    for i in range(rows.shape[0]):
        column[np.uint64(rows[i])] = value_at(values, which, i)


@generic_kernel
def scatter_matrix(columns, rows, values):
    """`scatter_columns` where the columns are the rows of a matrix [columns, R]."""
    num_rows = columns.shape[1]
    code = check_columns(columns.shape[0], rows, values)
    for which in range(columns.shape[0]):
        if code == 0:
            code = check_column(columns[which], num_rows, values, which)
    if code == 0:
        code = check_rows(rows, num_rows)
    if code == 0:
        for which in range(columns.shape[0]):
            write_column(columns[which], rows, values, which)
    return code


@generic_kernel
def scatter_pair(first, second, rows, values):
    """`scatter_columns` into two arrays, which cost less as two arguments than as one tuple."""
    num_rows = first.shape[0]
    code = check_columns(2, rows, values)
    if code == 0:
        code = check_column(first, num_rows, values, 0)
    if code == 0:
        code = check_column(second, num_rows, values, 1)
    if code == 0:
        code = check_rows(rows, num_rows)
    if code == 0:
        write_column(first, rows, values, 0)
        write_column(second, rows, values, 1)
    return code


@generic_kernel
def scatter_tuple(columns, rows, values):
    """`scatter_columns` into arrays whose types may differ."""
    num_rows = columns[0].shape[0]
    code = check_columns(len(columns), rows, values)
    which = 0
    for column in literal_unroll(columns):
        if code == 0:
            code = check_column(column, num_rows, values, which)
        which += 1  # noqa: SIM113 (enumerate cannot be unrolled)
    if code == 0:
        code = check_rows(rows, num_rows)
    if code == 0:
        which = 0
        for column in literal_unroll(columns):
            write_column(column, rows, values, which)
            which += 1  # noqa: SIM113
    return code


@rule
def write_spans(table, rows, starts, lengths, values):
    taken = 0
    for i in range(rows.shape[0]):
        span = table[np.uint64(rows[i])]
        start = np.uint64(starts[i])
        for j in range(lengths[i]):
            span[start + np.uint64(j)] = value_at(values, 0, taken + j)
        taken += lengths[i]


@generic_kernel
def assign(table, rows, starts, lengths, values):
    """`assign_spans`."""
    code = check_spans(table, table.shape[0], table.shape[1], rows, starts, lengths, values)
    if code == 0:
        write_spans(table, rows, starts, lengths, values)
    return code


@rule
def assign_by_address(element, index_element, table, num_rows, width, row_stride, n, rows, starts, lengths, values):
    matrix = matrix_at(table, num_rows, row_stride, element)
    rows_at = matrix_at(rows, 1, n, index_element)[0]
    starts_at = matrix_at(starts, 1, n, index_element)[0]
    lengths_at = matrix_at(lengths, 1, n, index_element)[0]
    code = check_spans(matrix, num_rows, width, rows_at, starts_at, lengths_at, values)
    if code == 0:
        write_spans(matrix, rows_at, starts_at, lengths_at, values)
    return code


@generic_kernel
def assign_at(
    element, index_element, table, num_rows, width, row_stride, n, rows, starts, lengths, values, total
):  # fmt: skip
    """`assign_spans` by addresses."""
    return assign_by_address(
        element, index_element, table, num_rows, width, row_stride, n, rows, starts, lengths,
        matrix_at(values, 1, total, element)[0],
    )  # fmt: skip


@generic_kernel
def fill_at(element, index_element, table, num_rows, width, row_stride, n, rows, starts, lengths, value):
    """The same for one value."""
    return assign_by_address(
        element, index_element, table, num_rows, width, row_stride, n, rows, starts, lengths, value
    )


def spans_at(dtype: Any, index_dtype: Any, is_fill: bool) -> Callable[..., int]:
    """`assign_spans` by addresses of memory that is contiguous but for gaps between the table's rows, as machine code:
    `(_, _, table, num_rows, width, row_stride, n, rows, starts, lengths, values, total) -> code`. With `is_fill` the
    one value comes in the place of the values' address, and no total. `dtype`: of table and values; `index_dtype`.
    The caller answers for all of it; the first two arguments are only there to have a type."""
    element, index_element = from_dtype(np.dtype(dtype)), from_dtype(np.dtype(index_dtype))
    elements = types.NumberClass(element), types.NumberClass(index_element)
    if not is_fill:
        return bare(assign_at, *elements, *(types.int64,) * 10)
    value = types.float64 if isinstance(element, types.Float) else types.int64
    return bare(fill_at, *elements, *(types.int64,) * 8, value)


@rule
def count_ids(token_ids, ids, i):
    """v, the ids before the first padding; below 0 where one of them is no id that the table holds."""
    v = 0
    while v < ids.shape[1] and ids[i, v] != PADDING:
        if ids[i, v] < 0 or not holds(token_ids, ids[i, v]):
            return -1
        v += 1
    return v


@generic_kernel
def append(token_ids, is_token_ids, num_tokens, num_tokens_no_spec, rows, ids):
    """`append_spans`."""
    index_type(rows)
    num_rows, width, n = token_ids.shape[0], token_ids.shape[1], rows.shape[0]
    if num_tokens.shape[0] != num_rows or num_tokens_no_spec.shape[0] != num_rows or ids.shape[0] != n:
        return SHAPE
    if is_token_ids is not None and is_token_ids.shape != token_ids.shape:
        return SHAPE
    code = check_rows(rows, num_rows)
    if code != 0:
        return code
    for i in range(n):
        v = count_ids(token_ids, ids, i)
        if v < 0:
            return VALUE + NUM_KINDS * i
        start = np.int64(num_tokens_no_spec[rows[i]])
        if not check_span(width, start, v):
            return SPAN + NUM_KINDS * i
    for i in range(n):
        row = np.uint64(rows[i])
        start = np.uint64(num_tokens_no_spec[row])
        v = np.uint64(0)
        # Not a loop over a known number: that is made for long ones, and costs a few ids twice the time.
        while v < ids.shape[1] and ids[i, v] != PADDING:
            token_ids[row, start + v] = ids[i, v]
            if is_token_ids is not None:
                is_token_ids[row, start + v] = True
            v += np.uint64(1)
        num_tokens_no_spec[row] = start + v
        num_tokens[row] = start + v
    return 0
