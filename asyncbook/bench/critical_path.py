"""`asyncbook bench critical-path`: what the runner pays a step, paced as an engine is, all arms in one run.

How steps are paced, and what is done about missed sends, is in `pacing.py`; what is done, in `workloads.py`; who does
it, in `arms.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncbook.bench.about import command_line, describe_run, make_console, note, write_json
from asyncbook.bench.options import choices, import_extra, numbers, tokenizer_option
from asyncbook.bench.story import Story, open_story
from asyncbook.bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from asyncbook.bench.arms import OpenArm
    from asyncbook.bench.pacing import Pace

ARM_NAMES = ("loop", "numpy (PR)", "embedded", "thread", "sidecar zmq", "sidecar ring")  # those of `arms.ARMS`
QUICK: dict[str, Any] = {"workloads": ("plain",), "rows": (16, 256), "intervals_ms": (5.0,), "steps": 50}

Case = dict[str, Any]  # workload, rows, interval_ms, and by arm what `pacing.summary` says, with the distribution


@click.command("critical-path")
@click.option("--workloads", callback=choices(tuple(WORKLOADS)), default="plain,drafts,stops,logprobs,text",
              show_default=True, help=f"Some of {','.join(WORKLOADS)}.")  # fmt: skip
@click.option("--rows", callback=numbers(1), default="1,8,64,256,1024,4096", show_default=True)
@click.option("--interval-ms", "intervals_ms", callback=numbers(0.1), default="5", show_default=True,
              help="From step to step; several with commas.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="To count, for each arm.")
@click.option("--arms", callback=choices(ARM_NAMES), help=f"Some of {','.join(ARM_NAMES)}.  [default: all]")
@tokenizer_option
@click.option("--peer", type=click.Choice(["vllm"]), help="Real vLLM's functions as well, where it is importable.")
@click.option("--quick", is_flag=True, help="One workload, two sizes, 50 steps: about 20 seconds.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Writes everything there.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draws a picture there.")
@click.pass_context
def critical_path_command(
    context: click.Context,
    workloads: tuple[str, ...],
    rows: tuple[int, ...],
    intervals_ms: tuple[float, ...],
    steps: int,
    arms: tuple[str, ...] | None,
    tokenizer: Path | None,
    peer: str | None,
    quick: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """What the runner pays a step, paced as an engine is, all arms side by side; results are compared in the run.

    Percentiles of the call in microseconds; "due" counts from when the step was due, where earlier ones made it late;
    "publ." from the call until a reader could see the step. Ctrl-C shows what was measured until then.
    """
    import_extra(plot=plot_path is not None)
    if quick:
        workloads, rows, intervals_ms, steps = QUICK["workloads"], QUICK["rows"], QUICK["intervals_ms"], QUICK["steps"]
    about = describe_run(command_line(context, "bench critical-path"))
    console = make_console(about)
    with open_workloads(console, workloads, tokenizer) as (workloads, story):
        cases, is_complete = run_cases(
            console, workloads, rows, intervals_ms, steps, arms or ARM_NAMES, peer, story=story
        )
    if json_path is not None:
        write_json(json_path, about, {"complete": is_complete, "cases": cases})
    if plot_path is not None and cases:
        from asyncbook.bench.pictures import draw_critical_path

        draw_critical_path(plot_path, cases, note(about))


@contextmanager
def open_workloads(
    console: Console, names: tuple[str, ...], tokenizer: Path | None
) -> Iterator[tuple[tuple[str, ...], Story | None]]:
    """The workloads that can be run here, and the story for those with text. Raises `click.ClickException` where none
    is left."""
    with ExitStack() as stack:
        story = None
        if any(WORKLOADS[name].has_text for name in names):
            try:
                story = stack.enter_context(open_story(tokenizer))
            except click.ClickException as error:
                names = tuple(name for name in names if not WORKLOADS[name].has_text)
                if not names:
                    raise
                console.print(f"workloads with text are left out: {error.message}")
        yield names, story


def run_cases(
    console: Console,
    workloads: tuple[str, ...],
    rows: tuple[int, ...],
    intervals_ms: tuple[float, ...],
    num_steps: int,
    arms: tuple[str, ...],
    peer: str | None = None,
    show: bool = True,
    story: Story | None = None,
) -> tuple[list[Case], bool]:
    """Measures with a progress bar, and shows a table as each case is done. False where Ctrl-C ended it early."""
    from rich.progress import Progress

    from asyncbook.bench.delivered import ArmsDiffer
    from asyncbook.bench.pacing import histogram_us, measure, summary

    if peer == "vllm":
        _say_what_vllm_does(console, workloads)
    cases: list[Case] = []
    with Progress(console=console, transient=True) as progress:
        todo = list(_cases(workloads, rows, intervals_ms, num_steps))
        task = progress.add_task("", total=sum(pace.num_rounds for _, _, pace in todo))
        for name, num_rows, pace in todo:
            case: Case = {"workload": name, "rows": num_rows, "interval_ms": pace.interval_ms}
            progress.update(task, description=f"{name}, {num_rows} rows, {pace.interval_ms:g} ms")
            openers = _openers(arms, peer, name)
            try:
                measured = measure(
                    WORKLOADS[name], num_rows, pace, openers, lambda: progress.advance(task), story=story
                )
            except ArmsDiffer as error:
                raise click.ClickException(f"{name}, {num_rows} rows: {error}") from error
            case["arms"] = summary(measured)
            for arm, figures in case["arms"].items():
                figures["runner_histogram"] = histogram_us(measured.costs[arm].runner_ns)
            if case["arms"]:
                cases.append(case)
                if show:
                    console.print(case_table(case))
            if not measured.is_complete:
                console.print("interrupted: what is above was measured", style="bold")
                return cases, False
    return cases, True


def _cases(
    workloads: tuple[str, ...], rows: tuple[int, ...], intervals_ms: tuple[float, ...], num_steps: int
) -> Iterator[tuple[str, int, Pace]]:
    from asyncbook.bench.pacing import Pace

    for interval_ms in intervals_ms:
        for name in workloads:
            for num_rows in rows:
                yield name, num_rows, Pace(interval_ms, num_steps, round_steps=min(25, num_steps))


def _openers(arms: tuple[str, ...], peer: str | None, workload: str) -> dict[str, OpenArm]:
    from asyncbook.bench.arms import ARMS

    openers = {name: ARMS[name] for name in ARMS if name in arms}
    if peer == "vllm":
        from asyncbook.bench.vllm_arms import VLLM_ARMS, can_run

        if can_run(workload):
            openers |= VLLM_ARMS
    return openers


def _say_what_vllm_does(console: Console, workloads: tuple[str, ...]) -> None:
    from asyncbook.bench.vllm_arms import can_run

    others = [name for name in workloads if not can_run(name)]
    if others:
        console.print(f"vLLM's functions are left out of {', '.join(others)}: each does a part of that work, or more")


def case_table(case: Case) -> Table:
    """One line an arm."""
    from rich.table import Table

    title = (
        f"\n{case['workload']}, {case['rows']} rows, a step each {case['interval_ms']:g} ms: us of the runner a step"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = remark_on(case), "left"
    headings = ("arm", "p50", "p90", "p99", "max", "due p99", "late", "of loop", "publ. p50", "p99")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for name, arm in case["arms"].items():
        corrected, published = arm["corrected_us"], arm["published_us"]
        cells = [*arm["runner_us"].values(), corrected["p99"]]
        share = f"{100 * arm['share_of_loop']['p50']:.1f} %" if "share_of_loop" in arm else "-"
        late = f"{100 * arm['share_late']:.0f} %"
        ends = (late, share, f"{published['p50']:,.0f}", f"{published['p99']:,.0f}")
        table.add_row(name, *(f"{us:,.0f}" for us in cells), *ends)
    return table


def remark_on(case: Case) -> str | None:
    """A line under a table: what its reader has to know of an arm."""
    return WORKLOADS[case["workload"]].remark if "numpy (PR)" in case["arms"] else None
