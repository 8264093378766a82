"""`asyncbook bench outputs`: what it costs to deliver, and whom: outputs read by the runner, by other processes, by
nobody.

Three parts: steps as fast as the sidecar takes them; steps at a fixed pace, where the runner's own time counts; and
memory while a reader does not read. What was read is compared with what was sampled.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

import asyncbook
from asyncbook import Batch, Book, BookConfig, RequestParams
from asyncbook.bench.about import cpu_s, describe_run
from asyncbook.bench.pacing import percentiles_us
from asyncbook.bench.workloads import (
    EOS_TOKEN_ID,
    FIRST_STOP_ID,
    MIN_TOKENS,
    NUM_PROMPT_TOKENS,
    STOP_TOKEN_IDS,
    VOCAB_SIZE,
)

NUM_PATTERNS = 64  # different steps; drawn once, for drawing takes longer than a step
STEPS_PER_ROUND = 20
REST_TIMEOUT_S = 30.0
UNTIL_WARM = 5  # steps of a round that are not measured: they follow the other arms' turns
PARAMS = RequestParams(min_tokens=MIN_TOKENS, eos_token_id=EOS_TOKEN_ID, stop_token_ids=STOP_TOKEN_IDS)


@dataclass(frozen=True)
class ReadBy:
    """An arm: who reads."""

    runner: bool
    num_processes: int


ARMS = {
    "nobody": ReadBy(False, 0),
    "the runner": ReadBy(True, 0),
    "another process": ReadBy(False, 1),
    "two other processes": ReadBy(False, 2),
    "the runner and another": ReadBy(True, 1),
}


class Readers:
    """Processes that read a book."""

    def __init__(self, address: str, number: int) -> None:
        command = [sys.executable, "-m", "asyncbook.bench.outputs_reader", address]
        self._processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(number)]
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise click.ClickException("a reader's process could not start")

    def send_signal(self, number: int) -> None:
        """To each of them."""
        for process in self._processes:
            process.send_signal(number)

    def results(self) -> list[dict[str, Any]]:
        """What each of them got, once the book is closed."""
        return [json.loads(process.communicate()[0]) for process in self._processes]


class Load:
    """All rows of a book, step by step; adds up what its readers should get."""

    def __init__(self, book: Book, num_rows: int, reads: bool) -> None:
        self.book, self._reads = book, reads
        rows = [book.admit(f"request-{row}", np.arange(NUM_PROMPT_TOKENS), PARAMS) for row in range(num_rows)]
        self.batch: Batch = book.batch(rows)
        self._patterns = np.random.default_rng(num_rows).integers(0, FIRST_STOP_ID, (NUM_PATTERNS, num_rows), np.int32)
        self._sums = self._patterns.sum(axis=1, dtype=np.int64).tolist()
        self.num_ids = self.sum_of_ids = self.num_ids_read = self.sum_of_ids_read = 0

    def submit(self) -> int:
        """One step."""
        pattern = (self.book.submitted_step + 1) % NUM_PATTERNS
        step = self.book.submit(self.batch, self._patterns[pattern])
        self.num_ids += self._patterns.shape[1]
        self.sum_of_ids += self._sums[pattern]
        return step

    def read(self) -> None:
        """The runner's own reading, where it reads."""
        if self._reads:
            for outputs in self.book.poll_outputs():
                self.num_ids_read += outputs.token_ids.size
                self.sum_of_ids_read += int(outputs.token_ids.sum(dtype=np.int64))

    def read_rest(self) -> None:
        """What waits for a runner that was away comes as it makes room."""
        deadline_s = time.monotonic() + REST_TIMEOUT_S
        while self._reads and self.num_ids_read < self.num_ids and time.monotonic() < deadline_s:
            self.read()

    def check(self, results: Sequence[dict[str, Any]]) -> None:
        """Raises where a reader got something else than was sampled."""
        expected = self.num_ids, self.sum_of_ids
        got = [(result["num_ids"], result["sum_of_ids"]) for result in results]
        got += [(self.num_ids_read, self.sum_of_ids_read)] if self._reads else []
        if any(each != expected for each in got):
            raise click.ClickException(f"readers got {got} (ids, sum of ids), expected {expected}")


@dataclass
class Opened:
    """An arm's book, its readers and what its steps cost the runner."""

    load: Load
    readers: Readers
    submit_ns: list[int] = field(default_factory=list)
    read_ns: list[int] = field(default_factory=list)

    def close(self) -> list[dict[str, Any]]:
        """Compares what came."""
        self.load.read_rest()
        self.load.book.close()
        results = self.readers.results()
        self.load.check(results)
        return results


def _open(arm: ReadBy, num_rows: int, num_steps: int, stack: ExitStack, **options: Any) -> Opened:
    config = BookConfig(
        max_num_reqs=num_rows,
        max_model_len=NUM_PROMPT_TOKENS + num_steps + 1,
        vocab_size=VOCAB_SIZE,
        transport="ring",
        runner_reads_outputs=arm.runner,
        **options,
    )
    book = stack.enter_context(asyncbook.spawn(config))
    readers = Readers(book.address, arm.num_processes)
    return Opened(Load(book, num_rows, arm.runner), readers)


def measure_throughput(arm: ReadBy, num_rows: int, num_steps: int) -> dict[str, Any]:
    """Steps a second, as fast as they are taken, and the CPU time of each process in microseconds a step."""
    with ExitStack() as stack:
        opened = _open(arm, num_rows, num_steps, stack, max_in_flight=8)
        load, book = opened.load, opened.load.book
        pid = book.sidecar_pid
        assert pid is not None
        sidecar_s, runner_s, start_s = cpu_s(pid), time.process_time(), time.monotonic()
        for _ in range(num_steps):
            book.wait_room()
            load.submit()
            load.read()
        book.wait_applied(book.submitted_step)
        seconds = time.monotonic() - start_s
        runner_s, sidecar_s = time.process_time() - runner_s, cpu_s(pid) - sidecar_s
        results = opened.close()
    return {
        "steps_per_s": round(num_steps / seconds, 1),
        "tokens_per_s": round(num_steps * num_rows / seconds, 1),
        "runner_us": round(1e6 * runner_s / num_steps, 1),
        "sidecar_us": round(1e6 * sidecar_s / num_steps, 1),
        "reader_us": [round(1e6 * result["cpu_s"] / num_steps, 1) for result in results],
        "max_lag_bytes": max((result["max_lag_bytes"] for result in results), default=0),
    }


def measure_paced(num_rows: int, num_steps: int, interval_ms: float) -> dict[str, Any]:
    """By arm: what `submit` and reading took of the runner's time, in turns."""
    rounds = -(-num_steps // (STEPS_PER_ROUND - UNTIL_WARM))
    with ExitStack() as stack:
        opened = {name: _open(arm, num_rows, rounds * STEPS_PER_ROUND, stack) for name, arm in ARMS.items()}
        for _ in range(rounds):
            for each in opened.values():
                _pace(each, interval_ms)
        for each in opened.values():
            each.close()
    return {
        name: {"submit_us": percentiles_us(each.submit_ns), "read_us": percentiles_us(each.read_ns)}
        for name, each in opened.items()
    }


def _pace(opened: Opened, interval_ms: float) -> None:
    load = opened.load
    for number in range(STEPS_PER_ROUND):
        start_ns = time.monotonic_ns()
        step = load.submit()
        submit_ns = time.monotonic_ns() - start_ns
        time.sleep(interval_ms / 2e3)
        load.book.wait_applied(step)
        read_start_ns = time.monotonic_ns()
        load.read()
        read_ns = time.monotonic_ns() - read_start_ns
        if number >= UNTIL_WARM:
            opened.submit_ns.append(submit_ns)
            opened.read_ns.append(read_ns)
        time.sleep(max(interval_ms / 1e3 - (time.monotonic_ns() - start_ns) / 1e9, 0))


def _memory_mib(book: Book) -> dict[str, float]:
    """Resident memory of the book's shared part, and of its sidecar alone."""
    status = Path(f"/proc/{book.sidecar_pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    shared_bytes = os.fstat(book._segment.descriptor).st_blocks * 512
    return {"book": round(shared_bytes / (1 << 20), 1), "sidecar": round(int(fields["RssAnon"].split()[0]) / 1024, 1)}


@contextmanager
def _paused(readers: Readers) -> Iterator[None]:
    readers.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        readers.send_signal(signal.SIGCONT)


def measure_memory(arm: ReadBy, num_rows: int, num_tokens: int) -> dict[str, Any]:
    """MiB before and after so many tokens that no reader takes; then all of them must come."""
    num_steps = -(-num_tokens // num_rows)
    with ExitStack() as stack:
        opened = _open(arm, num_rows, num_steps, stack)
        load, book = opened.load, opened.load.book
        with _paused(opened.readers):
            before = _memory_mib(book)
            for _ in range(num_steps):
                book.wait_room()
                load.submit()
            book.wait_applied(book.submitted_step)
            after = _memory_mib(book)
        opened.close()
    return {"num_tokens": num_steps * num_rows, "before_mib": before, "after_mib": after}


def _print(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="as fast as the sidecar takes them; CPU us a step", title_justify="left")
    for heading in ("read by", "steps/s", "runner", "sidecar", "readers", "lag MiB"):
        table.add_column(heading, justify="left" if heading == "read by" else "right", no_wrap=True)
    for name, arm in results["throughput"].items():
        readers = ", ".join(f"{us:,.0f}" for us in arm["reader_us"]) or "-"
        lag = f"{arm['max_lag_bytes'] / (1 << 20):.1f}"
        table.add_row(
            name, f"{arm['steps_per_s']:,.0f}", f"{arm['runner_us']:,.0f}", f"{arm['sidecar_us']:,.0f}", readers, lag
        )
    console.print(table)
    table = Table(title="paced: the runner's us a step", title_justify="left")
    for heading in ("read by", "submit", "p99", "read", "p99"):
        table.add_column(heading, justify="left" if heading == "read by" else "right", no_wrap=True)
    for name, arm in results["paced"].items():
        numbers = [arm[key][percent] for key in ("submit_us", "read_us") for percent in ("p50", "p99")]
        table.add_row(name, *(f"{number:,.0f}" for number in numbers))
    console.print(table)
    for name, arm in results["memory"].items():
        before, after = arm["before_mib"], arm["after_mib"]
        console.print(
            f"{arm['num_tokens']:,} tokens that {name} does not read: book {before['book']} to {after['book']} MiB, "
            f"sidecar {before['sidecar']} to {after['sidecar']} MiB"
        )


@click.command("outputs")
@click.option("--rows", type=click.IntRange(1), default=256, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=20_000, show_default=True, help="Of each arm, unpaced.")
@click.option("--paced-steps", type=click.IntRange(1), default=300, show_default=True, help="Of each arm, paced.")
@click.option("--interval-ms", type=click.FloatRange(0.1), default=5.0, show_default=True, help="From step to step.")
@click.option("--tokens", type=click.IntRange(1), default=1_000_000, show_default=True, help="That nobody reads.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Writes everything there.")
def outputs_command(
    rows: int, steps: int, paced_steps: int, interval_ms: float, tokens: int, json_path: Path | None
) -> None:
    """Outputs read by the runner, by other processes or by nobody: steps a second, the runner's time, memory."""
    command = f"asyncbook bench outputs --rows {rows} --steps {steps} --paced-steps {paced_steps}"
    about = describe_run(f"{command} --interval-ms {interval_ms:g} --tokens {tokens}")
    results = {
        "throughput": {name: measure_throughput(arm, rows, steps) for name, arm in ARMS.items()},
        "paced": measure_paced(rows, paced_steps, interval_ms),
        "memory": {name: measure_memory(ARMS[name], rows, tokens) for name in ("the runner", "another process")},
    }
    if json_path is not None:
        json_path.write_text(json.dumps({"about": about, **results}, indent=1))
    _print(results)
