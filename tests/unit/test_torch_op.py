"""The torch operators, against the function on numpy arrays that `test_scatter` checks."""

from __future__ import annotations

import numpy as np
import pytest

from asyncbook.ipc.errors import InvalidBatch
from asyncbook.worker.scatter import assign_spans

torch = pytest.importorskip("torch")

from asyncbook.device import operators as device  # noqa: E402

ops = torch.ops.asyncbook
DTYPES = list(device.DTYPES)
ROWS, STARTS, LENGTHS = [3, 0, 4], [1, 2, 6], [2, 3, 2]


def ints(values: list[int], dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def entries(dtype=torch.int64):
    return ints(ROWS, dtype), ints(STARTS, dtype), ints(LENGTHS, dtype)


def some_values(dtype):
    return torch.tensor([1, 0, 1, 1, 0, 1, 1], dtype=dtype)


def contiguous(dtype):
    return torch.zeros(5, 8, dtype=dtype)


def row_strided(dtype):
    return torch.zeros(11, 12, dtype=dtype)[1::2, 3:11]


def transposed(dtype):
    return torch.zeros(8, 5, dtype=dtype).t()


def expected_of(values) -> np.ndarray:
    expected = np.zeros((5, 8), np.int64)
    plain = values.to(torch.int64).numpy() if isinstance(values, torch.Tensor) else values
    assign_spans(expected, np.array(ROWS), np.array(STARTS), np.array(LENGTHS), plain)
    return expected


# Each type is a compilation, and each other layout another one: one of them is enough.
@pytest.mark.parametrize(
    ("dtype", "make"), [(d, contiguous) for d in DTYPES] + [(torch.int32, row_strided), (torch.bool, transposed)]
)
def test_assigns_values_and_one_number(dtype, make) -> None:
    tensor, values = make(dtype), some_values(dtype)
    ops.assign_spans_(tensor, *entries(), values)
    assert np.array_equal(tensor.to(torch.int64).numpy(), expected_of(values))
    tensor = make(dtype)
    ops.fill_spans_(tensor, *entries(), 1)
    assert np.array_equal(tensor.to(torch.int64).numpy(), expected_of(1))


def test_writes_nothing_beside_a_strided_tensor() -> None:
    whole = torch.zeros(11, 12, dtype=torch.int32)
    ops.fill_spans_(whole[1::2, 3:11], *entries(), 1)
    assert whole.sum() == sum(LENGTHS)
    assert whole[::2].sum() == whole[:, :3].sum() == whole[:, 11:].sum() == 0


@pytest.mark.parametrize("value", [True, 1, 1.0])
def test_one_number_of_any_kind_in_a_float_tensor(value) -> None:
    tensor = contiguous(torch.float32)
    ops.fill_spans_(tensor, *entries(), value)
    assert tensor.sum() == sum(LENGTHS)


def test_one_bool_in_a_mask() -> None:
    tensor = contiguous(torch.bool)
    ops.fill_spans_(tensor, *entries(), True)
    ops.fill_spans_(tensor, ints([3]), ints([1]), ints([1]), False)
    assert tensor.sum() == sum(LENGTHS) - 1


def test_unusual_indices_and_values() -> None:
    """int32, mixed, and strided ones do what int64 ones do; so do values of another type that fit."""
    strided = [torch.stack([index, index], dim=1)[:, 0] for index in entries()]
    mixed = ints(ROWS, torch.int32), ints(STARTS), ints(LENGTHS, torch.int32)
    values = some_values(torch.int32)
    strided_values = torch.stack([values, values], dim=1)[:, 0]
    for index, written in (
        (entries(torch.int32), values),
        (mixed, values),
        (strided, strided_values),
        (entries(), values.to(torch.int64)),
    ):
        tensor = contiguous(torch.int32)
        ops.assign_spans_(tensor, *index, written)
        assert np.array_equal(tensor.numpy(), expected_of(values))


def test_no_entries() -> None:
    tensor, none = contiguous(torch.int32), ints([])
    ops.assign_spans_(tensor, none, none, none, ints([], torch.int32))
    ops.fill_spans_(tensor, none, none, none, 1)
    assert not tensor.any()


def test_shares_memory_with_numpy() -> None:
    array = np.zeros((5, 8), np.int32)
    ops.fill_spans_(torch.from_numpy(array), *entries(), 7)
    assert array.sum() == 7 * sum(LENGTHS)


@pytest.mark.parametrize(
    ("rows", "starts", "lengths", "message"),
    [
        ([3, 5], [0, 0], [1, 1], r"rows\[1\] is 5, expected 0 to 4"),
        ([-1, 2], [0, 0], [1, 1], r"rows\[0\] is -1"),
        ([3, 3], [0, 4], [1, 1], r"rows\[1\] is 3, which rows\[0\]"),
        ([3, 1], [0, 7], [1, 2], r"entry 1 \(row 1\) has start 7 and length 2"),
        ([3, 1], [0, -(2**63)], [1, 2**63 - 1], r"entry 1 \(row 1\) has start -9223372036854775808"),
        ([3, 1], [0, 0], [1], "expected the same"),
    ],
)
def test_a_bad_entry_is_named_and_nothing_is_written(rows, starts, lengths, message) -> None:
    values = torch.ones(sum(lengths) % 4, dtype=torch.int32)
    for make in (contiguous, transposed):
        tensor = make(torch.int32)
        with pytest.raises(InvalidBatch, match=message):
            ops.fill_spans_(tensor, ints(rows), ints(starts), ints(lengths), 1)
        with pytest.raises(InvalidBatch, match=message):
            ops.assign_spans_(tensor, ints(rows), ints(starts), ints(lengths), values)
        assert not tensor.any()


def test_values_that_do_not_fit() -> None:
    tensor = contiguous(torch.int32)
    with pytest.raises(InvalidBatch, match=r"shape \[6\], expected \[7\]"):
        ops.assign_spans_(tensor, *entries(), torch.ones(6, dtype=torch.int32))
    with pytest.raises(InvalidBatch, match=r"values\[0\] is 2147483648"):
        ops.fill_spans_(tensor, *entries(), 2**31)
    with pytest.raises(InvalidBatch, match="values is float, expected what int32 can hold"):
        ops.fill_spans_(tensor, *entries(), 1.5)
    with pytest.raises(InvalidBatch, match=r"values\[0\] is 2, expected what bool"):
        ops.fill_spans_(contiguous(torch.bool), *entries(), 2)
    assert not tensor.any()


def test_tensors_that_cannot_be_written() -> None:
    for tensor, message in (
        (torch.zeros(5, 8, dtype=torch.bfloat16), "tensor is torch.bfloat16"),
        (torch.zeros(40, dtype=torch.int32), r"tensor has shape \[40\]"),
        (torch.zeros(1, 8, dtype=torch.int32).expand(5, 8), "expanded"),
        (torch.zeros(5, 8, requires_grad=True), "requires grad"),
    ):
        with pytest.raises(InvalidBatch, match=message):
            ops.fill_spans_(tensor, *entries(), 1)
        assert not tensor.any()


def test_a_parameter_is_written_where_no_gradient_is_asked_for() -> None:
    tensor = torch.zeros(5, 8, requires_grad=True)
    with torch.no_grad():
        ops.fill_spans_(tensor, *entries(), 1)
    assert tensor.sum() == sum(LENGTHS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype) -> None:
    for tensor in (contiguous(dtype), row_strided(dtype)):
        torch.library.opcheck(ops.assign_spans_.default, (tensor, *entries(), some_values(dtype)))
        torch.library.opcheck(ops.fill_spans_.default, (tensor, *entries(), 1))


def test_schema_declares_what_is_written() -> None:
    for operator in (ops.assign_spans_.default, ops.fill_spans_.default):
        written = [argument.name for argument in operator._schema.arguments if argument.is_write]
        assert written == ["tensor"]
        assert operator._schema.is_mutable


def test_compiles_as_one_graph() -> None:
    def step(tensor, mask, rows, starts, lengths, values):
        tensor = tensor + 0
        ops.assign_spans_(tensor, rows, starts, lengths, values)
        ops.fill_spans_(mask, rows, starts, lengths, True)
        return tensor * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    tensor, mask, values = contiguous(torch.int32), contiguous(torch.bool), some_values(torch.int32)
    doubled = compiled(tensor, mask, *entries(), values)
    assert np.array_equal(doubled.numpy(), 2 * expected_of(values))
    assert np.array_equal(mask.numpy(), expected_of(1))
    assert not tensor.any()


@pytest.mark.parametrize("is_fill", [False, True])
def test_by_torch_operations_alone(is_fill) -> None:
    """What runs on a device without Triton. What does not fit is left out, as it is by the Triton kernel."""
    values = 1 if is_fill else some_values(torch.int32)
    tensor = contiguous(torch.int32)
    device._spans_by_torch(tensor, *entries(), values)
    assert np.array_equal(tensor.numpy(), expected_of(values))
    for rows, starts in (([3, 5, 4], STARTS), ([3, -1, 4], STARTS), (ROWS, [1, 6, 6]), (ROWS, [1, -1, 6])):
        spoiled, others = contiguous(torch.int32), contiguous(torch.int32)
        device._spans_by_torch(spoiled, ints(rows), ints(starts), ints(LENGTHS), values)
        device._spans_by_torch(others, *entries(), values)
        others[0] = 0
        assert torch.equal(spoiled, others)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", [contiguous, row_strided, transposed])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_device(dtype, make) -> None:
    index, values = [tensor.cuda() for tensor in entries()], some_values(dtype)
    for written in (values.cuda(), 1):
        tensor = make(dtype).cuda()
        if isinstance(written, torch.Tensor):
            ops.assign_spans_(tensor, *index, written)
        else:
            ops.fill_spans_(tensor, *index, written)
        expected = expected_of(values if isinstance(written, torch.Tensor) else 1)
        assert np.array_equal(tensor.cpu().to(torch.int64).numpy(), expected)
