"""What the contract names and this version does not have says so, instead of doing half of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncbook
from asyncbook import Book
from tests.conftest import MakeBook, refused, step

CALLS: dict[str, Callable[[Book], Any]] = {
    "logprobs": lambda book: book.submit(book.batch([]), np.zeros(0, np.int32), logprobs=np.zeros((0, 1), np.float32)),
    "address": lambda book: book.address,
}
OPTIONS: dict[str, Any] = {"max_logprobs": 5}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_later_version(book: Book, name: str) -> None:
    step(book, [book.admit("a", [1])], [5])
    with refused(book, NotImplementedError, name):
        CALLS[name](book)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_later_version(make_book: MakeBook, name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        make_book(**{name: OPTIONS[name]})


@pytest.mark.parametrize("name", ["attach", "subscribe"])
def test_other_processes_of_a_later_version(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        getattr(asyncbook, name)("somewhere")
