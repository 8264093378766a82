"""`asyncbook top`: what a line says, 80 columns, `--once` and `--json`."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("rich")
from click.testing import CliRunner
from rich.console import Console

import asyncbook
from asyncbook.__main__ import main
from asyncbook.ipc.histogram import bucket_of
from asyncbook.ipc.layout import NUM_HISTOGRAM_BUCKETS
from asyncbook.stats import Histogram, Stats, StepHistogram
from asyncbook.top import WIDTH, AttachedBooks, Line, View, Watched, make_line, make_table
from tests.conftest import SMALL, step


def counts(value: int, number: int) -> np.ndarray:
    array = np.zeros(NUM_HISTOGRAM_BUCKETS, np.int64)
    array[bucket_of(value)] = number
    return array


@pytest.fixture
def empty() -> Stats:
    with asyncbook.open(asyncbook.BookConfig(**SMALL)) as book:
        return book.stats()


def test_a_line_says_what_happened_between_two_looks(empty: Stats) -> None:
    before = replace(empty, applied_steps=100, committed_tokens=1000, submit_us=Histogram(counts(900_000, 5)))
    now = replace(
        before,
        applied_steps=300,
        committed_tokens=7000,
        num_rows_held=3,
        num_rows_free=1,
        submit_us=Histogram(before.submit_us.counts + counts(25_000, 200)),
        apply_us=Histogram(counts(75_000, 200)),
        lag_steps=StepHistogram(counts(2, 200)),
        num_restarts=1,
        dropped_tokens={"stale": 2, "finished": 5},
    )
    line = make_line(Watched("a", lambda: now, 17), before, now, 2.0)
    assert (line.steps_per_s, line.tokens_per_s) == (100, 3000)
    assert (line.num_rows_held, line.num_rows) == (3, 4)
    assert line.submit_us_p50 is not None
    assert 25 < line.submit_us_p50 < 25 * 9 / 8, "what was before does not count"
    assert (line.lag_steps_p99, line.num_restarts, line.dropped_tokens) == (2, 1, 7)
    assert line.hidden == pytest.approx(0.75, abs=0.05)
    assert make_line(Watched("a", lambda: now, None), before, now, 2.0).hidden == 0


def test_nothing_happened(empty: Stats) -> None:
    line = make_line(Watched("a", lambda: empty, None), empty, empty, 1.0)
    assert (line.submit_us_p50, line.lag_steps_p99, line.hidden) == (None, None, None)


def test_the_table_fits_in_80_columns() -> None:
    wide = Line("a-name-that-is-much-too-long-for-it", 99_999, 1_048_576, 99_999.9, 99_999_999.0, 9_999.0, 99_999.0,
                9_999.0, 999_999.0, 64.0, 0.99, 99, 999_999_999)  # fmt: skip
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    console.print(make_table([wide, replace(wide, name="b")]))
    shown = console.export_text()
    assert all(len(line) <= WIDTH for line in shown.splitlines())
    assert shown.count("10.0k/1.0M") == 2
    assert "100k/1.0M" in shown
    assert "…" in shown.splitlines()[1]
    assert shown.count("…") == 1, "only the long name is cut"


def test_a_view_of_a_book() -> None:
    with asyncbook.open(asyncbook.BookConfig(**SMALL)) as book:
        watched = [Watched("mine", book.stats, None)]
        view = View(lambda: watched)
        row = book.admit("a", [1])
        step(book, [row], [5])
        (line,) = view.look()
        assert (line.name, line.num_rows_held, line.steps_per_s > 0) == ("mine", 1, True)
        assert view.look()[0].steps_per_s == 0


def test_once_as_json_with_books_of_its_own() -> None:
    result = CliRunner().invoke(main, ["top", "--demo", "--once", "--json", "--interval", "0.5"])
    assert result.exit_code == 0, result.output
    books = json.loads(result.output)["books"]
    assert [book["name"] for book in books] == ["embedded", "sidecar"]
    assert all(book["num_rows"] == 64 and book["steps_per_s"] > 0 for book in books)


def look_at(*arguments: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(main, ["top", *arguments, "--once", "--json", "--interval", "0.05"])
    assert result.exit_code == 0, result.output
    books: list[dict[str, object]] = json.loads(result.output)["books"]
    return books


def test_other_processes_books() -> None:
    config = asyncbook.BookConfig(**SMALL)
    with asyncbook.open(config) as embedded, asyncbook.spawn(config) as book:
        step(book, [book.admit("a", [1])], [5])
        (one,) = look_at(book.address)
        assert (one["num_rows_held"], one["num_rows"]) == (1, 4)
        names = [str(each["name"]) for each in look_at()]
        assert one["name"] in names
        assert f"{os.getpid()} {embedded.address.rpartition('-')[2]}" in names
        address = book.address
    result = CliRunner().invoke(main, ["top", address])
    assert result.exit_code == 1
    assert "there is no book at" in result.output


def test_books_that_come_and_go() -> None:
    found: list[str] = []
    books = AttachedBooks(lambda: found)
    view = View(books)
    assert view.look() == []
    with asyncbook.open(asyncbook.BookConfig(**SMALL)) as book:
        found.append(book.address)
        assert view.look() == []  # nothing to compare it with yet
        assert len(view.look()) == 1
    found.append("/nowhere")
    found.pop(0)
    assert view.look() == []
    books.close()
