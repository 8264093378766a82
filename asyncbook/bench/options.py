"""Options that several benchmarks have: lists with commas between their parts, and the tokenizer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

tokenizer_option = click.option(
    "--tokenizer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A tokenizer.json, for workloads with text.  [default: SmolLM2's, where it is installed]",
)
Callback = Callable[[click.Context, click.Parameter, str | None], Any]


def choices(allowed: Sequence[str]) -> Callback:
    """A callback for an option that takes some of these."""

    def convert(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
        if value is None:
            return None
        chosen = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
        if not set(chosen) <= set(allowed):
            raise click.BadParameter(f"{value!r} is not some of {','.join(allowed)}")
        return chosen

    return convert


def numbers(least: float) -> Callback:
    """A callback for an option that takes numbers of at least `least`; whole ones where that is an int."""
    kind = type(least)

    def convert(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, ...] | None:
        if value is None:
            return None
        try:
            found = tuple(kind(part) for part in value.split(","))
        except ValueError:
            found = ()
        if not found or not min(found) >= least:
            raise click.BadParameter(f"{value!r} is not a list of numbers of at least {least}")
        return found

    return convert


def import_extra(plot: bool) -> None:
    """Says which extra to install where something is missing."""
    try:
        for module in ("rich", *(["matplotlib"] if plot else [])):
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise click.ClickException(f'{error.name} is missing: pip install "asyncbook[bench]"') from error
