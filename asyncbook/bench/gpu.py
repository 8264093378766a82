"""`asyncbook bench gpu`: what a device is spared, in one script of under four minutes. Nothing waits for its results
but itself: each part checks what it measured, and a failed check ends the run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

DECODE_ARMS = ("loop", "embedded", "sidecar")


def measure(device: str, tiny: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """All parts. `tiny`: seconds, for figures that say nothing."""
    from asyncbook.bench import gpu_decode, gpu_parts
    from asyncbook.bench.gpu_platform import Platform

    platform = Platform(device)
    sizes = (3,) if tiny else (64, 256, 1024)
    model = gpu_decode.TINY if tiny else gpu_decode.Size()
    results: dict[str, Any] = {"card": platform.card}
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("registration", lambda: [gpu_parts.registration(platform, n) for n in sizes]),
        ("random steps", lambda: gpu_parts.random_steps(platform, *((4, 50) if tiny else (64, 100_000)))),
        ("submit", lambda: [gpu_parts.submit_costs(platform, n, 10 if tiny else 300) for n in sizes]),
        ("frame", lambda: [gpu_parts.frame_copies(platform, n, 5 if tiny else 300) for n in sizes]),
        (
            "decode",
            lambda: [
                gpu_parts.decode(platform, arm, n, 10 if tiny else 500, model) for n in sizes for arm in DECODE_ARMS
            ],
        ),
    ]
    for name, part in parts:
        start_s = time.monotonic()
        results[name] = part()
        say(f"{name}: {time.monotonic() - start_s:.1f} s")
    return results


def table(results: dict[str, Any]) -> Any:
    """The results in one short table."""
    from rich.table import Table

    shown = Table(title=f"{results['card']}: us are medians", title_justify="left")
    for heading in ("what", "rows", "measured"):
        shown.add_column(heading, justify="left")
    for item in results["registration"]:
        how = "pinned" if item["pinned"] else "pageable"
        shown.add_row("pages registered", f"{item['rows']:,}", f"{item['ms']} ms for {item['bytes']:,} bytes, {how}")
    steps = results["random steps"]
    shown.add_row("random steps", f"{steps['rows']:,}", f"{steps['steps']:,} in {steps['s']} s, {steps['wrong']} wrong")
    for title, key in (("runner, a step", "submit"), ("frame to the device", "frame")):
        for item in results[key]:
            arms = [f"{name} {cost['p50_us']:,.0f} us" for name, cost in item.items() if isinstance(cost, dict)]
            shown.add_row(title, f"{item['rows']:,}", "; ".join(arms))
    for item in results["decode"]:
        idle, rate = f"{100 * item['idle']:.1f} % idle", f"{item['steps_per_s']:,.0f} steps/s"
        shown.add_row(f"decode, {item['arm']}", f"{item['rows']:,}", f"{rate}, {idle}")
    return shown


@click.command("gpu")
@click.option("--device", default="cuda:0", show_default=True, help='"fake" runs without a GPU, for no figures.')
@click.option("--tiny", is_flag=True, help="A few steps of everything: seconds, to see whether it works.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Writes everything there.")
def gpu_command(device: str, tiny: bool, json_path: Path | None) -> None:
    """Pinned pages, steps straight from the device, frames to it, and decode steps with each kind of bookkeeping."""
    from rich.console import Console

    from asyncbook.bench.about import describe_run

    console = Console()
    about = describe_run(f"asyncbook bench gpu --device {device}{' --tiny' if tiny else ''}")
    results = measure(device, tiny, lambda line: console.print(line, style="dim"))
    if json_path is not None:
        json_path.write_text(json.dumps({"about": about, **results}, indent=1))
    console.print(table(results))
