"""What numba makes of the kernels: no reference counts, exactly the declared types, nothing compiled in a step."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.errors import NumbaError

from asyncbook.ipc import jit, logprob_staging, staging
from asyncbook.worker import kernels, logprob_kernels, rules, text_kernels

# Imported for their kernels, which register themselves.
assert all((kernels, logprob_kernels, logprob_staging, text_kernels))
KERNELS = {compiled.py_func.__name__: (compiled, signatures) for compiled, signatures in jit._kernels}


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    jit.compile_all()


@cache
def llvm_of(name: str) -> str:
    """The LLVM of a kernel for its first signature. Compiled anew: numba keeps none of what it takes from its cache."""
    compiled, signatures = KERNELS[name]
    anew: Any = numba.njit(**jit._OPTIONS)(compiled.py_func)
    anew.compile(signatures[0])
    return str(anew.inspect_llvm(anew.signatures[0]))


def test_these_are_the_kernels() -> None:
    named = {"apply_step", "end_row", "clear_row", "take_pending", "stage", "fill_slot", "append_text", "take_text"}
    assert named | {"stage_logprobs", "store_logprobs", "fit_logprobs", "take_logprobs"} <= set(KERNELS)
    # Whatever else has been imported by now: no name is given twice.
    names = [compiled.py_func.__name__ for compiled, _ in jit._kernels]
    assert len(set(names)) == len(names)


# Each is compiled anew, which takes a minute for all.
@pytest.mark.parametrize(
    "name", [name if name == "apply_step" else pytest.param(name, marks=pytest.mark.stress) for name in KERNELS]
)
def test_no_reference_is_counted_and_nothing_allocated(name: str) -> None:
    assert re.search(rf"define .*{name}", llvm_of(name))
    assert not re.findall(r"call .*@NRT_\w+", llvm_of(name))


def test_reference_counts_would_be_found() -> None:
    """What the test above looks for is in code that numba compiles by default."""

    def swap(pairs: Any, place: int) -> Any:
        return pairs[place][::-1] + 1

    compiled: Any = numba.njit("int64[::1](int64[:,::1], int64)")(swap)
    assert re.findall(r"call .*@NRT_\w+", str(compiled.inspect_llvm(compiled.signatures[0])))


@pytest.mark.parametrize("name", KERNELS)
def test_exactly_the_declared_signatures(name: str) -> None:
    compiled, signatures = KERNELS[name]
    assert [tuple(signature) for signature in compiled.signatures] == [tuple(signature) for signature in signatures]
    assert len(set(signatures)) == len(signatures)
    if name in ("apply_step", "end_row", "clear_row", "take_pending"):
        assert len(signatures) == 1


def other_types(signature: tuple[Any, ...], place: int) -> list[Any]:
    """Arguments of the signature's types, but for the one at `place`."""
    arguments = [_like(argument) for argument in signature]
    argument = signature[place]
    if isinstance(argument, numba.types.Array):
        wrong_dtype = np.float64 if argument.dtype != numba.types.float64 else np.int32
        arguments[place] = np.zeros((2,) * argument.ndim, wrong_dtype)
    else:
        arguments[place] = np.zeros(1)
    return arguments


def _like(argument: Any) -> Any:
    if isinstance(argument, numba.types.Array):
        return np.zeros((2,) * argument.ndim, numba.np.numpy_support.as_dtype(argument.dtype))
    return 0


@pytest.mark.parametrize("name", [name for name, (_, signatures) in KERNELS.items() if signatures[0]])
def test_a_call_with_other_types_is_a_type_error(name: str) -> None:
    compiled, signatures = KERNELS[name]
    signature = signatures[0]
    for place in range(len(signature)):
        with pytest.raises(TypeError):
            compiled(*other_types(signature, place))
    with pytest.raises(TypeError):
        compiled()
    assert len(compiled.signatures) == len(signatures), "a call compiled something"


def test_ids_that_are_not_as_kernels_take_them_are_a_type_error() -> None:
    target = np.zeros(8, np.int32)
    read_only = np.zeros(4, np.int32)
    read_only.flags.writeable = False
    for ids in (np.zeros(8, np.int32)[::2], np.zeros(4, np.uint32), np.zeros((2, 2, 1), np.int32), read_only, [1, 2]):
        with pytest.raises(TypeError):
            staging.stage(ids, 4, 1, target)
    assert not target.any()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_stage_copies_and_narrows(dtype: type) -> None:
    target = np.full(8, 77, np.int32)
    assert staging.stage(np.array([[1, -1], [2, 3]], dtype), 2, 3, target) == 2
    assert target.tolist() == [1, -1, 2, 3, 77, 77, 77, 77]
    assert staging.stage(np.array([5, 6], dtype), 2, 1, target) == 1
    assert target.tolist() == [5, 6, 2, 3, 77, 77, 77, 77]
    if dtype is np.int64:
        wide = np.array([2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 + 5, -1])
        assert staging.stage(wide, 6, 1, target) == 1
        least = -(2**31)
        assert target.tolist() == [2**31 - 1, least, least, least, least, -1, 77, 77]


@pytest.mark.parametrize(
    ("shape", "num_rows", "max_width"), [((3,), 2, 9), ((2,), 3, 9), ((2, 3), 2, 2), ((2, 3), 3, 9), ((2, 0), 2, 2)]
)
def test_stage_refuses_another_shape_and_writes_nothing(shape: tuple[int, ...], num_rows: int, max_width: int) -> None:
    target = np.full(8, 77, np.int32)
    assert staging.stage(np.zeros(shape, np.int32), num_rows, max_width, target) == staging.WRONG_SHAPE
    assert (target == 77).all()


def test_a_rule_is_for_kernels_only() -> None:
    """A rule is compiled into its kernels; what a kernel cannot hold fails when it is compiled, not in a step."""

    def allocates(n: int) -> Any:
        return np.zeros(n)

    compiled: Any = numba.njit(**jit._OPTIONS)(allocates)
    with pytest.raises(NumbaError):
        compiled.compile((numba.types.int64,))
    assert rules.count_verified.py_func(np.array([1, 2, -1, 3])) == 2


# The cache


def test_kernels_are_cached_under_the_digest_of_their_sources() -> None:
    assert jit.is_cached()
    assert re.fullmatch(r"[0-9a-f]{12}", jit.SOURCE_DIGEST)
    assert jit._source_digest() == jit.SOURCE_DIGEST
    for compiled, _ in jit._kernels:
        name = compiled.py_func.__qualname__
        assert name.endswith(f"_{jit.SOURCE_DIGEST}")
        assert any(Path(compiled.stats.cache_path).glob(f"*{name}-*.nbi"))


def test_another_source_is_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {**jit.KERNEL_SOURCES, "asyncbook.worker": ("kernels.py", "life.py")}
    monkeypatch.setattr(jit, "KERNEL_SOURCES", sources)
    assert jit._source_digest() != jit.SOURCE_DIGEST
