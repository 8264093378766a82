"""The baseline: what engines do after the sampler today, one row at a time, in Python.

The work of a step as in vLLM 0.32, in our own words: sampled ids become lists; each row's ids go into its history and
token mask; its counters move; its output list grows; stop ids and lengths are checked; what is new is collected.
"""

from __future__ import annotations

import numpy as np


class PerRowLoop:
    """Persistent batch of `num_rows` requests, all decoding. Table int32 and mask bool [num_rows, max_model_len]."""

    def __init__(self, num_rows: int, max_model_len: int, num_prompt_tokens: int, eos_token_id: int) -> None:
        self.token_ids = np.zeros((num_rows, max_model_len), np.int32)
        self.is_token_ids = np.zeros((num_rows, max_model_len), np.bool_)
        self.num_tokens = np.full(num_rows, num_prompt_tokens, np.int32)
        self.num_tokens_no_spec = np.full(num_rows, num_prompt_tokens, np.int32)
        self.num_computed_tokens = np.zeros(num_rows, np.int32)
        self.output_token_ids: list[list[int]] = [[] for _ in range(num_rows)]
        self.request_ids = [f"request-{row}" for row in range(num_rows)]
        self.finish_reasons = [0] * num_rows
        self.outputs: list[tuple[str, list[int], int]] = []
        self._max_model_len = max_model_len
        self._max_tokens = max_model_len - num_prompt_tokens
        self._stop_token_ids = {eos_token_id}

    def submit(self, sampled_token_ids: np.ndarray) -> None:
        """One step. `sampled_token_ids` int32 [n, 1+K], -1 pads."""
        width = sampled_token_ids.shape[1]
        sampled = sampled_token_ids.tolist()
        self.outputs = []
        for row, ids in enumerate(sampled):
            if width > 1:
                ids = [token_id for token_id in ids if token_id != -1]
            if not ids or self.finish_reasons[row]:
                continue
            start = self.num_tokens_no_spec[row]
            end = start + len(ids)
            self.token_ids[row, start:end] = ids
            self.is_token_ids[row, start:end] = True
            self.num_tokens_no_spec[row] = end
            self.num_tokens[row] = end
            self.num_computed_tokens[row] = end - 1
            self.output_token_ids[row].extend(ids)
            self.finish_reasons[row] = self._finish_reason(row, ids)
            self.outputs.append((self.request_ids[row], ids, self.finish_reasons[row]))

    def _finish_reason(self, row: int, ids: list[int]) -> int:
        for token_id in ids:
            if token_id in self._stop_token_ids:
                return 1
        return 2 if len(self.output_token_ids[row]) >= self._max_tokens else 0
