"""The pictures: cost against rows, distributions, and a few steps on a time axis. Fit for a talk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

Case = dict[str, Any]
COLORS = {
    "loop": "#b5202f",
    "numpy (PR)": "#d17a22",
    "embedded": "#3066be",
    "thread": "#8d6b94",
    "sidecar zmq": "#5fb49c",
    "sidecar ring": "#1d7a3e",
    "forward only": "#777777",
}
OTHER_COLOR = "#444444"


def _figure(width: float, height: float, title: str, note: str) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    figure.supxlabel(note, fontsize=7, color="#666666")
    return figure


def _log_axis(axis: Any, unit: str = "") -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}{unit}"))
    axis.set_minor_formatter(NullFormatter())


def draw_critical_path(path: Path, cases: Sequence[Case], note: str) -> None:
    """A row of panels a workload and interval: cost against rows, the same as a multiple of the loop, and the
    distribution at the largest size up to 256 rows."""
    groups = list(dict.fromkeys((case["workload"], case["interval_ms"]) for case in cases))
    title = "what bookkeeping costs the runner a step"
    figure = _figure(16, 4.4 * len(groups) + 0.8, title, note)
    panels = figure.subplots(len(groups), 3, squeeze=False)
    for (workload, interval_ms), (cost, ratio, distribution) in zip(groups, panels, strict=True):
        chosen = [c for c in cases if (c["workload"], c["interval_ms"]) == (workload, interval_ms)]
        chosen.sort(key=lambda case: case["rows"])
        _draw_cost(cost, chosen)
        cost.set_title(f"{workload}, a step each {interval_ms:g} ms: median, p99 dotted", fontsize=10)
        _draw_ratio(ratio, chosen)
        shown = max((c for c in chosen if c["rows"] <= 256), key=lambda c: c["rows"], default=chosen[0])
        _draw_distribution(distribution, shown)
    figure.savefig(path, dpi=120)


def _series(cases: Sequence[Case], arm: str, percentile: str) -> tuple[list[int], list[float]]:
    found = [case for case in cases if arm in case["arms"]]
    return [c["rows"] for c in found], [c["arms"][arm]["runner_us"][percentile] for c in found]


def _arms(cases: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(arm for case in cases for arm in case["arms"]))


def _draw_cost(axes: Axes, cases: Sequence[Case]) -> None:
    for arm in _arms(cases):
        color = COLORS.get(arm, OTHER_COLOR)
        axes.plot(*_series(cases, arm, "p50"), marker="o", markersize=4, color=color, label=arm)
        axes.plot(*_series(cases, arm, "p99"), linestyle=":", linewidth=1, color=color)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rows")
    axes.set_ylabel("us a step")
    _log_axis(axes.xaxis)
    _log_axis(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_ratio(axes: Axes, cases: Sequence[Case]) -> None:
    """Median of each arm as a multiple of the loop's: below the line the loop is beaten."""
    axes.axhline(1.0, color=COLORS["loop"], linewidth=1.5)
    for arm in _arms(cases):
        found = [case for case in cases if arm != "loop" and {arm, "loop"} <= case["arms"].keys()]
        ratios = [c["arms"][arm]["runner_us"]["p50"] / c["arms"]["loop"]["runner_us"]["p50"] for c in found]
        color = COLORS.get(arm, OTHER_COLOR)
        axes.plot([case["rows"] for case in found], ratios, marker="o", markersize=4, color=color, label=arm)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title("as a multiple of the loop (1x)", fontsize=10)
    axes.set_xlabel("rows")
    _log_axis(axes.xaxis)
    _log_axis(axes.yaxis, "x")
    axes.grid(alpha=0.3)


def _draw_distribution(axes: Axes, case: Case) -> None:
    """Share of the steps that took at most so long."""
    for arm, figures in case["arms"].items():
        histogram = figures["runner_histogram"]
        shares = np.cumsum(histogram["counts"]) / sum(histogram["counts"])
        axes.step(histogram["upper_us"], 100 * shares, where="post", color=COLORS.get(arm, OTHER_COLOR), label=arm)
    axes.set_xscale("log")
    axes.set_ylim(0, 101)
    axes.set_title(f"distribution at {case['rows']} rows", fontsize=10)
    axes.set_xlabel("us a step, at most (log)")
    axes.set_ylabel("% of steps")
    _log_axis(axes.xaxis)
    axes.grid(alpha=0.3)
