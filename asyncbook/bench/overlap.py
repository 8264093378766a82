"""`asyncbook bench overlap`: what of the bookkeeping is hidden behind a forward pass. `engine_loop.py` runs it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncbook.bench.about import command_line, describe_run, make_console, note, write_json
from asyncbook.bench.critical_path import ARM_NAMES, open_workloads, remark_on
from asyncbook.bench.options import choices, import_extra, numbers, tokenizer_option
from asyncbook.bench.story import Story
from asyncbook.bench.workloads import WORKLOADS, make_steps

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from asyncbook.bench.engine_loop import LoopRun

FORWARD_KINDS = ("sleep", "spin", "model")  # those of `engine_loop.FORWARDS`
QUICK: dict[str, Any] = {"rows": (256,), "lags": (0, 1), "steps": 30}
STRETCH_STEPS = 30

Case = dict[str, Any]  # forward, forward_ms, workload, rows, lag, and by arm what `engine_loop.summary` says


@click.command("overlap")
@click.option("--forward", type=click.Choice(FORWARD_KINDS), default="sleep", show_default=True,
              help="A device beside the CPU, a busy CPU, or the demo's model on the CPU.")  # fmt: skip
@click.option("--forward-ms", type=click.FloatRange(0.05), default=5.0, show_default=True, help="Not for the model.")
@click.option("--workload", type=click.Choice(list(WORKLOADS)), default="everything", show_default=True)
@click.option("--rows", callback=numbers(1), default="64,256,1024", show_default=True)
@click.option("--lags", callback=choices(("0", "1")), default="0,1", show_default=True)
@click.option("--steps", type=click.IntRange(2), default=240, show_default=True, help="To count, for each arm.")
@click.option("--arms", callback=choices(ARM_NAMES), help=f"Some of {','.join(ARM_NAMES)}.  [default: all]")
@tokenizer_option
@click.option("--quick", is_flag=True, help="One size, 30 steps: about 20 seconds.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Writes everything there.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draws ten steps there.")
@click.option("--trace", "trace_path", type=click.Path(dir_okay=False, path_type=Path),
              help="Every call of every arm, for ui.perfetto.dev.")  # fmt: skip
@click.pass_context
def overlap_command(
    context: click.Context,
    forward: str,
    forward_ms: float,
    workload: str,
    rows: tuple[int, ...],
    lags: tuple[str, ...],
    steps: int,
    arms: tuple[str, ...] | None,
    tokenizer: Path | None,
    quick: bool,
    json_path: Path | None,
    plot_path: Path | None,
    trace_path: Path | None,
) -> None:
    """An engine's loop around a forward pass: how much of the bookkeeping the pass hides.

    Lag 0 waits for the book before the next pass, lag 1 launches at once and reads a step later. "gap": between two
    passes; "exposed": beyond that of the passes alone; "work": bookkeeping of a step, wherever it is done; "hidden":
    its share that is not exposed; "CPU": of a step, runner + sidecar. Ctrl-C shows what was measured until then.
    """
    import_extra(plot=plot_path is not None)
    lag_numbers = tuple(int(lag) for lag in lags)
    if quick:
        rows, lag_numbers, steps = QUICK["rows"], QUICK["lags"], QUICK["steps"]
    about = describe_run(command_line(context, "bench overlap"))
    console = make_console(about)
    with open_workloads(console, (workload,), tokenizer) as (_, story):
        cases, runs, is_complete = _run(
            console, forward, forward_ms, workload, rows, lag_numbers, steps, arms or ARM_NAMES, story
        )
    if json_path is not None:
        write_json(json_path, about, {"complete": is_complete, "cases": cases})
    if trace_path is not None:
        from asyncbook.demo.trace import write_trace

        write_trace([run for run in runs if run.timeline.runner], trace_path, about)
    if plot_path is not None and cases:
        from asyncbook.bench.pictures import draw_overlap

        draw_overlap(plot_path, cases, runs, note(about))


def _run(
    console: Console, kind: str, forward_ms: float, workload: str, rows: tuple[int, ...], lags: tuple[int, ...],
    num_steps: int, arms: tuple[str, ...], story: Story | None,
) -> tuple[list[Case], list[LoopRun], bool]:  # fmt: skip
    """Measures with a progress bar, and shows a table as each case is done."""
    from rich.progress import Progress

    from asyncbook.bench.arms import ARMS
    from asyncbook.bench.delivered import ArmsDiffer
    from asyncbook.bench.engine_loop import FORWARDS, measure, summary

    openers = {name: ARMS[name] for name in ARMS if name in arms}
    cases: list[Case] = []
    all_runs: list[LoopRun] = []
    stretch = min(STRETCH_STEPS, num_steps)
    total_steps = stretch * (1 + -(-num_steps // stretch))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(rows) * len(lags) * (total_steps // stretch))
        for num_rows, lag in ((num_rows, lag) for num_rows in rows for lag in lags):
            case: Case = {"forward": kind, "forward_ms": forward_ms, "workload": workload, "rows": num_rows, "lag": lag}
            progress.update(task, description=f"{num_rows} rows, lag {lag}")
            steps = make_steps(WORKLOADS[workload], num_rows, total_steps, story=story)
            make_forward = partial(FORWARDS[kind], forward_ms)
            try:
                runs, is_complete = measure(steps, openers, make_forward, lag, stretch, lambda: progress.advance(task))
            except ArmsDiffer as error:
                raise click.ClickException(f"{num_rows} rows, lag {lag}: {error}") from error
            case["arms"] = summary(runs)
            for run in runs:
                run.way = f"{run.way}, lag {lag}, {num_rows} rows"
            all_runs += runs
            if case["arms"]:
                cases.append(case)
                console.print(case_table(case))
            if not is_complete:
                console.print("interrupted: what is above was measured", style="bold")
                return cases, all_runs, False
    return cases, all_runs, True


def case_table(case: Case) -> Table:
    """One line an arm."""
    from rich.table import Table

    length = "" if case["forward"] == "model" else f" of {case['forward_ms']:g} ms"
    title = (
        f"\n{case['workload']}, {case['rows']} rows, lag {case['lag']}, forward pass ({case['forward']}){length}; us"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = remark_on(case), "left"
    for heading in ("arm", "steps/s", "tokens/s", "gap", "p99", "exposed", "work", "hidden", "lag", "CPU"):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for name, arm in case["arms"].items():
        gap, lag = arm["gap_us"], "-" if arm["lag_mean"] is None else f"{arm['lag_mean']:.2f}"
        hidden = "-" if arm["hidden"] is None else f"{100 * arm['hidden']:.0f} %"
        us = [f"{value:,.0f}" for value in (gap["p50"], gap["p99"], arm["exposed_us"], arm["work_us"])]
        cpu = f"{arm['runner_cpu_us']:.0f}+{arm['sidecar_cpu_us']:.0f}"
        table.add_row(name, f"{arm['steps_per_s']:.1f}", f"{arm['tokens_per_s']:,.0f}", *us, hidden, lag, cpu)
    return table
