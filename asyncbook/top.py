"""`asyncbook top`: a live view of books, one line each, readable in 80 columns. Needs `asyncbook[cli]`.

The view knows sources of statistics and nothing of where they come from: whoever has a book, its own or one that it
only reads, makes a `Watched` of it. Looking costs the books' own processes nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from asyncbook.attached import AttachedBook
from asyncbook.client import attach
from asyncbook.ipc.address import folders_of_books
from asyncbook.ipc.errors import AsyncbookError, BookClosed, RunnerDied
from asyncbook.ipc.histogram import bucket_start_ns
from asyncbook.stats import Histogram, Stats

WIDTH = 80
CAPTION = (
    "submit, apply: us p50/p99. lag: steps in flight, p99. hid: share of the\n"
    "bookkeeping outside the runner's thread. rst: restarts. drops: tokens"
)


@dataclass(frozen=True)
class Watched:
    """A book to look at. `sidecar_pid`: None where the book is kept in the runner's thread."""

    name: str
    stats: Callable[[], Stats]
    sidecar_pid: int | None


@dataclass(frozen=True)
class Line:
    """A book between two looks; times in microseconds, None where nothing happened.

    `hidden`: the share of the bookkeeping, submit and apply, that was not done in the runner's thread.
    """

    name: str
    num_rows_held: int
    num_rows: int
    steps_per_s: float
    tokens_per_s: float
    submit_us_p50: float | None
    submit_us_p99: float | None
    apply_us_p50: float | None
    apply_us_p99: float | None
    lag_steps_p99: float | None
    hidden: float | None
    num_restarts: int
    dropped_tokens: int


def _total_us(times: Histogram) -> float:
    """Of all times, each taken for the middle of its bucket."""
    used = np.flatnonzero(times.counts).tolist()
    return sum(int(times.counts[b]) * (bucket_start_ns(b) + bucket_start_ns(b + 1)) / 2000 for b in used)


def _number(value: float) -> float | None:
    """None for NaN, which JSON has not."""
    return None if np.isnan(value) else round(value, 3)


def make_line(watched: Watched, before: Stats, now: Stats, seconds: float) -> Line:
    """What happened in so many seconds between two looks."""
    submit, apply = now.submit_us.since(before.submit_us), now.apply_us.since(before.apply_us)
    submit_us, apply_us = _total_us(submit), _total_us(apply)
    hidden = None
    if submit.count and apply.count:
        hidden = 0.0 if watched.sidecar_pid is None else round(apply_us / (apply_us + submit_us), 4)
    return Line(
        watched.name,
        now.num_rows_held,
        now.num_rows_held + now.num_rows_free,
        round((now.applied_steps - before.applied_steps) / seconds, 1),
        round((now.committed_tokens - before.committed_tokens) / seconds, 1),
        _number(submit.us_p50),
        _number(submit.us_p99),
        _number(apply.us_p50),
        _number(apply.us_p99),
        _number(now.lag_steps.since(before.lag_steps).steps_p99),
        hidden,
        now.num_restarts,
        sum(now.dropped_tokens.values()),
    )


class View:
    """Looks at books again and again."""

    def __init__(self, books: Callable[[], Sequence[Watched]]) -> None:
        """`books`: those that there are, the same ones as the same objects."""
        self._books = books
        self._before: dict[Watched, tuple[float, Stats]] = {}
        self.look()

    def look(self) -> list[Line]:
        """What happened since the last look, in the books that were there then."""
        lines, before = [], self._before
        self._before = {book: (time.monotonic(), book.stats()) for book in self._books()}
        for book, (now_s, now) in self._before.items():
            if book in before:
                then_s, then = before[book]
                lines.append(make_line(book, then, now, max(now_s - then_s, 1e-9)))
        return lines


class AttachedBooks:
    """The books of this user that can be read from here, those that come and go among them."""

    def __init__(self, find: Callable[[], Sequence[str | os.PathLike[str]]]) -> None:
        self._find = find
        self._attached: dict[str, tuple[AttachedBook, Watched]] = {}

    def __call__(self) -> list[Watched]:
        """As of now."""
        folders = {os.fspath(folder) for folder in self._find()}
        for folder in self._attached.keys() - folders:
            self._attached.pop(folder)[0].close()
        for folder in sorted(folders - self._attached.keys()):
            with suppress(AsyncbookError):  # it has just ended, or is of another version
                book = attach(folder)
                self._attached[folder] = book, _watch(book, folder)
        return [watched for _, watched in self._attached.values()]

    def close(self) -> None:
        """Lets go of all of them."""
        for book, _ in self._attached.values():
            book.close()


def _watch(book: AttachedBook, folder: str) -> Watched:
    return Watched(f"{book.runner_pid} {folder.rpartition('-')[2]}", book.stats, book.sidecar_pid)


def _count(number: float) -> str:
    """At most 5 characters."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 999.5:
            return f"{number:.0f}{unit}" if not unit or number >= 99.95 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.0f}T"


def _pair(p50: float | None, p99: float | None) -> str:
    return "-" if p50 is None or p99 is None else f"{_count(p50)}/{_count(p99)}"


def make_table(lines: Sequence[Line]) -> Table:
    """One line a book, at most `WIDTH` columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), width=WIDTH, caption=CAPTION, caption_justify="left")
    table.add_column("book", max_width=14, no_wrap=True, overflow="ellipsis")
    for heading in ("rows", "steps/s", "tok/s", "submit", "apply", "lag", "hid", "rst", "drops"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            line.name,
            f"{_count(line.num_rows_held)}/{_count(line.num_rows)}",
            _count(line.steps_per_s),
            _count(line.tokens_per_s),
            _pair(line.submit_us_p50, line.submit_us_p99),
            _pair(line.apply_us_p50, line.apply_us_p99),
            "-" if line.lag_steps_p99 is None else f"{line.lag_steps_p99:.0f}",
            "-" if line.hidden is None else f"{100 * line.hidden:.0f}%",
            str(line.num_restarts),
            _count(line.dropped_tokens),
        )
    return table


def as_json(lines: Sequence[Line]) -> dict[str, Any]:
    """For scripts."""
    return {"books": [asdict(line) for line in lines]}


def find_books(address: str | None, demo: bool, stack: ExitStack) -> Callable[[], Sequence[Watched]]:
    """The books to look at. Those that a demo needs end with the stack."""
    if demo:
        from asyncbook.top_demo import run_books

        books = stack.enter_context(run_books())
        return lambda: books
    if address is not None:
        try:
            book = stack.enter_context(attach(address))
        except AsyncbookError as error:
            raise click.ClickException(str(error)) from error
        watched = _watch(book, address)

        def one() -> list[Watched]:
            book.check_open()
            return [watched]

        return one
    return stack.enter_context(closing(AttachedBooks(folders_of_books)))


@click.command("top")
@click.argument("address", required=False)
@click.option("--demo", is_flag=True, help="Looks at two small books that this command runs itself.")
@click.option("--interval", "interval_s", type=click.FloatRange(0.05), default=1.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="One look, after one interval.")
@click.option("--json", "json_lines", is_flag=True, help="A line of JSON a look.")
def top_command(address: str | None, demo: bool, interval_s: float, once: bool, json_lines: bool) -> None:
    """A live view of all books of this user, or the one at ADDRESS: rows in use, steps and tokens a second, submit and
    apply, lag, what is hidden. Ctrl-C ends it."""
    console = Console()
    with ExitStack() as stack:
        view = View(find_books(address, demo, stack))
        try:
            if json_lines or once:
                _print_looks(console, view, interval_s, once, json_lines)
            else:
                _show_live(console, view, interval_s)
        except KeyboardInterrupt:
            pass
        except (BookClosed, RunnerDied) as error:
            raise click.ClickException(str(error)) from error


def _print_looks(console: Console, view: View, interval_s: float, once: bool, json_lines: bool) -> None:
    while True:
        time.sleep(interval_s)
        lines = view.look()
        if json_lines:
            click.echo(json.dumps(as_json(lines)))
        else:
            console.print(make_table(lines))
        if once:
            return


def _show_live(console: Console, view: View, interval_s: float) -> None:
    with Live(make_table(view.look()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(make_table(view.look()), refresh=True)
