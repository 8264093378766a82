"""The machine code of the memory-ordering operations, for this machine and for aarch64, which reorders more."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest

from asyncbook.ipc import jit, publish, staging
from asyncbook.ipc.publish import OwnWord, Word

ORDERED = re.compile(r"^(?:load atomic|store atomic|fence)\b")


@cache
def llvm_of(name: str) -> str:
    """The optimised LLVM of an operation. Compiled anew: numba keeps none with what it takes from its cache."""
    jit.compile_all()
    function: Any = getattr(publish, name)
    (signature,) = function.signatures
    compiled: Any = numba.njit(signature)(function.py_func)
    return str(compiled.inspect_llvm(signature))


@cache
def assembly(name: str, triple: str) -> list[str]:
    """Its instructions on a machine of this kind, in order."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    # The numbers of the machine that it was compiled for are taken out; those of the other one are put in.
    module = llvm.parse_assembly(
        "\n".join(line for line in llvm_of(name).splitlines() if not line.startswith("target "))
    )
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=3)
    module.triple, module.data_layout = triple, str(machine.target_data)
    lines = [line.strip() for line in machine.emit_assembly(module).splitlines()]
    return [re.sub(r"\s+", " ", line) for line in lines if line and line[0] not in ".#/;"]


X86, AARCH64 = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


def body(name: str) -> list[str]:
    """The ordered instructions in the LLVM of an operation."""
    instructions = [re.sub(r"^%\S+ = ", "", line.strip()) for line in llvm_of(name).splitlines()]
    return [instruction for instruction in instructions if ORDERED.match(instruction)]


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("load_acquire", r"load atomic i64, .* acquire, align 8"),
        ("store_release", r"store atomic i64 .* release, align 8"),
        ("fence", r"fence seq_cst"),
    ],
)
def test_llvm(name: str, instruction: str) -> None:
    assert body(name)
    assert all(re.match(instruction, line) for line in body(name)), body(name)


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("load_acquire", r"(ldar|ldapr) x\d+, \[x\d+\]"),
        ("store_release", r"stlr x\d+, \[x\d+\]"),
        ("fence", r"dmb ish$"),
    ],
)
def test_aarch64(name: str, instruction: str) -> None:
    assert any(re.match(instruction, line) for line in assembly(name, AARCH64)), assembly(name, AARCH64)


def test_a_plain_access_would_be_told_apart() -> None:
    """What the test above finds is not in code without the orderings."""

    def plain(words: Any) -> None:
        words[0] = words[1]

    compiled: Any = numba.njit(**jit._OPTIONS)(plain)
    compiled.compile((numba.types.int64[::1],))
    assert not re.search(r"\batomic\b|^\s*fence", str(compiled.inspect_llvm(compiled.signatures[0])), re.MULTILINE)


def test_x86() -> None:
    # Loads and stores are ordered there as they are: plain moves of the whole word. Only the fence costs something.
    assert any(re.match(r"movq \(%r\w+\), %r\w+", line) for line in assembly("load_acquire", X86))
    assert any(re.match(r"movq %r\w+, \(%r\w+\)", line) for line in assembly("store_release", X86))
    assert any(re.match(r"mfence|lock\b", line) for line in assembly("fence", X86)), assembly("fence", X86)
    for name in ("load_acquire", "store_release"):
        assert not any(re.match(r"mfence|lock\b|xchg", line) for line in assembly(name, X86))


def test_the_ring_publishes_ids_before_the_word_that_says_so() -> None:
    """In the compiled kernel of the runner: all ids, then ARRIVED, then the header, then DESCRIBED, then the look."""
    (signatures,) = [signatures for kernel, signatures in jit._kernels if kernel is staging.fill_slot]
    compiled: Any = numba.njit(**jit._OPTIONS)(staging.fill_slot.py_func)
    compiled.compile(signatures[0])
    text = str(compiled.inspect_llvm(compiled.signatures[0]))
    found = re.findall(r"(store atomic i64 .*? release|load atomic i64.*? acquire|fence seq_cst)", text)
    kinds = ["fence" if "fence" in item else item.split()[0] for item in found]
    assert kinds[:4] == ["store", "store", "fence", "load"]


# The words


def test_words_show_what_was_stored() -> None:
    words = np.zeros(16, np.int64)
    first, second = OwnWord(words, 0), OwnWord(words, 8)
    reader = Word(words, 8)
    for value in (1, -1, 2**63 - 1, -(2**63)):
        second.store_release(value)
        assert reader.load_acquire() == second.load_acquire() == int(words[8]) == value
    assert first.load_acquire() == 0
    assert np.count_nonzero(words) == 1
    publish.fence()


def test_a_word_keeps_its_memory() -> None:
    word = OwnWord(np.zeros(1, np.int64), 0)
    np.zeros(1, np.int64)
    word.store_release(5)
    assert word.load_acquire() == 5


def test_a_reader_s_word_cannot_be_stored() -> None:
    words = np.zeros(8, np.int64)
    assert not hasattr(Word(words, 0), "store_release")
    words.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        OwnWord(words, 0)
    assert Word(words, 0).load_acquire() == 0


@pytest.mark.parametrize("words", [np.zeros(8, np.int32), np.zeros(16, np.int64)[::2]])
def test_a_word_is_an_aligned_int64(words: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        Word(words, 0)
    with pytest.raises(AssertionError, match="aligned"):
        Word(np.frombuffer(bytearray(17), np.int64, count=2, offset=1), 0)
