"""Looking at the next step's memory changes nothing of it, and is done now and then, not at every look."""

from __future__ import annotations

import numpy as np
import pytest

import asyncbook
from asyncbook import BookConfig
from asyncbook.ipc import jit
from asyncbook.worker import warm
from tests.conftest import SMALL, step


def test_looking_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    with asyncbook.open(BookConfig(**SMALL)) as book:
        full, short = book.admit("full", np.arange(16)), book.admit("short", [1, 2])
        step(book, [full, short], [5, 6])
        ledger = book._bookkeeper.ledger
        warmth = warm.Warmth(ledger)
        jit.compile_all()
        before = ledger.work.copy(), ledger.tables.token_ids.copy(), ledger.tables.is_token_ids.copy()
        warmth.keep()
        for now, then in zip((ledger.work, ledger.tables.token_ids, ledger.tables.is_token_ids), before, strict=True):
            assert np.array_equal(now, then)
        assert warm.touch(*warmth._memory) == before[0][:, 0].sum()  # a line of each column; what comes next is zero
        monkeypatch.setattr(warm, "touch", lambda *memory: calls.append(len(memory)))
        clock = iter([10**15, 10**15 + 1, 10**15 + warm.INTERVAL_NS, 10**15 + warm.INTERVAL_NS + 1])
        monkeypatch.setattr(warm, "monotonic_ns", lambda: next(clock))
        for _ in range(4):
            warmth.keep()
    assert calls == [4, 4]
