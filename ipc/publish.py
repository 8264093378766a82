"""The only memory-ordering code: release-store, acquire-load, and a full fence for the sleeper's handshake.

A word is published with `OwnWord.store_release(value)`: everything that this thread wrote before is visible to whoever
reads the value with `Word.load_acquire()`. On x86-64 both are plain moves; on aarch64 they are `stlr` and
`ldar` (or `ldapr`). `fence()` orders a store before a later load, which neither of the two does: a sleeper stores "I
sleep" and then looks once more, a waker stores its work and then looks for a sleeper; each puts a fence between its two
steps, so at least one of them sees the other.

numba turns plain array accesses into plain loads and stores, which the compiler may move; these are LLVM atomics, which
it may not. `tests/unit/test_publish.py` reads the machine code, for x86-64 and for aarch64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from asyncbook.ipc.jit import primitive

_WORD_BYTES = 8
_intrinsic: Any = intrinsic  # called without its typing context, which its type does not tell
_WORD_POINTER = ir.IntType(64).as_pointer()


@_intrinsic
def _atomic_load(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _WORD_POINTER), "acquire", _WORD_BYTES)

    return types.int64(types.int64), codegen


@_intrinsic
def _atomic_store(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], _WORD_POINTER), "release", _WORD_BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@_intrinsic
def _full_fence(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@primitive((types.int64,))
def load_acquire(address: int) -> int:
    """The int64 at `address`; what was written before it was release-stored is visible after this call."""
    return int(_atomic_load(address))


@primitive((types.int64, types.int64))
def store_release(address: int, value: int) -> None:
    """Publishes `value` at `address`, after everything this thread wrote before."""
    _atomic_store(address, value)


@primitive(())
def fence() -> None:
    """A full barrier: no load after it is done before a store in front of it is visible."""
    _full_fence()


class Word:
    """One int64 of shared memory, alone on its cache line; `index` as in `layout.Word` and its like."""

    __slots__ = ("_address", "_words")

    def __init__(self, words: np.ndarray, index: int) -> None:
        assert words.dtype == np.int64
        assert words.flags.c_contiguous
        self._words = words  # keeps the mapping alive: the address below is good as long as this object
        self._address = words.ctypes.data + _WORD_BYTES * index
        assert self._address % _WORD_BYTES == 0, "an atomic word must be aligned"

    def load_acquire(self) -> int:
        """The value; what its writer wrote before it is visible after this call."""
        return load_acquire(self._address)  # type: ignore[no-any-return]


class OwnWord(Word):
    """A word that this process is the only writer of."""

    __slots__ = ()

    def __init__(self, words: np.ndarray, index: int) -> None:
        super().__init__(words, index)
        if not words.flags.writeable:
            raise ValueError("this word is mapped read-only")

    def store_release(self, value: int) -> None:
        """Publishes the value, after everything this thread wrote before."""
        store_release(self._address, value)
