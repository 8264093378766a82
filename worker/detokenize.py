"""From ids to text: the table of a tokenizer whose ids are bytes, and streams for every other one.

The `tokenizers` library decodes with `DecodeStream`, which works for every tokenizer and is what `Stream` is made of.
In a byte-level tokenizer (GPT-2, Llama 3, Qwen, SmolLM and most others) an id always says the same bytes, and text is
their UTF-8: a table gives the same text, and compiled code can read it. `byte_table` makes one only where the decoder
is byte-level and nothing else, and where the library agrees on every id, alone and beside others.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncbook.worker.text_kernels import SPECIAL, WHOLE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
INVALID_PREFIX = "Invalid prefix encountered"  # how the library's message begins, which has no class of its own
# Of the prompt at first; more where they say nothing, or not whole characters. A multiple of the bytes of a character,
# so that a row of characters that are written in single bytes is not cut within one.
NUM_PRIMING_IDS = 12
MAX_LEFT_OUT = 16  # ids of a prompt that ends in broken text
MAX_PENDING_IDS = 64  # ids of a stream without text; it costs the square of them, and no character is that long
VERIFY_IDS = 512  # decoded at once

logger = logging.getLogger("asyncbook")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """What a tokenizer's ids are. Ids from `size` on, and `None` tokens, say nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        self.size = 1 + max([*tokenizer.get_vocab(with_added_tokens=True).values(), *added], default=-1)
        self.tokens: list[str | None] = [tokenizer.id_to_token(token_id) for token_id in range(self.size)]
        # By content, as the library does: it may be that two ids say the same.
        self.is_special = [token in special for token in self.tokens]
        is_token = [token is not None for token in self.tokens]
        # Without and with special tokens skipped: whether the id is part of what is decoded.
        self.is_said = is_token, [is_it and not skip for is_it, skip in zip(is_token, self.is_special, strict=True)]


class IdTable(NamedTuple):
    """What each id says, in bytes: `id_bytes[starts[i] : starts[i + 1]]`; `kinds` are flags. See `text_kernels.py`."""

    id_bytes: np.ndarray
    starts: np.ndarray
    kinds: np.ndarray

    @classmethod
    def of(cls, pieces: Sequence[bytes], is_special: Sequence[bool]) -> IdTable:
        """A table of these bytes."""
        kinds = [SPECIAL * special + WHOLE * _is_text(piece) for piece, special in zip(pieces, is_special, strict=True)]
        return cls.of_text(pieces)._replace(kinds=np.array(kinds, np.uint8))

    @classmethod
    def of_text(cls, pieces: Sequence[bytes]) -> IdTable:
        """A table of pieces of whole characters, none of them special."""
        starts = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum([len(piece) for piece in pieces], out=starts[1:])
        return cls(np.frombuffer(bytearray().join(pieces), np.uint8), starts, np.full(len(pieces), WHOLE, np.uint8))


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _bytes_of_characters() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes with: itself where it can be seen, else from U+0100 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTES = _bytes_of_characters()


def _byte_level(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:  # an added token is written as it is
        return token.encode()


def byte_table(tokenizer: Tokenizer, vocabulary: Vocabulary) -> IdTable | None:
    """The table of a byte-level tokenizer, None for any other, and where the library does not agree with it."""
    if tokenizer.decoder is None or json.loads(tokenizer.decoder.__getstate__())["type"] != "ByteLevel":
        return None
    pieces = [_byte_level(token) for token in vocabulary.tokens]
    if not _agrees(tokenizer, vocabulary, pieces):
        logger.warning("the tokenizer decodes its ids otherwise than byte by byte: text takes the slower way")
        return None
    return IdTable.of(pieces, vocabulary.is_special)


def _agrees(tokenizer: Tokenizer, vocabulary: Vocabulary, pieces: list[bytes]) -> bool:
    """Whether the library's text of all ids in order, of shuffled ones, and of pairs is that of the table."""
    if not pieces:
        return False
    rng = np.random.default_rng(0)
    in_order = np.arange(len(pieces))
    batches = [*_chunks(in_order), *_chunks(rng.permutation(in_order)), *rng.integers(0, len(pieces), (512, 2))]
    for ids in batches:
        for skips in (False, True):
            expected = b"".join(pieces[i] for i in ids if not (skips and vocabulary.is_special[i]))
            if tokenizer.decode(ids.tolist(), skip_special_tokens=skips) != expected.decode(errors="replace"):
                return False
    return True


def _chunks(ids: np.ndarray) -> Iterator[np.ndarray]:
    return (ids[start : start + VERIFY_IDS] for start in range(0, ids.size, VERIFY_IDS))


class Stream:
    """One request's text, id by id, by the library's `DecodeStream`."""

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: Vocabulary, prompt_token_ids: Sequence[int], skips_special: bool
    ) -> None:
        """The prompt is what comes before the first id; its own text is not given."""
        self._tokenizer, self._tokens, self._skips_special = tokenizer, vocabulary.tokens, skips_special
        self._is_said = vocabulary.is_said[skips_special]
        self._priming = self._priming_ids(prompt_token_ids)
        self._begin(self._priming)

    def _begin(self, priming: list[int]) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(ids=priming, skip_special_tokens=self._skips_special)
        self._before = priming.copy()  # ids of the last text that was given
        self._pending: list[int] = []  # since then

    def _says_something(self, token_id: int) -> bool:
        """Whether the id is part of what is decoded. A stream that is given others decodes ever more ids a step."""
        return 0 <= token_id < len(self._is_said) and self._is_said[token_id]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)

    def _priming_ids(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's last ids, as many as decide how the next one is written: some that are text of whole characters.
        A character that the prompt leaves incomplete is left out: outputs are the text of their own bytes."""
        ids = [token_id for token_id in prompt_token_ids if self._says_something(token_id)]
        for end in range(len(ids), max(len(ids) - MAX_LEFT_OUT, 0), -1):
            num_ids = NUM_PRIMING_IDS
            while True:
                priming = ids[max(end - num_ids, 0) : end]
                text = self._decode(priming)
                if text and not text.endswith(REPLACEMENT):
                    return priming
                if num_ids >= end or (text and num_ids > MAX_PENDING_IDS):
                    break
                num_ids *= 2
        return []

    def step(self, token_id: int) -> str:
        """What can be read now that could not before this id: whole characters, often none or more than one."""
        if not self._says_something(token_id):
            return ""
        lost = ""
        if len(self._pending) == MAX_PENDING_IDS:
            lost = self.rest()
            self._begin(self._priming)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            if not str(error).startswith(INVALID_PREFIX):
                raise
            lost = self.rest()
            text = self._restart(token_id)
        self._pending.append(token_id)
        if not text:
            return lost
        # Swapped, not made anew: new lists by the million would set the garbage collector to work.
        self._before, self._pending = self._pending, self._before
        self._pending.clear()
        return lost + text

    def _restart(self, token_id: int) -> str | None:
        """What came before has another text once this id follows, so the library refuses it: begins anew with it."""
        for priming in (self._priming, []):
            self._begin(priming)
            try:
                return self._stream.step(self._tokenizer, token_id)
            except Exception as error:
                if not priming or not str(error).startswith(INVALID_PREFIX):
                    raise
        return None

    def rest(self) -> str:
        """What the ids without text so far come to, if nothing follows: broken bytes; an incomplete character at the
        end is one U+FFFD."""
        if not self._pending:
            return ""
        before, text = self._decode(self._before), self._decode(self._before + self._pending)
        text = text[len(before) :] if text.startswith(before) else self._decode(self._pending)
        num_bytes = self._num_incomplete_bytes()
        # A decoder that falls back to bytes writes U+FFFD for each.
        if num_bytes and text.endswith(REPLACEMENT * num_bytes):
            text = text[: len(text) - num_bytes + 1]
        return text

    def _num_incomplete_bytes(self) -> int:
        """How many ids at the end are single bytes that a character begins with."""
        last = [_BYTE_TOKEN.fullmatch(self._tokens[token_id] or "") for token_id in self._pending[-3:]]
        for num_bytes in range(len(last), 0, -1):
            matches = [match for match in last[-num_bytes:] if match is not None]
            data = bytes(int(match[1], 16) for match in matches)
            if len(matches) == num_bytes and _begins_character(data):
                return num_bytes
        return 0


def _begins_character(data: bytes) -> bool:
    try:
        return codecs.utf_8_decode(data, "strict", False) == ("", 0)
    except UnicodeDecodeError:
        return False
