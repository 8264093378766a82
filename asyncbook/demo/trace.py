"""The timelines in the Chrome trace event format, which ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncbook.demo.timeline import Span, Timeline

LANES = ("runner", "device", "bookkeeper")  # threads of a way's process in the viewer


class Traced(Protocol):
    """A way and what happened when, a demo's or a benchmark's."""

    @property
    def way(self) -> str: ...

    @property
    def timeline(self) -> Timeline: ...


def trace_events(results: Sequence[Traced]) -> list[dict[str, Any]]:
    """One process a way and one thread a lane; each way starts at 0. Arrows lead from a submit to its apply."""
    events: list[dict[str, Any]] = []
    for pid, result in enumerate(results, 1):
        events.append(_name("process_name", pid, 0, f"{result.way}"))
        origin_ns = result.timeline.runner[0].start_ns
        for tid, lane in enumerate(LANES, 1):
            spans: list[Span] = getattr(result.timeline, lane)
            if spans:
                events.append(_name("thread_name", pid, tid, lane))
                events += (_complete(span, pid, tid, origin_ns) for span in spans)
        events += _arrows(result, pid, origin_ns)
    return events


def write_trace(results: Sequence[Traced], path: Path, about: dict[str, Any] | None = None) -> None:
    """`about`: the run, for whoever finds the file."""
    trace = {"traceEvents": trace_events(results), "displayTimeUnit": "ns", "otherData": about or {}}
    path.write_text(json.dumps(trace))


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(span: Span, pid: int, tid: int, origin_ns: int) -> dict[str, Any]:
    """Times are microseconds."""
    start_us, duration_us = (span.start_ns - origin_ns) / 1000, (span.end_ns - span.start_ns) / 1000
    args = {"step": span.step}
    return {"ph": "X", "name": span.name, "pid": pid, "tid": tid, "ts": start_us, "dur": duration_us, "args": args}


def _arrows(result: Traced, pid: int, origin_ns: int) -> list[dict[str, Any]]:
    """A flow from each submit to the apply of its step."""
    applies = {span.step: span for span in result.timeline.bookkeeper}
    arrows = []
    for submit in (span for span in result.timeline.runner if span.name == "submit"):
        if (apply := applies.get(submit.step)) is not None:
            flow = {"name": "delta", "cat": "delta", "id": pid * 1_000_000 + submit.step, "pid": pid}
            ends = (("s", "runner", submit.start_ns), ("f", "bookkeeper", max(apply.start_ns, submit.start_ns)))
            for phase, lane, at_ns in ends:
                tid = 1 + LANES.index(lane)
                arrows.append({**flow, "ph": phase, "bp": "e", "tid": tid, "ts": (at_ns - origin_ns) / 1000})
    return arrows
