"""The tables: acceptance of drafts, and what bookkeeping cost the runner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from asyncbook import SpecDecodeStats
from asyncbook.demo.results import Result
from asyncbook.demo.timeline import COST, FORWARD

PERCENTILES = (50, 90, 99, 100)


def acceptance_table(stats: SpecDecodeStats) -> Table:
    table = Table(title="n-gram drafts", title_justify="left")
    for heading in ("drafts", "draft tokens", "accepted", "mean acceptance length", "acceptance per position"):
        table.add_column(heading, justify="right")
    table.add_row(
        str(stats.num_drafts),
        str(stats.num_draft_tokens),
        str(stats.num_accepted_tokens),
        f"{stats.mean_acceptance_length:.2f}",
        " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_pos),
    )
    return table


def cost_table(results: Sequence[Result]) -> Table:
    """Microseconds a step of the runner's thread; waiting stands apart."""
    table = Table(title="what bookkeeping cost the runner's thread", title_justify="left")
    table.add_column("way")
    for heading in (
        "p50 us",
        "p90 us",
        "p99 us",
        "max us",
        "total ms",
        "waited ms",
        "forward p50 ms",
        "steps",
        "run s",
    ):
        table.add_column(heading, justify="right")
    for result in results:
        cost = result.cost_us
        forward_ms = result.timeline.per_step_us((FORWARD,)) / 1000
        table.add_row(
            result.way,
            *(f"{value:,.0f}" for value in np.percentile(cost, PERCENTILES)),
            f"{cost.sum() / 1000:.2f}",
            f"{result.wait_us.sum() / 1000:.2f}",
            f"{np.median(forward_ms):.1f}",
            str(len(result.columns)),
            f"{result.seconds:.1f}",
        )
    return table


def parts_table(results: Sequence[Result]) -> Table:
    """The same cost by call, in milliseconds of the whole run."""
    table = Table(title="by call, ms in total", title_justify="left")
    table.add_column("way")
    for heading in (*COST, "wait"):
        table.add_column(heading, justify="right")
    for result in results:
        totals = (result.timeline.per_step_us((name,)).sum() / 1000 for name in (*COST, "wait"))
        table.add_row(result.way, *(f"{total:.2f}" for total in totals))
    return table
