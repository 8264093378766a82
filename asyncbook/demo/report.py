"""The tables: acceptance of drafts, and what bookkeeping cost the runner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from asyncbook import SpecDecodeStats
from asyncbook.demo.results import Result
from asyncbook.demo.timeline import COST, WAIT

PERCENTILES = (50, 90, 99, 100)
SHOWN_ANSWERS = 24


def answers_table(result: Result) -> Table:
    """One line a request, of the first ones."""
    table = Table(box=None, expand=True)
    table.add_column("request", no_wrap=True, ratio=1)
    table.add_column("answer", no_wrap=True, ratio=3)
    for answer in list(result.answers.values())[:SHOWN_ANSWERS]:
        table.add_row(*(Text(" ".join(text.split()), overflow="ellipsis") for text in (answer.prompt, answer.text)))
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
    return table


def acceptance_table(stats: SpecDecodeStats) -> Table:
    headings = ("drafts", "draft tokens", "accepted", "mean acceptance length", "per position")
    table = _table("n-gram drafts", *headings)
    table.add_row(
        str(stats.num_drafts),
        str(stats.num_draft_tokens),
        str(stats.num_accepted_tokens),
        f"{stats.mean_acceptance_length:.2f}",
        " ".join(f"{rate:.2f}".removeprefix("0") for rate in stats.acceptance_rate_per_pos),
    )
    return table


def cost_table(results: Sequence[Result]) -> Table:
    """Microseconds a step of the runner's thread; waiting stands apart."""
    headings = ("way", "p50", "p90", "p99", "max", "total ms", "waited ms", "forward ms", "run s")
    table = _table("bookkeeping on the runner's thread, us a step", *headings)
    for result in results:
        cost = result.cost_us
        table.add_row(
            result.way,
            *(f"{value:,.0f}" for value in np.percentile(cost, PERCENTILES)),
            f"{cost.sum() / 1000:.2f}",
            f"{result.wait_us.sum() / 1000:.2f}",
            f"{result.forward_ms:.1f}",
            f"{result.seconds:.1f}",
        )
    return table


def parts_table(results: Sequence[Result]) -> Table:
    """The same by call, for the whole run."""
    table = _table("the same by call, ms in total", "way", *COST, WAIT)
    for result in results:
        totals = (result.timeline.per_step_us((name,)).sum() / 1000 for name in (*COST, WAIT))
        table.add_row(result.way, *(f"{total:.2f}" for total in totals))
    return table
