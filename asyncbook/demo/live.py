"""What a watcher sees while it runs: a progress bar, and the texts as they grow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from asyncbook import FinishReason
from asyncbook.demo.runner import Runner
from asyncbook.demo.tokenizer import Tokenizer

REFRESH_S = 0.1
TAIL_CHARACTERS = 90


class Display:
    """Shows a runner after each step, outside of what is timed. Not on a terminal, or not `live`: one line a way."""

    def __init__(self, console: Console, tokenizer: Tokenizer, ways: Sequence[str], live: bool) -> None:
        self._console, self._tokenizer = console, tokenizer
        self._progress = Progress(
            TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"),
            TextColumn("{task.fields[rate]:>6.1f} tokens/s"), TimeElapsedColumn(), console=console, auto_refresh=False,
        )  # fmt: skip
        self._tasks = {way: self._progress.add_task(way, start=False, total=None, rate=0.0) for way in ways}
        self._live = Live(console=console, auto_refresh=False, transient=True) if live else None
        self._way, self._began_s, self._drawn_s = "", 0.0, 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, way: str, num_requests: int) -> None:
        self._way, self._began_s = way, time.monotonic()
        self._progress.update(self._tasks[way], total=num_requests)
        self._progress.start_task(self._tasks[way])

    def after_step(self, runner: Runner) -> None:
        now_s = time.monotonic()
        requests = runner.requests.values()
        ended = sum(request.finish_reason != FinishReason.NONE for request in requests)
        if now_s - self._drawn_s < REFRESH_S and ended < len(requests):
            return
        self._drawn_s = now_s
        rate = sum(len(request.token_ids) for request in requests) / max(now_s - self._began_s, 1e-3)
        self._progress.update(self._tasks[self._way], completed=ended, rate=rate)
        if self._live is not None:
            self._live.update(Group(self._texts(runner), self._progress), refresh=True)

    def end(self, num_tokens: int, num_steps: int) -> None:
        seconds = time.monotonic() - self._began_s
        self._progress.stop_task(self._tasks[self._way])
        if self._live is None:
            rate = f"{num_tokens / seconds:.1f} tokens/s"
            self._console.print(f"{self._way:>9}: {num_tokens} tokens in {num_steps} steps, {seconds:.1f} s, {rate}")

    def _texts(self, runner: Runner) -> Table:
        """One line a row of the batch: what is asked, and the end of the answer so far."""
        table = Table(expand=True, box=None, padding=(0, 1))
        table.add_column("row", justify="right", width=4)
        table.add_column("prompt", no_wrap=True, ratio=1)
        table.add_column("answer so far", no_wrap=True, ratio=3)
        running = runner.scheduler.running
        for index in sorted(running)[: max(4, self._console.height - 8)]:
            request = running[index].request
            text = " ".join(self._tokenizer.decode(request.token_ids).split())
            tail = Text(text[-TAIL_CHARACTERS:], overflow="crop")
            table.add_row(str(index), Text(" ".join(request.prompt.split()), overflow="ellipsis"), tail)
        return table
