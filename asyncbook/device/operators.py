"""Tensors of the caller's own: batched updates as torch operators, and the ids of a step as a numpy array.

Importing this makes two operators. They work in place on a tensor [R, L] of int32, int64, bool or float32, contiguous
or strided; `rows`, `starts` and `lengths` are int32 or int64 tensors of n entries on its device:

    torch.ops.asyncbook.assign_spans_(tensor, rows, starts, lengths, values)
        tensor[rows[i], starts[i] : starts[i] + lengths[i]] = the next lengths[i] of `values`, sum(lengths) elements of
        the tensor's dtype
    torch.ops.asyncbook.fill_spans_(tensor, rows, starts, lengths, value)
        the same with one number for all

Two names, not two overloads: trying the first overload before the second costs six times as much as the work. On CPU
tensors they share the kernels of `worker.scatter`, with the same checks: `InvalidBatch` names the entry, and nothing is
written. On CUDA they are one launch, which never waits for the device and so cannot raise for what lies there: an entry
that does not fit is left out, and a row named twice is a race. No gradients flow through them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from asyncbook.ipc.errors import InvalidBatch
from asyncbook.worker.scatter import assign_spans
from asyncbook.worker.scatter_kernels import spans_at

Number = int | float | bool
DTYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.bool: np.bool_, torch.float32: np.float32}
INDEX_DTYPES = (torch.int32, torch.int64)


def host_array(name: str, tensor: Any) -> np.ndarray:
    """The memory of a CPU tensor of ids as a numpy array, without a copy."""
    if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
        raise InvalidBatch(f"{name} is on {tensor.device}, expected a tensor on the CPU or on a CUDA device")
    if isinstance(tensor, torch.Tensor) and tensor.dtype not in INDEX_DTYPES:
        raise InvalidBatch(f"{name} is {tensor.dtype}, expected torch.int32 or torch.int64")
    return host_values(name, tensor)


def host_values(name: str, tensor: Any) -> np.ndarray:
    """A CPU tensor's memory as a numpy array, without a copy."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidBatch(f"{name} is a {type(tensor).__name__}, expected a numpy array or a torch tensor")
    if tensor.device.type != "cpu":
        raise NotImplementedError(f"{name} on {tensor.device}: only ids are taken from a device in this version")
    try:
        array: np.ndarray = tensor.detach().numpy()
    except TypeError:
        raise InvalidBatch(f"{name} is {tensor.dtype}, which numpy does not have") from None
    return array


def _check_target(tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise InvalidBatch(f"tensor is {tensor.dtype}, expected {' or '.join(map(str, DTYPES))}")
    if tensor.dim() != 2:
        raise InvalidBatch(f"tensor has shape {list(tensor.shape)}, expected 2 dimensions")
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise InvalidBatch(f"tensor has strides {list(tensor.stride())}: an expanded tensor cannot be written to")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidBatch("tensor requires grad, expected one that does not: no gradients flow through the operator")


# On the CPU


@cache
def _kernel(dtype: torch.dtype, index_dtype: torch.dtype, is_fill: bool) -> Callable[..., int] | None:
    if dtype not in DTYPES or index_dtype not in INDEX_DTYPES:
        return None
    return spans_at(DTYPES[dtype], DTYPES[index_dtype], is_fill)


def _row_stride(tensor: torch.Tensor) -> int:
    """Elements from one row to the next where the rows are contiguous and do not overlap, else 0."""
    row_stride, stride = tensor.stride()
    return row_stride if stride == 1 and row_stride >= tensor.shape[1] else 0


def _write_at_addresses(
    tensor: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, values: Any
) -> bool:
    """Does it where everything is as usual, and says whether it did. A question to a tensor takes longer than the work
    for one row: this asks as few as are safe."""
    dtype, index_dtype, n = tensor.dtype, rows.dtype, rows.numel()
    is_fill = type(values) is not torch.Tensor
    if not (
        starts.dtype is index_dtype
        and lengths.dtype is index_dtype
        and starts.numel() == n
        and lengths.numel() == n
        and (n == 1 or (rows.is_contiguous() and starts.is_contiguous() and lengths.is_contiguous()))
        and (dtype is not torch.float32 or not tensor.requires_grad)
    ):
        return False
    kernel, shape = _kernel(dtype, index_dtype, is_fill), tensor.shape
    if kernel is None or len(shape) != 2:
        return False
    num_rows, width = shape
    row_stride = width if tensor.is_contiguous() else _row_stride(tensor)
    if not row_stride:
        return False
    addresses = rows.data_ptr(), starts.data_ptr(), lengths.data_ptr()
    if is_fill:
        if type(values) is float and dtype is not torch.float32:
            return False
        return kernel(None, None, tensor.data_ptr(), num_rows, width, row_stride, n, *addresses, +values) == 0
    total = values.numel()
    if values.dtype is not dtype or not (total == 1 or values.is_contiguous()):
        return False
    written = values.data_ptr(), total
    return kernel(None, None, tensor.data_ptr(), num_rows, width, row_stride, n, *addresses, *written) == 0


def _spans_cpu(
    tensor: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, values: torch.Tensor | Number
) -> None:
    if _write_at_addresses(tensor, rows, starts, lengths, values):
        return
    # Unusual strides or types, or an error that needs words.
    _check_target(tensor)
    plain = values.detach().numpy() if isinstance(values, torch.Tensor) else values
    assign_spans(tensor.detach().numpy(), rows.numpy(), starts.numpy(), lengths.numpy(), plain)


# On the device

tl: Any = None  # triton.language, which a Triton kernel looks for among its module's names


@cache
def _spans_kernel() -> Any:
    """The Triton kernel, None where there is no Triton."""
    global tl
    try:
        triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
    except ImportError:
        return None

    @triton.jit  # type: ignore[untyped-decorator]
    def spans_kernel(  # type: ignore[no-untyped-def]
        tensor, rows, starts, lengths, values, num_rows, width, row_stride, column_stride, num_values,
        IS_FILL: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program an entry. It finds where its values begin by adding up the lengths before it."""
        entry = tl.program_id(0)
        row = tl.load(rows + entry).to(tl.int64)
        start = tl.load(starts + entry).to(tl.int64)
        length = tl.load(lengths + entry).to(tl.int64)
        fits = (row >= 0) & (row < num_rows) & (start >= 0) & (length >= 0) & (length <= width - start)
        taken = length * 0
        if not IS_FILL:
            for first in range(0, entry, BLOCK):
                before = first + tl.arange(0, BLOCK)
                taken += tl.sum(tl.load(lengths + before, mask=before < entry, other=0).to(tl.int64))
            fits = fits & (taken >= 0) & (taken + length <= num_values)
        if fits:
            span = tensor + row * row_stride + start * column_stride
            for done in range(0, length, BLOCK):
                offsets = done + tl.arange(0, BLOCK)
                if IS_FILL:
                    block = tl.full([BLOCK], values, tensor.dtype.element_ty)
                else:
                    block = tl.load(values + taken + offsets, mask=offsets < length)
                tl.store(span + offsets * column_stride, block, mask=offsets < length)

    return spans_kernel


def _spans_by_torch(
    tensor: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, values: torch.Tensor | Number
) -> None:
    """The same where there is no Triton: several launches, and it waits for the device."""
    rows, starts, lengths = rows.long(), starts.long(), lengths.long()
    taken = lengths.cumsum(0) - lengths
    fits = (rows >= 0) & (rows < tensor.shape[0]) & (starts >= 0) & (lengths >= 0)
    fits &= lengths <= tensor.shape[1] - starts
    if isinstance(values, torch.Tensor):
        fits &= (taken >= 0) & (taken + lengths <= values.numel())
    lengths = lengths * fits
    entries = torch.repeat_interleave(lengths)  # entry i, lengths[i] times
    offsets = torch.arange(entries.numel(), device=tensor.device) - (lengths.cumsum(0) - lengths)[entries]
    if isinstance(values, torch.Tensor):
        written = values.reshape(-1)[taken[entries] + offsets]
    else:
        written = torch.tensor(values, dtype=tensor.dtype, device=tensor.device)
    tensor.index_put_((rows[entries], starts[entries] + offsets), written)


def _spans_cuda(
    tensor: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, values: torch.Tensor | Number
) -> None:
    _check_target(tensor)
    n = rows.numel()
    for name, index in (("rows", rows), ("starts", starts), ("lengths", lengths)):
        if index.dtype not in INDEX_DTYPES or index.shape != (n,) or index.device != tensor.device:
            came = f"{index.dtype} {list(index.shape)} on {index.device}"
            raise InvalidBatch(f"{name} is {came}, expected torch.int32 or torch.int64 [{n}] on {tensor.device}")
    num_values = 0
    if isinstance(values, torch.Tensor):
        if values.dtype != tensor.dtype or values.device != tensor.device:
            came = f"{values.dtype} on {values.device}"
            raise InvalidBatch(f"values is {came}, expected {tensor.dtype} on {tensor.device}")
        values, num_values = values.contiguous().view(-1), values.numel()
    else:
        one = np.ones(1, np.int64)
        assign_spans(np.empty((2, 2), DTYPES[tensor.dtype]), one, one, one, values)  # raises where it cannot hold it
        values = float(values) if tensor.dtype is torch.float32 else int(values)
    if n == 0:
        return
    kernel = _spans_kernel()
    if kernel is None:
        _spans_by_torch(tensor, rows, starts, lengths, values)
        return
    with torch.cuda.device(tensor.device):
        kernel[(n,)](
            tensor, rows.contiguous(), starts.contiguous(), lengths.contiguous(), values, *tensor.shape,
            *tensor.stride(), num_values, IS_FILL=not isinstance(values, torch.Tensor), BLOCK=1024,
        )  # fmt: skip


# Their registration. A plain library entry takes a fourteenth of the time of `torch.library.custom_op`, one row, and
# passing autograd by saves a little more.


def _define(name: str, last_argument: str) -> None:
    schema = f"{name}(Tensor(a!) tensor, Tensor rows, Tensor starts, Tensor lengths, {last_argument}) -> ()"
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, _spans_cpu, "CPU")
    _LIBRARY.impl(name, _spans_cuda, "CUDA")
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"asyncbook::{name}", _fake_spans, lib=_LIBRARY)


def _fake_spans(tensor: torch.Tensor, *arguments: Any) -> None:
    """Nothing comes out: the operators only write."""


_LIBRARY: Any = torch.library.Library("asyncbook", "DEF")  # type: ignore[no-untyped-call]
_define("assign_spans_", "Tensor values")
_define("fill_spans_", "Scalar value")
