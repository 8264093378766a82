"""The three ways to keep the books, behind one protocol: `asyncbook`'s own, which a per-row loop can imitate."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

import asyncbook
from asyncbook import BookConfig, RequestParams, Row, SpecDecodeStats
from asyncbook.demo.loop import LoopBook
from asyncbook.demo.timeline import Timeline

COLUMNS = (
    "num_prompt_tokens",
    "num_tokens_no_spec",
    "num_tokens",
    "num_computed_tokens",
    "num_output_tokens",
    "num_accepted_tokens",
    "last_token_id",
    "stop_reason",
    "finish_reason",
    "generation",
)


class Bookkeeping(Protocol):
    """The part of a book that the runner calls."""

    def admit(self, request_id: str, prompt_token_ids: Sequence[int], params: RequestParams) -> Row: ...
    def batch(self, rows: Any, *, num_scheduled_tokens: Any, num_draft_tokens: Any) -> Any: ...
    def submit(self, batch: Any, sampled_token_ids: Any, *, draft_token_ids: Any) -> int: ...
    def wait_applied(self, step: int, timeout_s: float | None = None) -> None: ...
    def frame(self, step: int) -> Any: ...
    def poll_outputs(self) -> Any: ...
    def output_token_ids(self, row: Row) -> np.ndarray: ...
    def release(self, row: Row) -> None: ...
    def spec_decode_stats(self) -> SpecDecodeStats: ...


def open_way(way: str, config: BookConfig) -> AbstractContextManager[Bookkeeping]:
    """`way` is "loop", "embedded" or "sidecar"."""
    match way:
        case "loop":
            return LoopBook(config)
        case "embedded":
            return asyncbook.open(config)
        case "sidecar":
            return asyncbook.spawn(config)
    raise ValueError(f"{way!r} is not a way to keep the books")


class Metered:
    """A book whose every call on the hot path is timed."""

    def __init__(self, book: Bookkeeping, timeline: Timeline) -> None:
        self._book, self._timeline = book, timeline
        self.spec_decode_stats = book.spec_decode_stats
        self.output_token_ids = book.output_token_ids

    def admit(self, request_id: str, prompt_token_ids: Sequence[int], params: RequestParams) -> Row:
        with self._timeline.span("admit"):
            return self._book.admit(request_id, prompt_token_ids, params)

    def batch(self, rows: Any, *, num_scheduled_tokens: Any, num_draft_tokens: Any) -> Any:
        with self._timeline.span("batch"):
            return self._book.batch(rows, num_scheduled_tokens=num_scheduled_tokens, num_draft_tokens=num_draft_tokens)

    def submit(self, batch: Any, sampled_token_ids: Any, *, draft_token_ids: Any) -> int:
        with self._timeline.span("submit"):
            return self._book.submit(batch, sampled_token_ids, draft_token_ids=draft_token_ids)

    def wait_applied(self, step: int, timeout_s: float | None = None) -> None:
        with self._timeline.span("wait"):
            self._book.wait_applied(step, timeout_s)

    def frame(self, step: int) -> Any:
        with self._timeline.span("frame"):
            return self._book.frame(step)

    def poll_outputs(self) -> Any:
        with self._timeline.span("outputs"):
            return self._book.poll_outputs()

    def release(self, row: Row) -> None:
        with self._timeline.span("release"):
            self._book.release(row)
