"""`asyncbook bench text`: ids become text in which two stop strings a request are looked for, all arms in one run.

One token a row and step. In each round every arm does a few steps, so that a busy moment of the machine hits all of
them. Text comes in natural language; the stop strings never occur in it until the run's last steps, though it is full
of their first letters. What the arms deliver is compared with the text that the library decodes at once.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np

from asyncbook.bench.story import LAST_WORDS, STOP, open_story, story_text
from asyncbook.ipc import jit
from asyncbook.worker.text import TextRows

STEPS_PER_ROUND = 20
WARM_UP_STEPS = 20
GOAL = 300_000
TABLE, STRINGS, STREAMS, VLLM = "table", "table, a str each", "DecodeStream", "vLLM process_outputs"


@dataclass
class Costs:
    """Nanoseconds of each step: of the processor, and by the clock on the wall, which goes on while others run."""

    cpu_ns: list[int] = field(default_factory=list)
    wall_ns: list[int] = field(default_factory=list)


class Stopwatch:
    """`with Stopwatch(costs): ...`: one step."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def __enter__(self) -> None:
        self._wall_ns, self._cpu_ns = time.monotonic_ns(), time.thread_time_ns()

    def __exit__(self, *exception: object) -> None:
        self._costs.cpu_ns.append(time.thread_time_ns() - self._cpu_ns)
        self._costs.wall_ns.append(time.monotonic_ns() - self._wall_ns)


class Arm(Protocol):
    """Rows of text. `step` takes one id a row, int32 [rows]."""

    @property
    def texts(self) -> list[str]: ...

    @property
    def stopped_by(self) -> list[str | None]: ...

    def step(self, ids: np.ndarray, costs: Costs) -> None: ...


class RowsArm:
    """`TextRows`: what is new of each step as one buffer, or as a `str` a row."""

    def __init__(
        self,
        tokenizer: Path,
        prompts: Sequence[list[int]],
        stop: Sequence[str],
        *,
        uses_table: bool,
        makes_strings: bool,
    ) -> None:
        num_rows = len(prompts)
        self._text = TextRows(tokenizer, num_rows, uses_table=uses_table)
        self._makes_strings = makes_strings
        for row, prompt in enumerate(prompts):
            self._text.open(row, prompt, stop=stop)
        self._rows = np.arange(num_rows, dtype=np.int32)
        self._ones, self._none = np.ones(num_rows, np.int32), np.zeros(num_rows, np.bool_)
        self._pieces: list[list[str]] = [[] for _ in prompts]

    def step(self, ids: np.ndarray, costs: Costs) -> None:
        text, rows = self._text, self._rows
        with Stopwatch(costs):
            text.append(rows, ids, 1, self._ones, self._none)
            texts = text.take(rows, self._none)
            strings = texts.texts() if self._makes_strings else None
        for pieces, piece in zip(self._pieces, strings or texts.texts(), strict=True):
            pieces.append(piece)

    @property
    def texts(self) -> list[str]:
        return ["".join(pieces) for pieces in self._pieces]

    @property
    def stopped_by(self) -> list[str | None]:
        return [self._text.stop_string(row) for row in range(len(self._pieces))]


def has_vllm() -> bool:
    """Whether vLLM can be imported here."""
    return importlib.util.find_spec("vllm") is not None


def make_arms(tokenizer: Path, prompts: Sequence[list[int]]) -> dict[str, Arm]:
    """All arms, with the same requests."""
    arms: dict[str, Arm] = {}
    if TextRows(tokenizer, 1).uses_table:
        arms[TABLE] = RowsArm(tokenizer, prompts, STOP, uses_table=True, makes_strings=False)
        arms[STRINGS] = RowsArm(tokenizer, prompts, STOP, uses_table=True, makes_strings=True)
    arms[STREAMS] = RowsArm(tokenizer, prompts, STOP, uses_table=False, makes_strings=True)
    if has_vllm():
        from asyncbook.bench.text_vllm import VllmArm

        arms[VLLM] = VllmArm(tokenizer, prompts, STOP)
    return arms


def measure(
    tokenizer: Path, num_rows: int, num_steps: int, on_round: Callable[[], None] = lambda: None
) -> dict[str, Costs]:
    """Costs by arm. Raises `AssertionError` where an arm delivered another text, or did not stop."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer))
    prompt = library.encode("Tell me a story.", add_special_tokens=False).ids
    story = library.encode(story_text(), add_special_tokens=False).ids
    last_words = library.encode(LAST_WORDS, add_special_tokens=False).ids
    total = WARM_UP_STEPS + num_steps
    # Each row is somewhere else in the story.
    of_rows = np.array([np.resize(np.roll(story, -7 * row), total) for row in range(num_rows)], np.int32)
    steps = np.ascontiguousarray(of_rows.T)
    arms = make_arms(tokenizer, [prompt] * num_rows)
    costs = {name: Costs() for name in arms}
    for start in range(0, total, STEPS_PER_ROUND):
        for name, arm in arms.items():
            for ids in steps[start : start + STEPS_PER_ROUND]:
                arm.step(ids, costs[name])
        on_round()
    for token_id in last_words:
        for arm in arms.values():
            arm.step(np.full(num_rows, token_id, np.int32), Costs())
    before = library.decode(prompt)
    for row in range(num_rows):
        ids = [*prompt, *of_rows[row].tolist(), *last_words]
        expected = library.decode(ids).removeprefix(before).removesuffix(STOP[0])
        for name, arm in arms.items():
            assert arm.stopped_by[row] == STOP[0], f"{name} stopped row {row} by {arm.stopped_by[row]!r}"
            assert arm.texts[row] == expected, f"{name} delivered another text in row {row}"
    for cost in costs.values():
        del cost.cpu_ns[:WARM_UP_STEPS], cost.wall_ns[:WARM_UP_STEPS]
    return costs


def summary(num_rows: int, costs: dict[str, Costs]) -> dict[str, dict[str, float]]:
    """By arm: tokens in a second of the processor, and a step's percentiles in microseconds of the wall clock."""
    arms = {}
    for name, cost in costs.items():
        p50, p99 = (float(value) / 1e3 for value in np.percentile(cost.wall_ns, (50, 99)))
        arms[name] = {
            "tokens_per_s": round(num_rows * len(cost.cpu_ns) / (sum(cost.cpu_ns) / 1e9)),
            "step_us_p50": round(p50, 1),
            "step_us_p99": round(p99, 1),
        }
    return arms


def _table(results: dict[int, dict[str, dict[str, float]]]) -> Any:
    from rich.table import Table

    table = Table(
        title=f"tokens in a second of one core (goal: {GOAL:,}); a step's time on the wall", title_justify="left"
    )
    for heading in ("rows", "arm", "tokens/s", "step p50 us", "p99"):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for num_rows, arms in results.items():
        for name, arm in arms.items():
            times = f"{arm['step_us_p50']:,.0f}", f"{arm['step_us_p99']:,.0f}"
            table.add_row(str(num_rows), name, f"{arm['tokens_per_s']:,.0f}", *times)
    return table


@click.command("text")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A tokenizer.json.  [default: SmolLM2's]",
)
@click.option("--rows", default="64,256,1024", show_default=True, help="Numbers of rows, with commas between them.")
@click.option("--steps", type=click.IntRange(1), default=500, show_default=True, help="To measure, for each arm.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Writes everything there.")
def text_command(tokenizer: Path | None, rows: str, steps: int, json_path: Path | None) -> None:
    """Detokenize, and look for two stop strings a request: tokens a second on one core, beside vLLM where it is."""
    from rich.console import Console
    from rich.progress import Progress

    from asyncbook.bench.about import describe_run

    sizes = [int(part) for part in rows.split(",")]
    given = "" if tokenizer is None else f"--tokenizer {tokenizer} "
    about = describe_run(f"asyncbook bench text {given}--rows {rows} --steps {steps}")
    if not has_vllm():
        click.echo("vllm is not importable here: its arm is left out", err=True)
    jit.compile_all()
    results: dict[int, dict[str, dict[str, float]]] = {}
    console = Console()
    try:
        with open_story(tokenizer) as story, Progress(console=console, transient=True) as progress:
            task = progress.add_task("", total=len(sizes) * -(-(WARM_UP_STEPS + steps) // STEPS_PER_ROUND))
            for num_rows in sizes:
                progress.update(task, description=f"{num_rows} rows")
                costs = measure(story.tokenizer, num_rows, steps, lambda: progress.advance(task))
                results[num_rows] = summary(num_rows, costs)
    except KeyboardInterrupt:
        console.print("stopped: what is below was measured")
    console.print(_table(results))
    if json_path is not None:
        json_path.write_text(json.dumps({"about": about, "goal": GOAL, "rows": results}, indent=1))
