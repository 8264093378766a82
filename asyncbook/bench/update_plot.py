"""The picture of `asyncbook bench updates`: how many times faster than the loop, over the share of rows that change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from asyncbook.bench.update_cells import WORKS
from asyncbook.bench.update_report import TITLES
from asyncbook.bench.update_run import Result

COLORS = ("#3066be", "#d17a22", "#2e8b57", "#8d6b94", "#b5202f")
LINE_STYLES = {"1": "-", "6": ":", "1..6": "--"}


def write_plot(path: Path, results: Sequence[Result], note: str) -> None:
    """A row of panels a work, a panel a size, a line an arm; solid for one id a row, dotted 6, dashed 1..6."""
    works = [work for work in WORKS if any(result.cell.work == work for result in results)]
    sizes = sorted({result.cell.size for result in results if result.cell.work in works})
    figure = Figure(figsize=(3.4 * len(sizes) + 2.4, 3.0 * len(works) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"times faster than the per-row loop\n{note}", fontsize=10)
    panels = figure.subplots(len(works), len(sizes), squeeze=False)
    for work, line in zip(works, panels, strict=True):
        for size, axes in zip(sizes, line, strict=True):
            _draw(axes, [r for r in results if r.cell.work == work and r.cell.size == size])
            axes.set_title(f"{size:,} rows", fontsize=9)
        line[0].set_ylabel("\n".join(wrap(TITLES[work], 30)), fontsize=8)
        handles, labels = line[0].get_legend_handles_labels()
        line[-1].legend(handles, labels, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=110)


def _draw(axes: Axes, results: Sequence[Result]) -> None:
    axes.axhline(1.0, color="black", linewidth=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rows that change, %", fontsize=8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    for ids, style in LINE_STYLES.items():
        chosen = sorted((r for r in results if r.cell.ids == ids), key=lambda r: r.cell.num_rows)
        for index, arm in enumerate(times.arm for times in (chosen[0].times[1:] if chosen else ())):
            found = [(r, times) for r in chosen if (times := r.of(arm)) is not None]
            shares = [100 * r.cell.num_rows / r.cell.size for r, _ in found]
            label = arm if ids == results[0].cell.ids else None
            color = COLORS[index % len(COLORS)]
            axes.plot(shares, [t.speedup for _, t in found], style, marker=".", color=color, label=label, linewidth=1.2)
