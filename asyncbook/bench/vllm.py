"""`asyncbook bench vllm`: what bookkeeping costs in real vLLM, stock and with the plugin, in one run.

The engines live in one process and take turns of a few steps, so that a busy moment of the machine hits all of them.
Every request runs from the first step to the last; steps with prefills are not counted. What the arms decoded is
compared at the end. With `--layers` the model is cut to so many layers and its weights are made up: then a step is
short, and there are many. Step times and tokens/s say something about an engine only with the whole model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

from asyncbook.bench.vllm_engines import MAX_PROMPT_TOKENS, MODES, PARTS, Arm, add_requests, make_arm

TURN = 10
GOALS = {"_bookkeeping_sync": 90, "update_from_output": 60}  # percent less, from 256 requests on
SMALL_VOCAB = 4096
# What a step costs beside the model. Who starts the garbage collector pays for it: look at the sum, too.
BOOKKEEPING = tuple(part for part in PARTS if part != "step")
TOGETHER = "these together"


def measure(arms: list[Arm], num_requests: int, num_steps: int, vocab_size: int, seed: int) -> dict[str, Any]:
    """Runs the requests on all arms in turns. By arm: microseconds of each part, and whether outputs agree."""
    for arm in arms:
        add_requests(arm, num_requests, num_steps + TURN, vocab_size, seed)
    for arm in arms:
        # Until every request decodes, and a turn more.
        while arm.scheduler.waiting or any(request.num_output_tokens == 0 for request in arm.scheduler.running):
            arm.step()
        for _ in range(2):
            arm.step()
        arm.forget()
    while all(arm.engine.has_unfinished_requests() for arm in arms):
        for arm in arms:
            for _ in range(TURN):
                if arm.num_steps < num_steps - TURN and arm.engine.has_unfinished_requests():
                    arm.step()
        if all(arm.num_steps >= num_steps - TURN for arm in arms):
            break
    measured = {arm.mode: _percentiles(arm) for arm in arms}
    for arm in arms:
        while arm.engine.has_unfinished_requests():
            arm.step()
    outputs = [arm.outputs for arm in arms]
    for arm in arms:
        arm.forget()
        arm.outputs = {}
    is_equal = all(other == outputs[0] for other in outputs)
    return {"requests": num_requests, "arms": measured, "outputs_equal": is_equal}


def _percentiles(arm: Arm) -> dict[str, Any]:
    shown: dict[str, Any] = {"steps": arm.num_steps}
    for part in (*PARTS, TOGETHER):
        us, cpu_us = of_part(arm.ns, part), of_part(arm.cpu_ns, part)
        shown[part] = {f"p{percent}": float(np.percentile(us, percent)) for percent in (50, 99)}
        shown[part] |= {f"cpu_p{percent}": float(np.percentile(cpu_us, percent)) for percent in (50, 99)}
    shown["tokens_per_s"] = arm.num_tokens / (sum(arm.ns["step"]) / 1e9)
    return shown


def of_part(ns: dict[str, list[int]], part: str) -> np.ndarray:
    """Microseconds of a part, step by step."""
    parts = BOOKKEEPING if part == TOGETHER else (part,)  # a step has each once
    us: np.ndarray = np.array([ns[other] for other in parts]).sum(axis=0) / 1000
    return us


def less(cell: dict[str, Any], mode: str, part: str, percentile: str) -> float:
    """How many percent less a part takes than in stock vLLM."""
    mine, stock = (cell["arms"][arm][part][percentile] for arm in (mode, "stock"))
    return 100 * (1 - float(mine) / float(stock))


KINDS = ("p50", "p99", "cpu_p50", "cpu_p99")


def table(cells: list[dict[str, Any]]) -> str:
    """What was measured, a line a part and arm, in microseconds; and how much less it is than in stock vLLM."""
    lines = [f"requests  {'part':20s} {'arm':9s}" + "".join(f"{kind:>10s}  less" for kind in KINDS)]
    for cell in cells:
        for part in (*BOOKKEEPING, TOGETHER, "step"):
            for mode, arm in cell["arms"].items():
                line = f"{cell['requests']:8d}  {part:20s} {mode:9s}"
                for kind in KINDS:
                    line += f"{arm[part][kind]:10.0f}"
                    line += "      " if mode == "stock" else f"{less(cell, mode, part, kind):5.0f}%"
                lines.append(line)
        rates = ", ".join(f"{mode} {arm['tokens_per_s']:,.0f}" for mode, arm in cell["arms"].items())
        lines.append(f"{cell['requests']:8d}  tokens/s: {rates}; outputs equal: {cell['outputs_equal']}")
    return "\n".join(lines)


@click.command("vllm")
@click.option("--model", required=True, type=click.Path(exists=True), help="A checkpoint folder.")
@click.option("--requests", "sizes", default="64,256,1024", show_default=True)
@click.option("--steps", default=210, show_default=True)
@click.option("--layers", default=1, show_default=True, help="0: the whole model with its weights.")
@click.option("--modes", default="stock,embedded", show_default=True, help=f"Of {', '.join(MODES)}.")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def vllm_command(
    model: str, sizes: str, steps: int, layers: int, modes: str, seed: int, json_path: Path | None
) -> None:
    """Real vLLM, stock against the plugin."""
    num_requests = [int(size) for size in sizes.split(",")]
    options: dict[str, Any] = {
        "max_model_len": MAX_PROMPT_TOKENS + steps + 2 * TURN,
        "max_num_seqs": max(num_requests),
        "max_num_batched_tokens": 4096,
        "enforce_eager": True,
        "seed": 0,
        "disable_log_stats": False,
    }
    vocab_size = SMALL_VOCAB
    if layers:
        options |= {
            "load_format": "dummy",
            "hf_overrides": {"num_hidden_layers": layers, "vocab_size": SMALL_VOCAB},
            "skip_tokenizer_init": True,
        }
    arms = [make_arm(mode, model, **options) for mode in modes.split(",")]
    cells = [measure(arms, size, steps, vocab_size, seed) for size in num_requests]
    print(table(cells))
    if json_path is not None:
        settings = {"steps": steps, "layers": layers, "seed": seed, "goals_percent_less": GOALS}
        json_path.write_text(json.dumps({"settings": settings, "cells": cells}, indent=1) + "\n")
    for arm in arms:
        arm.engine.engine_core.shutdown()
    if not all(cell["outputs_equal"] for cell in cells):
        sys.exit("the arms decoded different tokens")
