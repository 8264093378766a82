"""The pictures: cost against rows, distributions, and a few steps on a time axis. Fit for a talk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

if TYPE_CHECKING:
    from asyncbook.bench.engine_loop import LoopRun

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


SPAN_COLORS = {"forward": "#c9d6e8", "submit": "#b5202f", "outputs": "#e98a94", "wait": "#f2a33a", "apply": "#2e8b57"}
SHOWN_STEPS = 10
BEFORE, AFTER = ("loop", 0), ("sidecar ring", 1)  # arm and lag: engines today, and with asyncbook


def draw_overlap(path: Path, cases: Sequence[Case], runs: Sequence[LoopRun], note: str) -> None:
    """Ten steps before and after at the largest size, and how much of the bookkeeping shows between passes."""
    num_rows = max(case["rows"] for case in cases)
    chosen = [case for case in cases if case["rows"] == num_rows]
    shown = {run.way: run for run in runs if len(run.timeline.device) > SHOWN_STEPS}
    ways = [f"{arm}, lag {lag}, {num_rows} rows" for arm, lag in (BEFORE, AFTER)]
    found = [shown[way] for way in ways if way in shown] or list(shown.values())[-2:]
    figure = _figure(14, 3.2 + 2.2 * len(found), f"ten steps, {num_rows} rows", note)
    *timelines, bars = figure.subplots(len(found) + 1, 1, height_ratios=[*[1] * len(found), 1.3], squeeze=False)[:, 0]
    width_ns = max((_window(run)[1] for run in found), default=1)
    for axes, run in zip(timelines, found, strict=True):
        _draw_steps(axes, run, width_ns)
    if timelines:
        used = [Patch(color=color, label=name) for name, color in SPAN_COLORS.items()]
        timelines[0].legend(handles=used, ncols=len(used), fontsize=8, loc="lower right", bbox_to_anchor=(1, 1))
    _draw_exposed(bars, chosen)
    figure.savefig(path, dpi=120)


def _window(run: LoopRun) -> tuple[int, int]:
    """Start and length, in ns, of ten steps in the middle of the run's last stretch."""
    passes = run.timeline.device
    first = max(len(passes) - 2 * SHOWN_STEPS, 0)
    last = min(first + SHOWN_STEPS, len(passes) - 1)
    return passes[first].start_ns, passes[last].start_ns - passes[first].start_ns


def _draw_steps(axes: Axes, run: LoopRun, width_ns: int) -> None:
    start_ns = _window(run)[0]
    timeline = run.timeline
    lanes = {"forward": timeline.device, "runner": timeline.runner, "bookkeeper": timeline.bookkeeper}
    for place, spans in enumerate(lanes.values()):
        for span in spans:
            if span.name in SPAN_COLORS and span.end_ns > start_ns and span.start_ns < start_ns + width_ns:
                left, length = (span.start_ns - start_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
                color = SPAN_COLORS[span.name]
                axes.barh(place, length, left=left, height=0.7, color=color, edgecolor=color, linewidth=0.6)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    axes.set_xlim(0, width_ns / 1e6)
    axes.set_xlabel("ms")
    axes.set_title(run.way, fontsize=10, loc="left")


def _draw_exposed(axes: Axes, cases: Sequence[Case]) -> None:
    """Exposed bookkeeping a step by arm, a bar a lag."""
    names = [name for name in _arms(cases) if name != "forward only"]
    height = 0.8 / max(len(cases), 1)
    for place, case in enumerate(cases):
        values = [max(case["arms"].get(name, {}).get("exposed_us", 0.0), 0.5) for name in names]
        positions = [index + place * height for index in range(len(names))]
        colors, alpha = [COLORS.get(name, OTHER_COLOR) for name in names], 1.0 if case["lag"] else 0.5
        bars = axes.barh(positions, values, height=0.9 * height, color=colors, alpha=alpha)
        axes.bar_label(bars, [f" lag {case['lag']}: {value:,.0f} us" for value in values], fontsize=7)
    axes.set_yticks([index + 0.4 - height / 2 for index in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_title(
        "exposed bookkeeping: us a step between passes, beyond the passes alone (log)", fontsize=10, loc="left"
    )
    _log_axis(axes.xaxis)
