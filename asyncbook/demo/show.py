"""The whole demo: load, run every way, compare, report."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from asyncbook import BookConfig
from asyncbook.demo import CannotRun, report, results, weights
from asyncbook.demo.bookkeeping import open_way
from asyncbook.demo.engine import NUM_SPEC_TOKENS, PREFILL_CHUNK, Engine, leave_a_core
from asyncbook.demo.live import Display
from asyncbook.demo.model import Llama
from asyncbook.demo.prompts import make_requests, read_prompts
from asyncbook.demo.results import Result
from asyncbook.demo.runner import Request, Runner
from asyncbook.demo.tokenizer import Tokenizer


@dataclass(frozen=True)
class Setting:
    """The demo's options. `prompts` None: our own."""

    model: str
    prompts: Path | None
    rows: int
    max_tokens: int
    device: str
    out: Path
    ways: Sequence[str]
    live: bool


def show(setting: Setting) -> bool:
    """Runs the demo; True when all ways came to the same."""
    console = Console()
    device = _device(setting.device)
    if device.type == "cpu":
        num_threads = leave_a_core()
        console.print(f"forward passes on {num_threads} CPU thread(s) in every way, to leave a core for the sidecar")
    prompts = read_prompts(setting.prompts, setting.rows)
    began_s = time.monotonic()
    model, tokenizer = weights.load(setting.model, device)
    console.print(f"loaded {setting.model} in {time.monotonic() - began_s:.1f} s")
    runs = []
    with Display(console, tokenizer, setting.ways, setting.live and console.is_terminal) as display:
        for way in setting.ways:
            gc.collect()
            requests = make_requests(prompts, tokenizer, setting.max_tokens)
            runs.append(_run_way(way, setting, model, tokenizer, requests, display))
    found = [text for run in runs for text in results.own_differences(run)]
    found += [text for run in runs[1:] for text in results.differences(runs[0], run)]
    _tell(runs, found, console)
    _leave_behind(setting, runs, console)
    return not found


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CannotRun(f"device {name!r}: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise CannotRun(f'device {name!r} is not "cpu", "cuda" or "cuda:N"')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CannotRun(f"device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def _run_way(
    way: str, setting: Setting, model: Llama, tokenizer: Tokenizer, requests: list[Request], display: Display
) -> Result:
    lengths = [len(request.prompt_token_ids) + (request.params.max_tokens or 0) for request in requests]
    config = BookConfig(
        max_num_reqs=setting.rows,
        max_model_len=max(lengths),
        vocab_size=tokenizer.vocab_size,
        num_spec_tokens=NUM_SPEC_TOKENS,
    )
    engine = Engine(model, setting.rows, config.max_model_len, PREFILL_CHUNK)
    engine.warm_up()
    with open_way(way, config) as book:
        runner = Runner(book, engine, requests)
        display.begin(way, len(requests))
        began_s = time.monotonic()
        runner.run(display.after_step)
        seconds = time.monotonic() - began_s
        result = results.collect(way, runner, book.spec_decode_stats(), tokenizer, seconds)
    display.end(sum(len(request.token_ids) for request in requests), len(result.columns))
    return result


def _tell(runs: Sequence[Result], found: Sequence[str], console: Console) -> None:
    console.print(report.answers_table(runs[0]))
    console.print(report.acceptance_table(runs[0].acceptance))
    console.print(report.cost_table(runs))
    console.print(report.parts_table(runs))
    ways = ", ".join(run.way for run in runs)
    if found:
        console.print(f"[bold red]NOT identical[/]: {ways}")
        for text in found:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    elif len(runs) > 1:
        what = f"{len(runs[0].answers)} outputs, every column of {len(runs[0].columns)} frames, draft counters"
        console.print(f"[bold green]identical[/]: {ways}; {what}", soft_wrap=True)


def _leave_behind(setting: Setting, runs: Sequence[Result], console: Console) -> None:
    from asyncbook.demo.picture import write_picture
    from asyncbook.demo.trace import write_trace

    setting.out.mkdir(parents=True, exist_ok=True)
    picture, trace = setting.out / "demo.png", setting.out / "demo-trace.json"
    write_picture(runs, f"{setting.model} on {setting.device}, {setting.rows} rows", picture)
    write_trace(runs, trace)
    text = f"picture: {picture}\ntrace:   {trace} (open it at https://ui.perfetto.dev)"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
