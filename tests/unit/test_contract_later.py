"""What the contract names and this version does not have says so, instead of doing half of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import asyncbook
from asyncbook import Book
from tests.conftest import refused, step

CALLS: dict[str, Callable[[Book], Any]] = {
    "address": lambda book: book.address,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_later_version(book: Book, name: str) -> None:
    step(book, [book.admit("a", [1])], [5])
    with refused(book, NotImplementedError, name):
        CALLS[name](book)


@pytest.mark.parametrize("name", ["attach", "subscribe"])
def test_other_processes_of_a_later_version(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        getattr(asyncbook, name)("somewhere")
