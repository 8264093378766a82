"""`asyncbook doctor`: what a book finds on this machine, and what to do about what it lacks. Needs `asyncbook[cli]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from asyncbook.doctor_checks import Finding, Status, run_checks
from asyncbook.ipc.layout import MAX_POSITIONS, MAX_ROWS, Layout

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 80
COLORS: dict[Status, str] = {"ok": "green", "warning": "yellow", "error": "bold red"}


def make_table(findings: Sequence[Finding]) -> Table:
    """One line or several a finding, at most `WIDTH` columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0), width=WIDTH)
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold", ratio=3)
    table.add_column("what to do", overflow="fold", ratio=2)
    for finding in findings:
        # As Text: "asyncbook[text]" and what stands in a path is no markup.
        status = Text(finding.status, COLORS[finding.status])
        table.add_row(finding.name, status, Text(finding.found), Text(finding.remedy))
    return table


def _layout(num_rows: int | None, max_len: int | None) -> Layout | None:
    """Of the book that is meant. What is no part of its size is whatever it is by default."""
    if num_rows is None and max_len is None:
        return None
    if num_rows is None or max_len is None:
        raise click.UsageError("--rows and --len say together how large the book will be")
    from asyncbook.config import BookConfig

    return BookConfig(max_num_reqs=num_rows, max_model_len=max_len, vocab_size=1).layout


@click.command("doctor")
@click.option("--rows", "num_rows", type=click.IntRange(1, MAX_ROWS), help="max_num_reqs of the book that is meant.")
@click.option("--len", "max_len", type=click.IntRange(1, MAX_POSITIONS), help="max_model_len of that book.")
@click.option("--json", "as_json", is_flag=True, help="A list of objects: name, status, found, remedy.")
@click.pass_context
def doctor_command(context: click.Context, num_rows: int | None, max_len: int | None, as_json: bool) -> None:
    """What a book finds on this machine, and what to do about what it lacks. Exit status 1 where something is an
    error."""
    findings = run_checks(_layout(num_rows, max_len))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        from rich.console import Console

        Console().print(make_table(findings))
    if any(finding.status == "error" for finding in findings):
        context.exit(1)
