"""Small tokenizers of both kinds, and the slow and obvious text of a row: everything decoded at once, again for every
id, and stop strings looked for character by character.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream

from asyncbook.worker.text import TextRows

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LINES = [
    "the cat sat on the mat, and that was that",
    "stop here. STOP END stop! hello hello",
    "schön früh über cafe\u0301 naïve",
    "你好世界 你好 世界",
    "😀 😀😁 👩‍👩‍👧 smile",
    "def f(x):\n    return x\n\n",
]


@cache
def byte_level() -> Tokenizer:
    """A byte-level BPE: an id may begin or end within a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken(" END", normalized=False), AddedToken("你🙂", normalized=False)])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """A BPE as SentencePiece writes them: a space is part of the word behind it, what has no id is written in bytes,
    and the first space is taken off."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    trained.train_from_iterator([line for line in LINES if line.isascii()], trainer)
    description = json.loads(trained.to_str())
    vocab = description["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    description["model"]["byte_fallback"] = True
    tokenizer: Tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def of_pieces(pieces: Sequence[str], special: Sequence[str] = ()) -> Tokenizer:
    """A byte-level tokenizer whose first ids say these pieces, and the ids behind them the special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    return tokenizer


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """The id that says this byte."""
    token = f"<0x{byte:02X}>" if tokenizer is metaspace() else _characters_of_bytes()[byte]
    token_id: int = tokenizer.token_to_id(token)
    return token_id


@cache
def _characters_of_bytes() -> list[str]:
    """By byte, the character that a byte-level tokenizer writes it with: as the library writes characters that hold it.
    A byte that no character holds is written as Latin-1."""
    characters = [chr(byte) for byte in range(256)]
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    for code in [*range(0x800), *range(0x800, 0xD800, 64), *range(0xE000, 0x110000, 4096)]:
        written = "".join(piece for piece, _ in encode(chr(code)))
        for byte, character in zip(chr(code).encode(), written, strict=True):
            characters[byte] = character
    return characters


# Text


def whole_text(tokenizer: Tokenizer, prompt: list[int], outputs: list[int], skips: bool = True) -> str:
    """The outputs' text, decoded at once behind the prompt. An incomplete character at the end is one U+FFFD."""
    complete, num_bytes = list(outputs), 0
    if tokenizer is metaspace():
        complete, num_bytes = without_incomplete_bytes(tokenizer, outputs, skips)
    before = tokenizer.decode(prompt, skip_special_tokens=skips)
    text = tokenizer.decode(prompt + complete, skip_special_tokens=skips)
    assert text.startswith(before)
    return text[len(before) :] + (REPLACEMENT if num_bytes else "")


def without_incomplete_bytes(tokenizer: Tokenizer, ids: Sequence[int], skips: bool) -> tuple[list[int], int]:
    """The ids without those at the end that are the bytes of a character which is not complete, and their number."""
    said = [i for i in ids if not (skips and (tokenizer.id_to_token(i) or "<s>") in ("<unk>", "<s>", "</s>"))]
    for num_bytes in (3, 2, 1):
        tokens = [tokenizer.id_to_token(token_id) or "" for token_id in said[-num_bytes:]]
        if len(tokens) == num_bytes and all(token.startswith("<0x") for token in tokens):
            data = bytes(int(token[3:5], 16) for token in tokens)
            if is_incomplete(data):
                return said[:-num_bytes], num_bytes
    return said, 0


def is_incomplete(data: bytes) -> bool:
    """Whether the bytes begin one character, and more must follow: some bytes behind them make it one."""
    endings = [bytes(ending) for ending in ([], [0x80], [0x90], [0xA0], [0xBF])]
    whole = [data + a + b + c for a in endings for b in endings for c in endings]
    return any(len(_decoded(candidate)) == 1 for candidate in whole if len(candidate) > len(data))


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return ""


def certain_texts(tokenizer: Tokenizer, prompt: list[int], outputs: list[int], skips: bool = True) -> list[str]:
    """By number of outputs, from 0 on: the text that no later id can change. Where more bytes would make the last
    U+FFFD a character, it is not certain."""
    if tokenizer is metaspace():
        kept = [without_incomplete_bytes(tokenizer, outputs[:n], skips)[0] for n in range(len(outputs) + 1)]
        return [whole_text(tokenizer, prompt, ids, skips) for ids in kept]
    texts = []
    for n in range(len(outputs) + 1):
        text = tokenizer.decode(outputs[:n], skip_special_tokens=skips)
        continued = [
            tokenizer.decode([*outputs[:n], byte_id(tokenizer, byte)], skip_special_tokens=skips)
            for byte in (0x80, 0x90, 0xA0, 0xBF)
        ]
        is_certain = not text or (all(longer.startswith(text) for longer in continued) and _grows(text, continued))
        texts.append(text if is_certain else text[:-1])
    return texts


def _grows(text: str, continued: list[str]) -> bool:
    """A continuation byte behind whole characters is one more U+FFFD; behind an incomplete one it may add nothing."""
    return all(len(longer) == len(text) + 1 for longer in continued)


def streamed_texts(tokenizer: Tokenizer, prompt: list[int], outputs: list[int], skips: bool = True) -> list[str]:
    """By number of outputs, from 0 on: the text that the library's stream has given, primed with the whole prompt."""
    stream = DecodeStream(ids=prompt, skip_special_tokens=skips)
    texts = [""]
    for token_id in outputs:
        texts.append(texts[-1] + (stream.step(tokenizer, token_id) or ""))
    return texts


# Stop strings


class Expected(NamedTuple):
    """Where a row ends by a stop string: which output, which string, and the text until then."""

    index: int
    stop: str
    text: str


def expected_stop(texts: list[str], stop: Sequence[str], includes_stop: bool, min_tokens: int) -> Expected | None:
    """The first stop string that counts, `texts` being the text by number of outputs."""
    for index in range(len(texts) - 1):
        text = texts[index + 1]
        for end in range(len(texts[index]) + 1, len(text) + 1):
            for string in stop:
                if index >= min_tokens and text[:end].endswith(string):
                    return Expected(index, string, text[:end] if includes_stop else text[: end - len(string)])
    return None


def held(text: str, stop: Sequence[str]) -> str:
    """The longest end of the text that begins a stop string."""
    for start in range(len(text)):
        if any(len(string) > len(text) - start and string.startswith(text[start:]) for string in stop):
            return text[start:]
    return ""


# Rows


def append_steps(text: TextRows, row: int, steps: Sequence[Sequence[int]]) -> tuple[int, list[str]]:
    """Appends step by step until a stop string is complete. Returns the index of the output that completes it, else -1,
    and what was delivered after each step."""
    pieces, num_outputs = [], 0
    for ids in steps:
        complete_at = text.append_one(row, np.array(ids, np.int32))
        pieces.append(text.take_one(row))
        if complete_at >= 0:
            return num_outputs + complete_at, pieces
        num_outputs += len(ids)
    return -1, pieces
