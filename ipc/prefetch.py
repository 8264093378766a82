"""Asks for a cache line before it is needed, so that many rows' lines are on their way at once. A hint: it reads
nothing, and a wrong address does no harm."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_intrinsic: Any = intrinsic  # called without its typing context, which its type does not tell
_FOR_WRITING, _KEPT, _DATA = 1, 3, 1  # arguments of LLVM's prefetch: what for, how long to be kept, which cache


@_intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """For kernels: `prefetch(address)` of a line that is written soon."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        hint = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        call = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], hint)
        builder.call(call, [pointer, *(ir.Constant(word, value) for value in (_FOR_WRITING, _KEPT, _DATA))])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
