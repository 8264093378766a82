"""What `asyncbook bench updates` shows and leaves: tables, budgets beside the measured, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from asyncbook.bench.update_arms import APPEND, FUSED, LEDGER, LISTS, LOOP, OPERATOR, VLLM
from asyncbook.bench.update_cells import Cell
from asyncbook.bench.update_run import Result, Times

TITLES = {
    "columns": "the two 1-D arrays",
    "tokens": "the 1-D arrays and token_ids",
    "mask": "is_token_ids, a numpy array",
    "tensor": "is_token_ids, a torch tensor",
    "step": "the 1-D arrays, token_ids and is_token_ids",
    "peer": "all of vLLM's _bookkeeping_sync, on its own objects",
}


def _microseconds(ns: float) -> str:
    us = ns / 1e3
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def _factor(speedup: float) -> str:
    return f"{speedup:.2f}x" if speedup < 10 else f"{speedup:.0f}x"


def _cell_text(times: Times, is_first: bool) -> str:
    spread = 50 * (times.p75_ns - times.p25_ns) / times.p50_ns
    text = f"{_microseconds(times.p50_ns)} [dim]±{spread:.0f}% ({_microseconds(times.p99_ns)})[/]"
    if is_first:
        return text
    color = "red" if times.speedup < 1 else "green"
    return f"{text} [{color}]{_factor(times.speedup)}[/]"


def work_table(work: str, results: Sequence[Result]) -> Table:
    """One line a cell: microseconds a call, and how many times faster than the first arm."""
    chosen = [result for result in results if result.cell.work == work]
    title = f"\n{TITLES[work]}: us a call (p50, half the interquartile range, p99), times faster than the loop"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for heading in ("rows", "changed", "ids", *(times.arm for times in chosen[0].times)):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in chosen:
        cell = result.cell
        texts = [_cell_text(times, index == 0) for index, times in enumerate(result.times)]
        table.add_row(f"{cell.size:,}", f"{cell.num_rows:,}", cell.ids, *texts)
    return table


@dataclass(frozen=True)
class Budget:
    """One line of the comparison with the budgets, by the worst cell of those that it is about. `measured` and `least`
    say how many times faster; `least` None: no budget."""

    what: str
    least: float | None
    measured: float
    where: str


def _worst(
    results: Iterable[Result], choose: Callable[[Cell], bool], ratio: Callable[[Result], float | None]
) -> tuple[float, str] | None:
    found = [(value, str(r.cell)) for r in results if choose(r.cell) and (value := ratio(r)) is not None]
    return min(found) if found else None


def _speedup(arm: str, over: str = LOOP) -> Callable[[Result], float | None]:
    """How many times faster one arm is than another."""

    def ratio(result: Result) -> float | None:
        times, base = result.of(arm), result.of(over)
        return None if times is None or base is None else times.speedup / base.speedup

    return ratio


def _slowest_fused(result: Result) -> float | None:
    speedups = [times.speedup for arm in FUSED if (times := result.of(arm)) is not None]
    return min(speedups) if speedups else None


def budgets(results: Sequence[Result]) -> list[Budget]:
    """Those of the design that the cells can answer."""

    def is_batch(ids: str) -> Callable[[Cell], bool]:
        return lambda c: (
            c.work in ("tokens", "step") and c.ids == ids and 256 <= c.size <= 1024 and c.num_rows == c.size
        )

    def is_tensor(num_rows: int) -> Callable[[Cell], bool]:
        return lambda c: c.work == "tensor" and c.size == 256 and c.num_rows == num_rows

    def is_any(cell: Cell) -> bool:
        return True

    whole, ragged = "all of 256 to 1,024 rows, 1 id each", "the same, 1..6 ids each"
    lines: list[tuple[str, float | None, tuple[float, str] | None]] = [
        (f"fused kernel / loop, {whole}", 50.0, _worst(results, is_batch("1"), _speedup(APPEND))),
        (f"fused kernel / loop, {ragged}", None, _worst(results, is_batch("1..6"), _speedup(APPEND))),
        (f"fused kernel / PR's lists, {whole}", 10.0, _worst(results, is_batch("1"), _speedup(APPEND, LISTS))),
        ("fused kernel / loop, any cell", 1.0, _worst(results, is_any, _slowest_fused)),
        (f"whole step by the ledger / loop, {whole}", None, _worst(results, is_batch("1"), _speedup(LEDGER))),
        ("whole step by the ledger / loop, any cell", None, _worst(results, is_any, _speedup(LEDGER))),
        ("operator / torch loop, all of 256 rows", 50.0, _worst(results, is_tensor(256), _speedup(OPERATOR))),
        ("operator / torch loop, one of 256 rows", None, _worst(results, is_tensor(1), _speedup(OPERATOR))),
        ("our loop / real vLLM, any cell", 1.0, _worst(results, is_any, _speedup(LOOP, VLLM))),
    ]
    return [Budget(what, least, *worst) for what, least, worst in lines if worst is not None]


def budget_table(lines: Sequence[Budget]) -> Table:
    table = Table(title="\nbudgets, by the worst cell of each", title_justify="left", title_style="bold", box=None)
    for heading in ("what", "budget", "measured", "where"):
        table.add_column(heading, justify="left" if heading in ("what", "where") else "right")
    for line in lines:
        color = "green" if line.least is None or line.measured >= line.least else "red"
        least = "-" if line.least is None else f"{line.least:.0f}x"
        table.add_row(line.what, least, f"[{color}]{_factor(line.measured)}[/]", line.where)
    return table


def write_json(path: Path, about: dict[str, Any], results: Sequence[Result], is_complete: bool) -> None:
    """One object: about the run, then every cell with its arms."""
    cells = [asdict(result.cell) | {"arms": [asdict(times) for times in result.times]} for result in results]
    report = about | {"complete": is_complete, "budgets": [asdict(line) for line in budgets(results)], "cells": cells}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
