"""A small Llama with a static KV cache. Parameters are named as in a GGUF file, so its tensors load as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama; the defaults are a tiny one."""

    vocab_size: int = 260
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5


class KVCache:
    """`k` and `v`: [layers, rows, kv heads, max_len, head dim]. A row's entry at a position is valid once written.

    Heads stand before positions, so that attention reads a row's keys without a copy.
    """

    def __init__(self, config: LlamaConfig, num_rows: int, max_len: int, device: torch.device) -> None:
        shape = (config.num_hidden_layers, num_rows, config.num_key_value_heads, max_len, config.head_dim)
        self.k = torch.zeros(shape, device=device)
        self.v = torch.zeros(shape, device=device)
        self.row_ids = torch.arange(num_rows, device=device)[:, None]
        self.positions = torch.arange(max_len, device=device)

    def write(self, layer: int, rows: slice, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """`positions` [b, t]; `k`, `v` [b, t, kv heads, head dim]."""
        row_ids = self.row_ids[rows]
        self.k[layer][row_ids, :, positions] = k
        self.v[layer][row_ids, :, positions] = v


class Rotary:
    """Rotary embedding over neighbouring pairs (x0, x1), (x2, x3) ..., which is how GGUF files order q and k."""

    def __init__(self, config: LlamaConfig, max_len: int, device: torch.device) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), config.rope_theta**-exponents)
        self.table = torch.polar(torch.ones_like(angles), angles).to(device)  # complex64 [max_len, head dim / 2]

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x` [b, t, heads, head dim], `positions` [b, t]."""
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.table[positions][:, :, None]).flatten(-2)


class Block(nn.Module):
    """One decoder layer: attention, then a SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.attn_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.attn_q = nn.Linear(hidden, q_size, bias=False)
        self.attn_k = nn.Linear(hidden, kv_size, bias=False)
        self.attn_v = nn.Linear(hidden, kv_size, bias=False)
        self.attn_output = nn.Linear(q_size, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.ffn_gate = nn.Linear(hidden, inner, bias=False)
        self.ffn_up = nn.Linear(hidden, inner, bias=False)
        self.ffn_down = nn.Linear(inner, hidden, bias=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """`q` [b, t, heads, head dim]; `k`, `v` [b, kv heads, max_len, head dim]; `mask` bool [b, 1, t, max_len].

        The query heads that share a key head are folded into the query's length: no key is copied for them.
        """
        b, t, num_heads, head_dim = q.shape
        num_kv_heads, group = k.shape[1], num_heads // k.shape[1]
        folded = q.view(b, t, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask.repeat(1, 1, group, 1))
        return out.view(b, num_kv_heads, group, t, head_dim).permute(0, 3, 1, 2, 4).reshape(b, t, -1)

    def forward(
        self, x: Tensor, positions: Tensor, rotary: Rotary, cache: KVCache, layer: int, rows: slice, mask: Tensor
    ) -> Tensor:
        """`x` [b, t, hidden]; the b rows of the cache are `rows`."""
        h = self.attn_norm(x)
        q, k, v = (p(h).view(*x.shape[:2], -1, self.head_dim) for p in (self.attn_q, self.attn_k, self.attn_v))
        q, k = rotary(q, positions), rotary(k, positions)
        cache.write(layer, rows, positions, k, v)
        x = x + self.attn_output(self.attend(q, cache.k[layer, rows], cache.v[layer, rows], mask))
        h = self.ffn_norm(x)
        out: Tensor = x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))
        return out


class Llama(nn.Module):
    """`forward` gives hidden states, `logits` the scores of the tied output head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blk = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.output_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids: Tensor, positions: Tensor, rotary: Rotary, cache: KVCache, rows: slice) -> Tensor:
        """`token_ids`, `positions` int64 [b, t] for the b cache rows in `rows`; returns float32 [b, t, hidden].

        A query sees every position of its row up to its own: they are in the cache from before, or among `positions`.
        """
        mask = cache.positions[None, None, None, :] <= positions[:, None, :, None]
        x: Tensor = self.token_embd(token_ids)
        for layer, block in enumerate(self.blk):
            x = block(x, positions, rotary, cache, layer, rows, mask)
        hidden: Tensor = self.output_norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]."""
        return F.linear(hidden, self.token_embd.weight)


def random_llama(config: LlamaConfig, seed: int) -> Llama:
    """A model with seeded weights, of a scale that makes greedy text wander and repeat itself: some drafts hit."""
    generator = torch.Generator().manual_seed(seed)
    model = Llama(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5 * 1.1)
    return model.eval()
