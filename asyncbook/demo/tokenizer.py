"""Text to token ids and back: SmolLM2's byte-level BPE, and one id a byte for the random model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers


class Tokenizer(Protocol):
    """What the demo needs of one."""

    vocab_size: int
    eos_token_id: int

    def encode_chat(self, prompt: str) -> list[int]:
        """The token ids of a chat whose one message is `prompt`, up to where the answer begins."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        ...

    def to_json(self) -> str:
        """A tokenizer.json that says the same."""
        ...


_HAVE_SHAPE = {*range(0x21, 0x7F), *range(0xA1, 0x100)} - {0xAD}


class ByteTokenizer:
    """One id a byte, and 256 for the end."""

    vocab_size = 260
    eos_token_id = 256

    def encode_chat(self, prompt: str) -> list[int]:
        return [*prompt.encode(), ord("\n")]

    def decode(self, token_ids: Sequence[int]) -> str:
        text = bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")
        return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in text)

    def to_json(self) -> str:
        # Byte-level vocabularies name a byte by its Latin-1 character, or by one from 256 on where that has no shape.
        unnamed = iter(range(256, 512))
        names = [chr(byte if byte in _HAVE_SHAPE else next(unnamed)) for byte in range(256)]
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab={name: byte for byte, name in enumerate(names)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|end|>"])
        return str(tokenizer.to_str())


class ChatTokenizer:
    """Byte-level BPE with single digits, and ChatML around a prompt."""

    SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

    def __init__(self, vocab: list[str], merges: list[str], special: list[str], eos_token_id: int) -> None:
        """`vocab` in the order of ids; `merges` as "left right", the most frequent first."""
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        ids = {token: token_id for token_id, token in enumerate(vocab)}
        self._tokenizer = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(special)
        self.vocab_size = len(vocab)
        self.eos_token_id = eos_token_id

    def save(self, path: Path) -> None:
        """As a tokenizer.json."""
        self._tokenizer.save(str(path))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, prompt: str) -> list[int]:
        turns = (("system", self.SYSTEM), ("user", prompt))
        chat = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return self.encode(chat + "<|im_start|>assistant\n")

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))

    def to_json(self) -> str:
        return str(self._tokenizer.to_str())
