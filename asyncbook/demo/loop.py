"""Bookkeeping as engines do it today: a Python loop over the rows of the batch, on the thread that runs the model."""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from asyncbook import BookConfig, FinishReason, RequestParams, Row, SpecDecodeStats


class LoopBatch(NamedTuple):
    """The rows of a step and what was scheduled for each."""

    rows: list[Row]
    num_scheduled_tokens: list[int]
    num_draft_tokens: list[int]


class LoopOutput(NamedTuple):
    """What a step delivers of one request."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None


@dataclass
class Tenant:
    """What the loop knows of a row's request besides its columns."""

    request_id: str
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: float  # infinite where there is no limit
    num_given_drafts: int = 0


class LoopFrame:
    """The columns as of a step, int64 [rows] each."""

    def __init__(self, step: int, columns: np.ndarray, apply_start_ns: int) -> None:
        self.step = step
        self.num_prompt_tokens, self.num_tokens_no_spec, self.num_tokens, self.num_computed_tokens = columns[:4]
        self.num_output_tokens, self.num_accepted_tokens, self.last_token_id = columns[4:7]
        self.stop_reason, self.finish_reason, self.generation = columns[7:]
        self.published_ns = time.monotonic_ns()
        self.apply_ns = self.published_ns - apply_start_ns


class LoopBook:
    """One value at a time: numpy columns, numpy tables, Python lists."""

    def __init__(self, config: BookConfig) -> None:
        rows, self._max_model_len = config.max_num_reqs, config.max_model_len
        columns = self._columns = np.zeros((10, rows), np.int64)
        self.num_prompt_tokens, self.num_tokens_no_spec, self.num_tokens, self.num_computed_tokens = columns[:4]
        self.num_output_tokens, self.num_accepted_tokens, self.last_token_id = columns[4:7]
        self.stop_reason, self.finish_reason, self.generation = columns[7:]
        self._token_ids = np.zeros((rows, config.max_model_len), np.int32)
        self._is_token_ids = np.zeros((rows, config.max_model_len), np.bool_)
        self._tenants: dict[int, Tenant] = {}
        self._drafted: list[int] = []  # rows whose table holds drafts
        self._free = list(range(rows))
        self._outputs: list[list[LoopOutput]] = []
        self._drafts = self._draft_tokens = self._accepted = self._emitted = 0
        self._accepted_per_pos = [0] * config.num_spec_tokens
        self._step = 0
        self._frames: deque[LoopFrame] = deque(maxlen=config.max_in_flight + 2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def admit(self, request_id: str, prompt_token_ids: Sequence[int], params: RequestParams) -> Row:
        index, n = heapq.heappop(self._free), len(prompt_token_ids)
        eos_token_ids = () if params.ignore_eos else params.eos_token_ids
        stop_token_ids = frozenset((*params.stop_token_ids, *eos_token_ids))
        max_tokens = math.inf if params.max_tokens is None else params.max_tokens
        self._tenants[index] = Tenant(request_id, stop_token_ids, params.min_tokens, max_tokens)
        self._token_ids[index, :n] = prompt_token_ids
        self._is_token_ids[index, :n] = True
        self.num_prompt_tokens[index] = self.num_tokens_no_spec[index] = self.num_tokens[index] = n
        self.last_token_id[index] = prompt_token_ids[-1]
        self.stop_reason[index] = -1
        self.generation[index] += 1
        return Row(index, int(self.generation[index]))

    def release(self, row: Row) -> None:
        index, n = row.index, self.num_tokens[row.index]
        del self._tenants[index]
        heapq.heappush(self._free, index)
        self._token_ids[index, :n] = 0
        self._is_token_ids[index, :n] = False
        self.num_prompt_tokens[index] = self.num_tokens_no_spec[index] = self.num_tokens[index] = 0
        self.num_computed_tokens[index] = self.num_output_tokens[index] = self.num_accepted_tokens[index] = 0
        self.last_token_id[index] = self.stop_reason[index] = self.finish_reason[index] = 0

    def batch(self, rows: Sequence[Row], *, num_scheduled_tokens: list[int], num_draft_tokens: list[int]) -> LoopBatch:
        return LoopBatch(list(rows), num_scheduled_tokens, num_draft_tokens)

    def wait_applied(self, step: int, timeout_s: float | None = None) -> None:
        """`submit` has applied it."""

    def frame(self, step: int) -> LoopFrame:
        """One of the last few."""
        return self._frames[step - self._step - 1]

    def output_token_ids(self, row: Row) -> np.ndarray:
        return self._token_ids[row.index, self.num_prompt_tokens[row.index] : self.num_tokens_no_spec[row.index]]

    def poll_outputs(self) -> list[list[LoopOutput]]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def spec_decode_stats(self) -> SpecDecodeStats:
        counts = self._drafts, self._draft_tokens, self._accepted, self._emitted
        return SpecDecodeStats(*counts, list(self._accepted_per_pos))

    def submit(self, batch: LoopBatch, sampled_token_ids: np.ndarray, *, draft_token_ids: np.ndarray) -> int:
        """Applies a step, row by row. `sampled_token_ids` [n, 1+K] and `draft_token_ids` [n, K], padded with -1."""
        start_ns = time.monotonic_ns()
        outputs: list[LoopOutput] = []
        for index in self._drafted:
            self._drop_drafts(index)
        self._drafted.clear()
        sampled, drafts = sampled_token_ids.tolist(), draft_token_ids.tolist()
        for i, row in enumerate(batch.rows):
            index = row.index
            if self.finish_reason[index] or self.generation[index] != row.generation:
                continue
            num_computed_tokens = int(self.num_computed_tokens[index]) + batch.num_scheduled_tokens[i]
            num_accepted_tokens = 0
            if num_computed_tokens >= self.num_tokens_no_spec[index]:  # else only a part of the prompt
                ids, num_drafts, tenant = _before_padding(sampled[i]), batch.num_draft_tokens[i], self._tenants[index]
                kept = self._append(index, ids, tenant)
                num_computed_tokens -= num_drafts + 1 - len(kept)
                if num_drafts and ids:
                    num_accepted_tokens = len(ids) - 1
                    self._count_round(min(num_drafts, tenant.num_given_drafts), num_accepted_tokens, len(kept))
                self._write_drafts(index, _before_padding(drafts[i]), tenant)
                if kept:
                    outputs.append(self._delta(index, kept, tenant))
            self.num_computed_tokens[index] = num_computed_tokens
            self.num_accepted_tokens[index] = num_accepted_tokens
        if outputs:
            self._outputs.append(outputs)
        self._step += 1
        self._frames.append(LoopFrame(self._step, self._columns.copy(), start_ns))
        return self._step

    def _append(self, index: int, ids: list[int], tenant: Tenant) -> list[int]:
        """Appends ids up to the one that ends the request; returns those kept."""
        end, num_output_tokens = int(self.num_tokens_no_spec[index]), int(self.num_output_tokens[index])
        finish_reason, stop_reason, kept = FinishReason.NONE, -1, ids
        for i, token_id in enumerate(ids):
            if end < self._max_model_len:
                self._token_ids[index, end] = token_id
                self._is_token_ids[index, end] = True
                end += 1
            num_output_tokens += 1
            if token_id in tenant.stop_token_ids and num_output_tokens > tenant.min_tokens:
                finish_reason, stop_reason = FinishReason.STOP, token_id
            elif num_output_tokens >= tenant.max_tokens or end >= self._max_model_len:
                finish_reason = FinishReason.LENGTH
            if finish_reason:
                kept = ids[: i + 1]
                break
        self.num_tokens_no_spec[index] = self.num_tokens[index] = end
        self.num_output_tokens[index] = num_output_tokens
        if kept:
            self.last_token_id[index] = kept[-1]
        if finish_reason:
            self.finish_reason[index], self.stop_reason[index] = int(finish_reason), stop_reason
        return kept

    def _count_round(self, num_drafts: int, num_accepted: int, num_emitted: int) -> None:
        if num_drafts == 0:
            return
        self._drafts += 1
        self._draft_tokens += num_drafts
        self._accepted += num_accepted
        self._emitted += num_emitted
        for position in range(num_accepted):
            self._accepted_per_pos[position] += 1

    def _drop_drafts(self, index: int) -> None:
        start, end = self.num_tokens_no_spec[index], self.num_tokens[index]
        self._token_ids[index, start:end] = 0
        self._is_token_ids[index, start:end] = False
        self.num_tokens[index] = start

    def _write_drafts(self, index: int, drafts: list[int], tenant: Tenant) -> None:
        tenant.num_given_drafts = len(drafts)
        if not drafts or self.finish_reason[index]:
            return
        start = int(self.num_tokens_no_spec[index])
        end = min(start + len(drafts), self._max_model_len)
        self._token_ids[index, start:end] = drafts[: end - start]
        self._is_token_ids[index, start:end] = True
        self.num_tokens[index] = end
        self._drafted.append(index)

    def _delta(self, index: int, kept: list[int], tenant: Tenant) -> LoopOutput:
        stop_reason = int(self.stop_reason[index])
        reason = FinishReason(int(self.finish_reason[index]))
        return LoopOutput(tenant.request_id, kept, reason, None if stop_reason == -1 else stop_reason)


def _before_padding(ids: list[int]) -> list[int]:
    """Ids up to the first -1."""
    return ids[: ids.index(-1)] if -1 in ids else ids
