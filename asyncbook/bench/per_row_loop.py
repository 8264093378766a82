"""The baselines: what engines do after the sampler today, one row at a time, in Python.

The work of a step as in vLLM 0.32, in our own words: sampled ids become lists; each row's ids go into its history and
token mask; its counters move; its output list grows; stop ids and lengths are checked; what is new is collected, with
text and logprobs where there are any (`per_row_outputs.py`).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from asyncbook import Logprobs
from asyncbook.bench.per_row_outputs import BatchedLogprobs, LogprobColumns, PerRowLogprobs, PerRowText
from asyncbook.output_logprobs import TokenLogprobs

NONE, STOP, LENGTH = 0, 1, 2


class PerRowLoop:
    """Persistent batch of `num_rows` requests, all decoding. Table int32 and mask bool [num_rows, max_model_len].

    `stop_token_ids` end a request once it has put out `min_tokens`; the ids behind one are dropped. `text` and
    `logprobs` make what the outputs bring along: `texts` of each, and `logprobs` of each id.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        num_prompt_tokens: int,
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        text: PerRowText | None = None,
        logprobs: PerRowLogprobs | BatchedLogprobs | None = None,
    ) -> None:
        self.token_ids = np.zeros((num_rows, max_model_len), np.int32)
        self.is_token_ids = np.zeros((num_rows, max_model_len), np.bool_)
        self.num_tokens = np.full(num_rows, num_prompt_tokens, np.int32)
        self.num_tokens_no_spec = np.full(num_rows, num_prompt_tokens, np.int32)
        self.num_computed_tokens = np.zeros(num_rows, np.int32)
        self.output_token_ids: list[list[int]] = [[] for _ in range(num_rows)]
        self.request_ids = [f"request-{row}" for row in range(num_rows)]
        self.finish_reasons = [NONE] * num_rows
        self.outputs: list[tuple[str, list[int], int]] = []
        self.texts: list[str] | None = None
        self.logprobs: list[TokenLogprobs] | LogprobColumns | None = None
        self._rows = {request_id: row for row, request_id in enumerate(self.request_ids)}
        self._text, self._logprobs = text, logprobs
        self._until = self._until_stop if text is None else self._until_stop_string
        self._max_tokens = max_model_len - num_prompt_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens

    def submit(
        self,
        sampled_token_ids: np.ndarray,
        draft_token_ids: np.ndarray | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        """One step. `sampled_token_ids` int32 [n, 1+K], -1 pads; `draft_token_ids` int32 [n, K] for the next one."""
        drafts = None if draft_token_ids is None else draft_token_ids.tolist()
        self.outputs = []
        for row, ids in enumerate(self._lists(sampled_token_ids)):
            if not ids or self.finish_reasons[row]:
                continue
            ids, finish_reason = self._until(row, ids)
            start = self.num_tokens_no_spec[row]
            end = start + len(ids)
            self.token_ids[row, start:end] = ids
            self.is_token_ids[row, start:end] = True
            self.num_tokens_no_spec[row] = end
            self.num_tokens[row] = end
            self.num_computed_tokens[row] = end - 1
            self.output_token_ids[row].extend(ids)
            self.finish_reasons[row] = finish_reason
            self.outputs.append((self.request_ids[row], ids, finish_reason))
            if drafts is not None and not finish_reason:
                num_tokens = end + len(drafts[row])
                self.token_ids[row, end:num_tokens] = drafts[row]
                self.is_token_ids[row, end:num_tokens] = True
                self.num_tokens[row] = num_tokens
        if self._text is not None or logprobs is not None:
            self._report(logprobs)

    def _report(self, logprobs: Logprobs | None) -> None:
        """Text and logprobs of what is new."""
        rows = [self._rows[request_id] for request_id, _, _ in self.outputs]
        if self._text is not None:
            finish_reasons = [finish_reason for _, _, finish_reason in self.outputs]
            pairs = zip(rows, finish_reasons, strict=True)
            self.texts = [self._text.take(row, finish_reason != NONE) for row, finish_reason in pairs]
        if self._logprobs is not None and logprobs is not None:
            self.logprobs = self._logprobs.append(rows, [len(ids) for _, ids, _ in self.outputs], logprobs)

    @staticmethod
    def _lists(sampled_token_ids: np.ndarray) -> list[list[int]]:
        sampled: list[list[int]] = sampled_token_ids.tolist()
        if sampled_token_ids.shape[1] == 1:
            return sampled
        return [[token_id for token_id in ids if token_id != -1] for ids in sampled]

    def _until_stop(self, row: int, ids: list[int]) -> tuple[list[int], int]:
        """What is kept of the ids, and whether the request ends with them."""
        num_outputs = len(self.output_token_ids[row])
        if self._stop_token_ids:
            for i, token_id in enumerate(ids):
                if token_id in self._stop_token_ids and num_outputs + i >= self._min_tokens:
                    return ids[: i + 1], STOP
        return ids, LENGTH if num_outputs + len(ids) >= self._max_tokens else NONE

    def _until_stop_string(self, row: int, ids: list[int]) -> tuple[list[int], int]:
        """The same with text: an id that stops says nothing, and a stop string may end the request before it."""
        assert self._text is not None
        ids, finish_reason = self._until_stop(row, ids)
        said = ids[:-1] if finish_reason == STOP else ids
        num_kept = self._text.append(row, said, len(self.output_token_ids[row]))
        return (ids, finish_reason) if num_kept < 0 else (ids[:num_kept], STOP)


class PerRowLists(PerRowLoop):
    """The same with the 1-D arrays updated in one numpy call each, as vLLM's PR #25801 does; histories, masks and lists
    are still written row by row there."""

    def submit(
        self,
        sampled_token_ids: np.ndarray,
        draft_token_ids: np.ndarray | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        drafts = None if draft_token_ids is None else draft_token_ids.tolist()
        self.outputs = []
        rows: list[int] = []
        ends: list[int] = []
        starts = self.num_tokens_no_spec.tolist()
        for row, ids in enumerate(self._lists(sampled_token_ids)):
            if not ids or self.finish_reasons[row]:
                continue
            ids, finish_reason = self._until(row, ids)
            start = starts[row]
            end = start + len(ids)
            self.token_ids[row, start:end] = ids
            self.is_token_ids[row, start:end] = True
            rows.append(row)
            ends.append(end)
            self.output_token_ids[row].extend(ids)
            self.finish_reasons[row] = finish_reason
            self.outputs.append((self.request_ids[row], ids, finish_reason))
            if drafts is not None and not finish_reason:
                num_tokens = end + len(drafts[row])
                self.token_ids[row, end:num_tokens] = drafts[row]
                self.is_token_ids[row, end:num_tokens] = True
        changed, new_ends = np.array(rows, np.intp), np.array(ends, np.int32)
        self.num_tokens_no_spec[changed] = new_ends
        self.num_computed_tokens[changed] = new_ends - 1
        self.num_tokens[changed] = new_ends
        if draft_token_ids is not None:
            goes_on = np.array(self.finish_reasons)[changed] == NONE
            self.num_tokens[changed[goes_on]] += draft_token_ids.shape[1]
        if self._text is not None or logprobs is not None:
            self._report(logprobs)
