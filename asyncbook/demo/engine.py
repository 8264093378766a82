"""The device's side: KV cache, token ids, drafts and their verification. Nothing here ever waits for the device."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncbook.demo import ngram
from asyncbook.demo.model import KVCache, Llama, Rotary

NUM_SPEC_TOKENS = 5
PREFILL_CHUNK = 64  # tokens
MIN_N, MAX_N = 2, 5
WIDTH = 1 + NUM_SPEC_TOKENS  # ids that one row brings into a decode pass


def leave_a_core() -> int:
    """Leaves a core for the sidecar; returns how many threads forward passes have."""
    num_threads = max(1, len(os.sched_getaffinity(0)) - 1)
    torch.set_num_threads(num_threads)
    return num_threads


class HostCopy:
    """Ids on their way to the host; `wait` gives them as int32."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.int().to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> NDArray[np.int32]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor.numpy()


class Engine:
    """State of every row on the device, and the two passes over it: `prefill` [1, chunk] and `decode` [rows, 1+K].

    Both always have the same shape, so what a row gets does not depend on its neighbours. Rows that a pass leaves out
    write to a scratch area behind `max_model_len`. On the device: `token_ids` int64 [rows, max_len] is what each row
    holds, `num_tokens` int64 [rows] how much of it counts, `draft_token_ids` int64 [rows, K] what the next pass
    verifies and `sampled_token_ids` int64 [rows, 1+K] what this step sampled; -1 pads both.
    """

    def __init__(self, model: Llama, num_rows: int, max_model_len: int, chunk: int) -> None:
        """Fits rows of `max_model_len` tokens and what a finished row overshoots before the runner knows of its end."""
        self.model, self.chunk = model, chunk
        self.device = device = model.token_embd.weight.device
        self._scratch = -(-(max_model_len + 2 * WIDTH) // chunk) * chunk
        max_len = self._scratch + WIDTH
        self._cache = KVCache(model.config, num_rows, max_len, device)
        self._rotary = Rotary(model.config, max_len, device)
        self._steps = torch.arange(WIDTH, device=device)
        self.token_ids = torch.zeros((num_rows, max_len), dtype=torch.int64, device=device)
        self.num_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.draft_token_ids = torch.full((num_rows, NUM_SPEC_TOKENS), -1, device=device)
        self.sampled_token_ids = torch.full((num_rows, WIDTH), -1, device=device)

    def to_device(self, values: Sequence[int]) -> Tensor:
        """int64 [n], copied without waiting for what the device has in hand."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def admit(self, row: int, prompt_token_ids: Sequence[int]) -> None:
        """Gives `row` to a new request. What the last one left behind does not count and is never seen."""
        self.token_ids[row, : len(prompt_token_ids)] = self.to_device(prompt_token_ids)
        self.num_tokens[row] = 0

    @torch.inference_mode()
    def warm_up(self) -> None:
        """One pass of each kind that leaves nothing behind which counts."""
        self.prefill(0, 0, self.chunk)
        self.decode(torch.zeros(len(self.num_tokens), dtype=torch.bool, device=self.device))
        self.draft()
        self.num_tokens.zero_()
        self.draft_token_ids.fill_(-1)

    def begin_step(self) -> None:
        """Nothing is sampled yet."""
        self.sampled_token_ids = torch.full_like(self.sampled_token_ids, -1)

    def prefill(self, row: int, start: int, num_prompt_tokens: int) -> None:
        """The chunk of the prompt at `start`; the last one samples. What is computed past the prompt's end is
        overwritten before any query sees it."""
        chunk = slice(start, start + self.chunk)
        positions = self._cache.positions[chunk][None]
        rows = slice(row, row + 1)
        hidden = self.model(self.token_ids[rows, chunk], positions, self._rotary, self._cache, rows)
        if start + self.chunk >= num_prompt_tokens:
            token_id = self.model.logits(hidden[0, num_prompt_tokens - 1 - start]).argmax()
            self.sampled_token_ids[row, 0] = token_id
            self.token_ids[row, num_prompt_tokens] = token_id
            self.num_tokens[row] = num_prompt_tokens + 1

    def decode(self, is_decoding: Tensor) -> None:
        """One pass over all rows that verifies their drafts; `is_decoding` bool [rows] says who takes part."""
        taking_part = is_decoding[:, None]
        last = torch.where(is_decoding, self.num_tokens - 1, self._scratch)[:, None]
        input_ids = torch.cat([self.token_ids.gather(1, last), self.draft_token_ids.clamp(min=0)], 1)
        hidden = self.model(input_ids, last + self._steps, self._rotary, self._cache, slice(None))
        sampled = self.model.logits(hidden).argmax(-1)
        num_accepted = (sampled[:, :-1] == self.draft_token_ids).long().cumprod(1).sum(1, keepdim=True)
        verified = taking_part & (self._steps <= num_accepted)
        self.sampled_token_ids = torch.where(verified, sampled, self.sampled_token_ids)
        positions = torch.where(verified, last + 1, self._scratch) + self._steps
        self.token_ids.scatter_(1, positions, sampled)
        self.num_tokens += verified.sum(1)

    def draft(self) -> None:
        """Drafts for every row that has sampled in this step; none for the others."""
        drafts = ngram.propose(self.token_ids, self.num_tokens, MIN_N, MAX_N, NUM_SPEC_TOKENS)
        self.draft_token_ids = torch.where(self.sampled_token_ids[:, :1] >= 0, drafts, -1)
