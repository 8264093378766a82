"""The picture: a few steps on one time axis, a closer look at one step boundary, and the distribution of the cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from asyncbook.demo.results import Result
from asyncbook.demo.timeline import FORWARD, LAUNCH, WAIT, Span

SHOWN_STEPS = 4
CALLS = "other calls of the book"
COLORS = {
    FORWARD: "#c9d6e8",
    LAUNCH: "#9bb4d6",
    "submit": "#b5202f",
    CALLS: "#e98a94",
    WAIT: "#f2a33a",
    "apply": "#2e8b57",
}
WAY_COLORS = {"loop": "#d1495b", "embedded": "#3066be", "sidecar": "#2e8b57"}


def write_picture(results: Sequence[Result], title: str, path: Path) -> None:
    figure = Figure(figsize=(12, 11), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    steps, boundary, cost = figure.subplots(3, 1, height_ratios=(1.1, 1.1, 1.0))
    _draw_steps(steps, results)
    _draw_boundary(boundary, results)
    _draw_cost(cost, results)
    figure.savefig(path, dpi=130)


def _middle_step(result: Result) -> int:
    """A step well inside the run whose neighbours only decode, so that it shows the usual case."""
    admitting = {span.step for span in result.timeline.runner if span.name in ("admit", "batch")}
    last = len(result.columns)
    quiet = [step for step in range(2, last - SHOWN_STEPS) if not admitting & set(range(step, step + SHOWN_STEPS + 1))]
    return min(quiet or [1], key=lambda step: abs(step - last // 2))


def _lanes(result: Result) -> list[tuple[str, list[Span]]]:
    timeline = result.timeline
    bookkeeper = "bookkeeper" if result.way == "sidecar" else "bookkeeper (same thread)"
    lanes = [("runner", timeline.runner), ("device", timeline.device), (bookkeeper, timeline.bookkeeper)]
    return [(f"{result.way}: {name}", spans) for name, spans in lanes if spans]


def _draw_lanes(axes: Axes, results: Sequence[Result], starts_ns: Sequence[int], width_ns: int, unit_ns: float) -> None:
    """Every lane of every way, each way from its own start, in a window of `width_ns`."""
    names: list[str] = []
    for result, start_ns in zip(results, starts_ns, strict=True):
        for name, spans in _lanes(result):
            shown = [span for span in spans if span.end_ns > start_ns and span.start_ns < start_ns + width_ns]
            for span in shown:
                color = COLORS.get(span.name, COLORS[CALLS])
                left, length = (span.start_ns - start_ns) / unit_ns, (span.end_ns - span.start_ns) / unit_ns
                edge = "white" if span.name in (FORWARD, LAUNCH) else color
                axes.barh(len(names), length, left=left, height=0.7, color=color, edgecolor=edge, linewidth=0.8)
            names.append(name)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, width_ns / unit_ns)
    axes.grid(axis="x", alpha=0.3)


def _start(result: Result, step: int) -> int:
    """When the forward pass of `step` began, in ns."""
    passes = result.timeline.device or [span for span in result.timeline.runner if span.name == FORWARD]
    return next(span.start_ns for span in passes if span.step == step)


def _draw_steps(axes: Axes, results: Sequence[Result]) -> None:
    starts = [(_start(result, _middle_step(result)), result) for result in results]
    width_ns = max(_start(r, min(_middle_step(r) + SHOWN_STEPS, len(r.columns))) - start for start, r in starts)
    _draw_lanes(axes, results, [start for start, _ in starts], max(width_ns, 1), 1e6)
    axes.set_title(f"{SHOWN_STEPS} steps")
    axes.set_xlabel("ms")
    used = {span.name for result in results for span in result.timeline.runner}
    handles = [Patch(color=color, label=name) for name, color in COLORS.items() if name != LAUNCH or name in used]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(handles), frameon=False)


def _draw_boundary(axes: Axes, results: Sequence[Result]) -> None:
    """From just before a step is submitted to just after its apply and the launch of the next."""
    windows = []
    for result in results:
        step = _middle_step(result) + 1
        spans = [span for span in result.timeline.runner if span.step in (step, step + 1)]
        submit = next(span for span in spans if span.name == "submit")
        launch = next((span for span in spans if span.step == step + 1 and span.name in (FORWARD, LAUNCH)), submit)
        applied = [span.end_ns for span in result.timeline.bookkeeper if span.step == step]
        windows.append((submit.start_ns, max([launch.start_ns, *applied]) - submit.start_ns))
    margin_ns = 20_000
    width_ns = min(max(length for _, length in windows), 2_000_000) + 3 * margin_ns
    _draw_lanes(axes, results, [start - margin_ns for start, _ in windows], width_ns, 1e3)
    axes.set_title("between two forward passes, enlarged (gaps: the runner's own work)")
    axes.set_xlabel("us")


def _draw_cost(axes: Axes, results: Sequence[Result]) -> None:
    costs = {result.way: np.maximum(result.cost_us, 0.5) for result in results}
    everything = np.concatenate(list(costs.values()))
    bins = np.geomspace(everything.min() * 0.9, everything.max() * 1.1, 60)
    for way, cost in costs.items():
        label = f"{way}: p50 {np.median(cost):.0f} us, p99 {np.percentile(cost, 99):.0f} us"
        axes.hist(cost, bins=bins.tolist(), alpha=0.55, color=WAY_COLORS[way], label=label)
        axes.axvline(float(np.median(cost)), color=WAY_COLORS[way], linewidth=1.5)
    axes.set_xscale("log")
    axes.set_title("what bookkeeping cost the runner's thread, a step")
    axes.set_xlabel("us (log)")
    axes.set_ylabel("steps")
    axes.legend()
