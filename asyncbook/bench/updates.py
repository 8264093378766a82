"""`asyncbook bench updates`: batched updates against the per-row loop, at every size and share of rows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncbook.bench.about import command_line, describe_run, note
from asyncbook.bench.options import choices, numbers
from asyncbook.bench.update_cells import ID_COUNTS, SHARES, WORKS, make_cells

if TYPE_CHECKING:
    from asyncbook.bench.update_cells import Cell
    from asyncbook.bench.update_run import Result

SIZES = (10, 100, 256, 1000, 10000)
SECONDS = 0.5
QUICK_SIZES, QUICK_SHARES, QUICK_IDS, QUICK_SECONDS = (10, 256, 1000), ("one", "10%", "all"), ("1", "1..6"), 0.1


@click.command("updates")
@click.option("--quick", is_flag=True, help="A coarser look, in about 20 seconds.")
@click.option("--works", callback=choices(WORKS), help=f"Some of {','.join(WORKS)}.  [default: all]")
@click.option("--sizes", callback=numbers(1), help=f"Rows of the batch.  [default: {','.join(map(str, SIZES))}]")
@click.option("--shares", callback=choices(SHARES), help=f"Rows that change: some of {','.join(SHARES)}.")
@click.option("--ids", callback=choices(ID_COUNTS), help=f"New ids a row: some of {','.join(ID_COUNTS)}.")
@click.option("--seconds", type=click.FloatRange(0), help=f"To measure a cell, at least.  [default: {SECONDS}]")
@click.option("--shuffled", is_flag=True, help="Rows in any order, instead of ascending as in vLLM.")
@click.option("--calls", type=click.IntRange(1, 100), help="In a row, for one sample.  [default: 10 us of them]")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--peer", type=click.Choice(["vllm"]), help="Real vLLM's bookkeeping as well, where it is importable.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Writes everything there.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draws a picture there.")
@click.pass_context
def updates_command(
    context: click.Context,
    quick: bool,
    works: tuple[str, ...] | None,
    sizes: tuple[int, ...] | None,
    shares: tuple[str, ...] | None,
    ids: tuple[str, ...] | None,
    seconds: float | None,
    shuffled: bool,
    calls: int | None,
    seed: int,
    peer: str | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Batched updates against the per-row loop, side by side and checked for equal results.

    Work: the two 1-D arrays alone (columns); with token_ids (tokens); is_token_ids as a numpy array (mask) and as a
    torch tensor (tensor); all of them (step). Ctrl-C shows what was measured until then.
    """
    try:
        _import_all(plot_path is not None)
    except ModuleNotFoundError as error:
        raise click.ClickException(f'{error.name} is missing: pip install "asyncbook[bench]"') from error
    chosen_works = [work for work in works or WORKS if work != "tensor" or _has("torch", needed=works is not None)]
    chosen_sizes = sizes or (QUICK_SIZES if quick else SIZES)
    chosen_shares = shares or (QUICK_SHARES if quick else SHARES)
    chosen_ids = ids or (QUICK_IDS if quick else ID_COUNTS)
    cells = make_cells(chosen_works, chosen_sizes, chosen_shares, chosen_ids)
    if peer is not None:
        _has("vllm", needed=True)
        cells += make_cells(["peer"], chosen_sizes, ["all"], chosen_ids)
    seconds = (QUICK_SECONDS if quick else SECONDS) if seconds is None else seconds
    measure = partial(_measure, seconds=seconds, seed=seed, shuffled=shuffled, calls=calls)
    _run(cells, measure, command_line(context, "bench updates"), json_path, plot_path)


def _import_all(with_plot: bool) -> None:
    import asyncbook.bench.update_report
    import asyncbook.bench.update_run

    if with_plot:
        import asyncbook.bench.update_plot  # noqa: F401


def _has(module: str, needed: bool) -> bool:
    if importlib.util.find_spec(module) is not None:
        return True
    if needed:
        raise click.ClickException(f"{module} is not importable here")
    click.echo(f"{module} is not importable here: its cells are left out", err=True)
    return False


def _measure(cell: Cell, **settings: Any) -> Result:
    from asyncbook.bench.update_run import Settings, run_cell

    if cell.work == "peer":
        from asyncbook.bench.update_vllm import run_peer_cell

        return run_peer_cell(cell, Settings(**settings))
    return run_cell(cell, Settings(**settings))


def _run(
    cells: Sequence[Cell], run: Callable[[Cell], Result], command: str, json_path: Path | None, plot_path: Path | None
) -> None:
    """Measures with a progress bar, then shows and writes."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from asyncbook.bench import update_report
    from asyncbook.bench.update_run import ArmsDiffer, run_all

    console = Console()
    if not console.is_terminal:
        console.width = 200
    about = describe_run(command)
    results: list[Result] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cells))

        def run_shown(cell: Cell) -> Result:
            progress.update(task, description=str(cell))
            return run(cell)

        def keep(cell: Cell, result: Result) -> None:
            results.append(result)
            progress.advance(task)

        try:
            is_complete = run_all(cells, run_shown, keep)
        except ArmsDiffer as error:
            raise click.ClickException(str(error)) from error
    for work in dict.fromkeys(result.cell.work for result in results):
        console.print(update_report.work_table(work, results))
    if results:
        console.print(update_report.budget_table(update_report.budgets(results)))
    if not is_complete:
        console.print(f"interrupted after {len(results)} of {len(cells)} cells", style="bold")
    if json_path is not None:
        update_report.write_json(json_path, about, results, is_complete)
    if plot_path is not None and results:
        from asyncbook.bench.update_plot import write_plot

        write_plot(plot_path, results, note(about))
