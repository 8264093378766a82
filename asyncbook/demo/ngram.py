"""Prompt lookup: drafts are what followed the last n tokens where they stood before in the same row."""

from __future__ import annotations

import torch
from torch import Tensor


def propose(token_ids: Tensor, num_tokens: Tensor, min_n: int, max_n: int, num_drafts: int) -> Tensor:
    """Drafts for every row at once: int64 [rows, num_drafts], padded with -1. Nothing leaves the device.

    `token_ids` int64 [rows, max_len], of which the first `num_tokens` [rows] count. The longest n-gram of `min_n` to
    `max_n` tokens that ends the row and stands earlier in it wins, among equals the earliest; the drafts are the tokens
    after it, as many as there are.
    """
    max_len = token_ids.shape[1]
    ends = torch.arange(max_len, device=token_ids.device)  # where an earlier n-gram may end
    last = num_tokens[:, None] - 1
    alike = (ends < last).long()  # 1 while the tokens before each end are the row's last ones
    length = torch.zeros_like(token_ids)
    for back in range(max_n):
        tail = token_ids.gather(1, (last - back).clamp(min=0))
        alike = alike * (token_ids.roll(back, 1) == tail) * (ends >= back)
        length += alike
    score = torch.where(length >= min_n, length * max_len - ends, -max_len)
    best, end = score.max(1, keepdim=True)
    positions = end + torch.arange(1, num_drafts + 1, device=token_ids.device)
    drafts = token_ids.gather(1, positions.clamp(max=max_len - 1))
    return torch.where((best > 0) & (positions <= last), drafts, -1)
