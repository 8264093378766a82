"""vLLM's run as a book keeps it: in sidecar mode every step of a scheduler goes to an asyncbook book as well.

The book gets what the scheduler gets, when the scheduler gets it: admissions, the ids of each step, preemptions, ends.
It decides by its own rules, so under asynchronous scheduling its history holds real ids where the model runner has
placeholders. A stop string is found by vLLM's front end, outside the scheduler: such a request ends in the book with
`ABORT` behind the same ids. Requests without prompt ids (embeddings), streaming sessions and pooling are not kept.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import asyncbook
from asyncbook import AsyncbookError, Batch, Book, BookConfig, BookFull, RequestParams, Row
from asyncbook.integrations.vllm_ids import OneIdEach
from asyncbook.ipc.layout import MAX_ROWS

MODE_VARIABLE = "ASYNCBOOK_VLLM"
MAX_IN_FLIGHT = 8
ROOM_TIMEOUT_S = 30.0

logger = logging.getLogger("vllm.asyncbook")


class BookFeed:
    """Feeds a book. What goes wrong in it is logged and ends the feeding, never vLLM's run."""

    def __init__(self, book: Book, requests: dict[str, Any]) -> None:
        self.book = book
        self._requests = requests  # the scheduler's own, by id
        self.rows: dict[str, tuple[Any, Row]] = {}  # vLLM's request and its row
        self._suspended: dict[str, bool] = {}  # preempted and not taken up again; whether the book knows
        self.num_not_kept = 0  # requests that the book has no place or no word for
        self._left_out: set[str] = set()  # whose ids of the step at hand vLLM drops
        self._is_over = False
        self._described: tuple[Any, ...] = ()
        self._batch: Batch | None = None

    def row(self, request_id: str) -> Row:
        """The row of a request that vLLM has not finished. Raises `KeyError`."""
        return self.rows[request_id][1]

    def step(self, scheduler_output: Any, runner_output: Any) -> None:
        """What a step sampled, with the requests that it began or took up again."""
        if self._is_over:
            return
        try:
            self._begin(scheduler_output)
            self._submit(scheduler_output, runner_output)
        except AsyncbookError as error:
            self._end(error)

    def preempt(self, request: Any) -> None:
        """After vLLM has. The book learns of it before the next step that vLLM takes in: until then there may be a step
        under way that gives the request its row."""
        self._suspended.setdefault(request.request_id, False)

    def release(self, request: Any) -> None:
        """After vLLM has finished the request; one that the book does not know to be finished ends with `ABORT`."""
        self._suspended.pop(request.request_id, None)
        if self._keeps(request):
            _, row = self.rows.pop(request.request_id)
            if not self._is_over:
                try:
                    self.book.release(row)
                except AsyncbookError as error:
                    self._end(error)

    def close(self) -> None:
        """Ends the book, which applies what was sent first."""
        self._is_over = True
        self.book.close()

    def _keeps(self, request: Any) -> bool:
        """Whether this very request, and not an earlier one of its name, has a row."""
        return self.rows.get(request.request_id, (None, None))[0] is request

    def _end(self, error: AsyncbookError) -> None:
        self._is_over = True
        logger.error("asyncbook keeps no book any more, vLLM goes on without it: %s: %s", type(error).__name__, error)

    def _admit(self, request: Any, num_computed_tokens: int) -> None:
        """Gives a request a row. Its stop rules are vLLM's as the scheduler applies them; `min_tokens` is kept by the
        sampler, which does not draw what would stop the request too early."""
        params = request.sampling_params
        if params is None or request.prompt_token_ids is None or request.resumable:
            self.num_not_kept += 1
            return
        try:
            row = self.book.admit(
                request.request_id,
                request.prompt_token_ids,
                RequestParams(
                    max_tokens=request.max_tokens,
                    eos_token_id=params.eos_token_id,
                    stop_token_ids=tuple(params.stop_token_ids or ()),
                ),
                num_computed_tokens=num_computed_tokens,
            )
        except BookFull:
            self.num_not_kept += 1
            logger.warning("asyncbook: the book is full, request %s is not kept", request.request_id)
            return
        self.rows[request.request_id] = request, row

    def _begin(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            request = self._requests.get(new.req_id)
            if request is not None and new.req_id not in self.rows:
                self._admit(request, new.num_computed_tokens)
        if self._suspended:
            self._suspend(scheduler_output.scheduled_cached_reqs)

    def _suspend(self, cached: Any) -> None:
        """Preempts and resumes. What is under way of a request when it is preempted is stale; vLLM knows by a count."""
        self._left_out.clear()
        for request_id, is_known in list(self._suspended.items()):
            request, row = self.rows.get(request_id, (None, None))
            if request is None or row is None:
                continue
            if not is_known:
                self.book.preempt(row)
                self._suspended[request_id] = True
            is_stale = request.num_stale_output_tokens > 0
            if request_id in cached.resumed_req_ids:
                computed = cached.num_computed_tokens[cached.req_ids.index(request_id)]
                row = self.book.resume(row, num_computed_tokens=computed)
                self.rows[request_id] = request, row
                if is_stale:  # preempted again while this step was under way
                    self.book.preempt(row)
                else:
                    del self._suspended[request_id]
            if is_stale and request.drop_stale_output:
                self._left_out.add(request_id)

    def _submit(self, scheduler_output: Any, runner_output: Any) -> None:
        names = [
            name for name in scheduler_output.num_scheduled_tokens if name in self.rows and name not in self._left_out
        ]
        self._left_out.clear()
        scheduled = list(map(scheduler_output.num_scheduled_tokens.__getitem__, names))
        drafts = scheduler_output.scheduled_spec_decode_tokens
        num_drafts = [len(drafts.get(name, ())) for name in names] if drafts else None
        rows = [self.rows[name][1] for name in names]
        described = rows, scheduled, num_drafts
        if self._batch is None or described != self._described:
            self._batch = self.book.batch(rows, num_scheduled_tokens=scheduled, num_draft_tokens=num_drafts)
            self._described = described
        index = [runner_output.req_id_to_index[name] for name in names]
        self.book.wait_room(ROOM_TIMEOUT_S)
        self.book.submit(self._batch, ids_of(runner_output.sampled_token_ids, index))


def ids_of(sampled: Sequence[list[int]], index: list[int]) -> np.ndarray:
    """What the rows of these indices sampled: int32 [n, w], padded with -1."""
    if isinstance(sampled, OneIdEach):
        return sampled.column()[index].reshape(-1, 1)
    return padded([sampled[row] for row in index])


def padded(ids: list[list[int]]) -> np.ndarray:
    """int32 [n, longest], at least one wide, padded with -1."""
    counts = list(map(len, ids))
    width = max(counts, default=1) or 1
    if width == 1 and min(counts, default=1) == 1:
        return np.array(ids, np.int32).reshape(-1, 1)
    matrix = np.full((len(ids), width), -1, np.int32)
    for row, its_ids in enumerate(ids):
        matrix[row, : len(its_ids)] = its_ids
    return matrix


def make_feed(scheduler: Any) -> BookFeed | None:
    """The feed of a scheduler of vLLM's, None unless sidecar mode is on."""
    if os.environ.get(MODE_VARIABLE) != "sidecar":
        return None
    config = BookConfig(
        # Preempted requests keep their rows: as many again as run at a time are enough but for floods of priorities.
        max_num_reqs=min(2 * scheduler.max_num_running_reqs, MAX_ROWS),
        max_model_len=scheduler.max_model_len,
        vocab_size=scheduler.vllm_config.model_config.get_vocab_size(),
        num_spec_tokens=scheduler.num_spec_tokens,
        max_in_flight=MAX_IN_FLIGHT,
        tokenizer=_tokenizer_of(scheduler.vllm_config.model_config),
        runner_reads_outputs=False,  # vLLM has its own; these are for other processes
    )
    feed = BookFeed(asyncbook.spawn(config), scheduler.requests)
    logger.info(
        "asyncbook keeps a book of this run in process %s; other processes find it at %s",
        feed.book.sidecar_pid,
        feed.book.address,
    )
    return feed


def _tokenizer_of(model_config: Any) -> Path | None:
    """The file that outputs get their texts by, where the model lies in a folder that has one."""
    path = Path(str(model_config.tokenizer)) / "tokenizer.json"
    has_library = importlib.util.find_spec("tokenizers") is not None
    return path if has_library and path.is_file() and not model_config.skip_tokenizer_init else None
