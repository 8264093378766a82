"""`asyncbook bench crossover`: from which number of rows on, and for which work, a sidecar pays on this machine.

Two questions, each answered by medians of one run with all arms. For the runner's thread alone: from which size on is
`submit` to a sidecar cheaper than doing the step in place, embedded or by the loop. And what the step costs in all, on
both cores: a sidecar moves work away and adds some, so where both cores are busy anyway it does not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncbook.bench.about import command_line, describe_run, make_console, note, write_json
from asyncbook.bench.critical_path import Case, open_workloads, run_cases
from asyncbook.bench.options import choices, import_extra, numbers, tokenizer_option
from asyncbook.bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from rich.table import Table

ARMS = ("loop", "embedded", "sidecar zmq", "sidecar ring")
PAIRS = (("embedded", "loop"), ("sidecar zmq", "loop"), ("sidecar ring", "loop"), ("sidecar zmq", "embedded"),
         ("sidecar ring", "embedded"))  # fmt: skip
QUICK_ROWS, QUICK_STEPS = (1, 16, 256), 25


@click.command("crossover")
@click.option("--workloads", callback=choices(tuple(WORKLOADS)), help="Some of them.  [default: all]")
@click.option("--rows", callback=numbers(1), default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096", show_default=True)
@click.option("--interval-ms", type=click.FloatRange(0.1), default=5.0, show_default=True, help="From step to step.")
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True, help="To count, for each arm.")
@tokenizer_option
@click.option("--quick", is_flag=True, help="One workload, three sizes, 25 steps: about 20 seconds.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Writes everything there.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draws a picture there.")
@click.pass_context
def crossover_command(
    context: click.Context,
    workloads: tuple[str, ...] | None,
    rows: tuple[int, ...],
    interval_ms: float,
    steps: int,
    tokenizer: Path | None,
    quick: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """From which number of rows on, and for which work, one way of keeping the book beats another on this machine.

    docs/choosing.md explains the choice. Ctrl-C shows what was measured until then.
    """
    import_extra(plot=plot_path is not None)
    chosen = workloads or (("plain",) if quick else tuple(WORKLOADS))
    rows, steps = (QUICK_ROWS, QUICK_STEPS) if quick else (tuple(sorted(rows)), steps)
    about = describe_run(command_line(context, "bench crossover"))
    console = make_console(about)
    with open_workloads(console, chosen, tokenizer) as (chosen, story):
        cases, is_complete = run_cases(console, chosen, rows, (interval_ms,), steps, ARMS, show=False, story=story)
    found = crossovers(cases)
    if cases:
        console.print(cost_table(cases), crossover_table(found, rows))
    if json_path is not None:
        write_json(json_path, about, {"complete": is_complete, "crossovers": found, "cases": cases})
    if plot_path is not None and cases:
        from asyncbook.bench.pictures import draw_critical_path

        draw_critical_path(plot_path, cases, note(about))


def crossovers(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """By workload and pair of arms: the least number of rows from which on the first is cheaper for the runner at
    every size that was measured; None where it is not at the largest one."""
    found = []
    for workload in dict.fromkeys(case["workload"] for case in cases):
        chosen = sorted((c for c in cases if c["workload"] == workload), key=lambda c: c["rows"], reverse=True)
        for cheaper, other in PAIRS:
            least = None
            for case in chosen:
                costs = [_us(case, arm) for arm in (cheaper, other)]
                if None in costs or not costs[0] < costs[1]:  # type: ignore[operator]
                    break
                least = case["rows"]
            found.append({"workload": workload, "arm": cheaper, "beats": other, "from_rows": least})
    return found


def _us(case: Case, arm: str, what: str = "runner_us") -> float | None:
    """Median in microseconds."""
    figures = case["arms"].get(arm)
    return None if figures is None else float(figures[what]["p50"])


def cost_table(cases: Sequence[Case]) -> Table:
    """Medians of the runner's thread, and behind them what the sidecar works on the step."""
    from rich.table import Table

    title = "\nus of the runner a step, + of the sidecar"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for heading in ("workload", "rows", *ARMS):
        table.add_column(heading, justify="left" if heading == "workload" else "right", no_wrap=True)
    for case in cases:
        cells = []
        for arm in ARMS:
            runner, apply = _us(case, arm), _us(case, arm, "apply_us")
            text = "-" if runner is None else f"{runner:,.0f}"
            cells.append(f"{text} + {apply:,.0f}" if arm.startswith("sidecar") and apply is not None else text)
        table.add_row(case["workload"], f"{case['rows']:,}", *cells)
    return table


def crossover_table(found: Sequence[dict[str, Any]], rows: Sequence[int]) -> Table:
    """One line a workload, one column a pair."""
    from rich.table import Table

    title = "\ncheaper for the runner from this many rows on"
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for heading in ("workload", *(f"{arm} < {other}" for arm, other in PAIRS)):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    for workload in dict.fromkeys(line["workload"] for line in found):
        lines = [line["from_rows"] for line in found if line["workload"] == workload]
        table.add_row(workload, *(f"not to {max(rows):,}" if n is None else f"{n:,}" for n in lines))
    return table
