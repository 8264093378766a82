"""A small transformer that decodes, one token a row and step, wholly on the device: its ids are its next input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from asyncbook.bench.gpu_platform import Platform


@dataclass(frozen=True)
class Size:
    """Of the model. `context` positions are kept a row, the oldest is written over."""

    num_layers: int = 8
    width: int = 1024
    num_heads: int = 8
    context: int = 256
    vocab_size: int = 32_000


TINY = Size(num_layers=1, width=16, num_heads=2, context=8, vocab_size=64)


class Decoder:
    """`step()` runs the model for n rows and leaves what it sampled in `ids`, int64 [n], which is never read back."""

    def __init__(self, platform: Platform, n: int, size: Size, seed: int = 0) -> None:
        generator = torch.Generator("cpu").manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            values: torch.Tensor = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            return values.to(platform.torch_device, platform.dtype)

        self._size = size
        width, caches = size.width, (size.num_layers, n, size.num_heads, size.context, size.width // size.num_heads)
        self._embedding = weight(size.vocab_size, width)
        self._layers = [
            (weight(3 * width, width), weight(width, width), weight(4 * width, width), weight(width, 4 * width))
            for _ in range(size.num_layers)
        ]
        self._keys, self._values = (
            torch.zeros(caches, dtype=platform.dtype, device=platform.torch_device) for _ in range(2)
        )
        self._position = torch.zeros(1, dtype=torch.int64, device=platform.torch_device)
        self.ids = torch.arange(n, device=platform.torch_device) % size.vocab_size

    @torch.no_grad()
    def step(self) -> None:
        """Everything in place, so that a CUDA graph can hold it."""
        size, n = self._size, self.ids.numel()
        hidden = functional.embedding(self.ids, self._embedding)
        slot = self._position % size.context
        for layer, (qkv, out, up, down) in enumerate(self._layers):
            normed = functional.layer_norm(hidden, (size.width,))
            query, key, value = (normed @ qkv.t()).view(n, 3, size.num_heads, 1, -1).unbind(1)
            self._keys[layer].index_copy_(2, slot, key)
            self._values[layer].index_copy_(2, slot, value)
            seen = functional.scaled_dot_product_attention(query, self._keys[layer], self._values[layer])
            hidden = hidden + seen.reshape(n, size.width) @ out.t()
            normed = functional.layer_norm(hidden, (size.width,))
            hidden = hidden + functional.gelu(normed @ up.t()) @ down.t()
        logits = functional.layer_norm(hidden, (size.width,)) @ self._embedding.t()
        # Without something that changes, greedy decoding soon repeats one token.
        self.ids.copy_((logits.argmax(-1) + self._position) % size.vocab_size)
        self._position.add_(1)


def replay_of(platform: Platform, decoder: Decoder) -> Callable[[], Any]:
    """One step of the decoder as a CUDA graph; as it is where there is no CUDA."""
    if not platform.is_cuda:
        return decoder.step
    stream: Any = torch.cuda.Stream(platform.torch_device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(platform.torch_device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            decoder.step()
    torch.cuda.current_stream(platform.torch_device).wait_stream(stream)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step()
    replay: Callable[[], Any] = graph.replay
    return replay
