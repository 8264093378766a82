"""`asyncbook demo`: the same requests with the books kept in three ways, side by side."""

from __future__ import annotations

from pathlib import Path

import click

from asyncbook.demo import CannotRun

WAYS = ("loop", "embedded", "sidecar")


@click.command("demo")
@click.option("--model", type=click.Choice(["smollm2", "random"]), default="smollm2", show_default=True)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSONL instead of our 24.",
)
@click.option("--rows", type=click.IntRange(1), default=8, show_default=True, help="Requests that run at a time.")
@click.option("--max-tokens", type=click.IntRange(1), default=48, show_default=True, help="Where a prompt sets none.")
@click.option("--device", default="cpu", show_default=True, help='"cpu", "cuda" or "cuda:N".')
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="demo-out", show_default=True)
@click.option("--ways", default=",".join(WAYS), show_default=True, help="Which, in which order.")
@click.option("--no-live", is_flag=True, help="Plain lines, as when the output is not a terminal.")
def demo_command(
    model: str, prompts: Path | None, rows: int, max_tokens: int, device: str, out: Path, ways: str, no_live: bool
) -> None:
    """Runs a real model on real prompts, with n-gram drafts, and keeps the books in three ways: by a loop over the
    rows, by an embedded book, by a sidecar process.

    Shows the texts as they grow, proves that all ways give the same outputs and the same frame after every step, and
    tells what bookkeeping cost the thread that launches forward passes. Leaves a picture and a Perfetto trace.
    """
    chosen = tuple(way.strip() for way in ways.split(","))
    if len(set(chosen)) < len(chosen) or not set(chosen) <= set(WAYS):
        raise click.BadParameter(f"{ways!r} is not some of {','.join(WAYS)}", param_hint="--ways")
    try:
        from asyncbook.demo.show import Setting, show
    except ModuleNotFoundError as error:
        raise click.ClickException(f'{error.name} is missing: pip install "asyncbook[demo]"') from error
    try:
        identical = show(Setting(model, prompts, rows, max_tokens, device, out, chosen, live=not no_live))
    except CannotRun as error:
        raise click.ClickException(str(error)) from error
    if not identical:
        raise SystemExit(1)
