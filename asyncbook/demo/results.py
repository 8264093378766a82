"""What one way's run came to, and whether two ways came to the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncbook import FinishReason, SpecDecodeStats
from asyncbook.demo.bookkeeping import COLUMNS
from asyncbook.demo.runner import Request, Runner
from asyncbook.demo.timeline import COST, FORWARD, WAIT, Timeline
from asyncbook.demo.tokenizer import Tokenizer

SHOWN_DIFFERENCES = 5  # of each kind, at most


@dataclass(frozen=True)
class Answer:
    """What one request got. `stop_reason` is the id that ended it, or None."""

    prompt: str
    token_ids: list[int]
    committed_token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: int | None


@dataclass(frozen=True)
class Result:
    """`columns` int64 [steps, columns, rows] are the frames of every step; `cost_us` and `wait_us` float64 [steps] are
    what bookkeeping took of the runner's thread, and what it waited for the book."""

    way: str
    answers: dict[str, Answer]
    columns: NDArray[np.int64]
    acceptance: SpecDecodeStats
    timeline: Timeline
    seconds: float

    @property
    def cost_us(self) -> NDArray[np.float64]:
        return self.timeline.per_step_us(COST)

    @property
    def forward_ms(self) -> float:
        """Median of a forward pass, on the device that ran it."""
        passes = self.timeline.device or [span for span in self.timeline.runner if span.name == FORWARD]
        return float(np.median([span.end_ns - span.start_ns for span in passes])) / 1e6

    @property
    def wait_us(self) -> NDArray[np.float64]:
        return self.timeline.per_step_us((WAIT,))


def collect(way: str, runner: Runner, stats: SpecDecodeStats, tokenizer: Tokenizer, seconds: float) -> Result:
    """The result of a runner that has run."""

    def answer(request: Request) -> Answer:
        reason = FinishReason(request.finish_reason)
        text = tokenizer.decode(request.token_ids)
        committed = request.committed_token_ids or []
        return Answer(request.prompt, request.token_ids, committed, text, reason, request.stop_reason)

    answers = {request_id: answer(request) for request_id, request in runner.requests.items()}
    return Result(way, answers, np.stack(runner.columns), stats, runner.timeline, seconds)


def differences(expected: Result, got: Result) -> list[str]:
    """Where `got` is not `expected`, in words; empty when outputs, counters and every frame are identical."""
    ways = f"{got.way} against {expected.way}"
    return [
        *(f"{ways}, {text}" for text in _answer_differences(expected, got)),
        *(f"{ways}, {text}" for text in _column_differences(expected.columns, got.columns)),
        *([f"{ways}, {expected.acceptance} became {got.acceptance}"] if expected.acceptance != got.acceptance else []),
    ]


def own_differences(result: Result) -> list[str]:
    """Where what a book delivered is not what its table held."""
    found = []
    for request_id, answer in result.answers.items():
        if answer.token_ids != answer.committed_token_ids:
            where = _first_difference(answer.committed_token_ids, answer.token_ids)
            found.append(f"{result.way}, request {request_id}, delivered against its table: {where}")
    return found[:SHOWN_DIFFERENCES]


def _answer_differences(expected: Result, got: Result) -> list[str]:
    found = []
    for request_id, answer in expected.answers.items():
        other = got.answers[request_id]
        if answer.token_ids != other.token_ids:
            where = _first_difference(answer.token_ids, other.token_ids)
            found.append(f"request {request_id}: {where}\n  - {answer.text!r}\n  + {other.text!r}")
        if (answer.finish_reason, answer.stop_reason) != (other.finish_reason, other.stop_reason):
            ends = [f"{a.finish_reason.name} {a.stop_reason}" for a in (answer, other)]
            found.append(f"request {request_id}: ended by {ends[1]} instead of {ends[0]}")
    return found[:SHOWN_DIFFERENCES]


def _first_difference(expected: list[int], got: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    was, came = ([*ids[at : at + 1], "the end"][0] for ids in (expected, got))
    return f"token {at} is {came} instead of {was} ({len(got)} tokens, {len(expected)} expected)"


def _column_differences(expected: NDArray[np.int64], got: NDArray[np.int64]) -> list[str]:
    if expected.shape != got.shape:
        return [f"{len(got)} steps instead of {len(expected)}"]
    return [
        f"frame of step {step + 1}: {COLUMNS[column]}[{row}] is {got[step, column, row]} "
        f"instead of {expected[step, column, row]}"
        for step, column, row in np.argwhere(expected != got)[:SHOWN_DIFFERENCES]
    ]
