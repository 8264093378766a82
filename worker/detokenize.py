"""From ids to text: the table of a tokenizer whose ids are bytes, and streams for every other one.

The `tokenizers` library decodes with `DecodeStream`, which works for every tokenizer and is what `Stream` is made of.
In a byte-level tokenizer (GPT-2, Llama 3, Qwen, SmolLM and most others) an id always says the same bytes, and text is
their UTF-8; in one that comes from SentencePiece (Llama 2, Mistral, Gemma) as well, but for its fallback bytes and the
first space. A table gives the same text, and compiled code can read it. `byte_table` makes one only where the decoder
is one of these two, and where the library agrees on every id, alone and beside others.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncbook.worker.text_kernels import FALLBACK, SPECIAL, WHOLE

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
        # Some word that stands for any text: `[]` where there is none.
        self.any_word = next(
            ([i] for i, token in enumerate(self.tokens) if is_word(token) and tokenizer.decode([i]) == token), []
        )
        # Without and with special tokens skipped: whether the id is part of what is decoded.
        self.is_said = is_token, [is_it and not skip for is_it, skip in zip(is_token, self.is_special, strict=True)]


def is_word(token: str | None) -> bool:
    """Whether the token is written as it is said, with letters alone."""
    return token is not None and token.isascii() and token.isalpha()


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


def _bytes_of_characters() -> dict[int, int]:
    """The characters that byte-level tokenizers write bytes with: itself where it can be seen, else from U+0100 on. The
    hidden ones are no such character, and become one that is no byte. For `str.translate`."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return dict.fromkeys(hidden, 0x100) | {256 + index: byte for index, byte in enumerate(hidden)}


_BYTES = _bytes_of_characters()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:  # an added token is written as it is
        return token.encode()


class ByteTable(NamedTuple):
    """A tokenizer as a table. `has_fallback`: some ids are bytes for what has no other id, and a run of them is text as
    a whole or broken as a whole. `strips_space`: the space that all text begins with is none."""

    ids: IdTable
    has_fallback: bool
    strips_space: bool


class _Rule(NamedTuple):
    """How a decoder makes text of tokens, where that is a matter of each token alone."""

    piece: Callable[[str], bytes]
    has_fallback: bool = False
    strips_space: bool = False


def _rule(decoder: dict[str, Any]) -> _Rule | None:
    """The rule of a decoder, as its file describes it; None where it has none that is known here."""
    if decoder["type"] == "ByteLevel":
        return _Rule(_byte_level)
    if decoder["type"] != "Sequence":
        return None
    # As converted from SentencePiece: Replace, ByteFallback, Fuse, and Strip of the first space or not.
    replaced: list[tuple[str, str]] = []
    has_fallback, strips_space = False, False
    for part in decoder["decoders"]:
        match part:
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replaced.append((old, new))
            case {"type": "ByteFallback"}:
                has_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strips_space = True
            case _:
                return None

    def piece(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        if has_fallback and byte:
            return bytes([int(byte[1], 16)])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return _Rule(piece, has_fallback, strips_space)


def byte_table(tokenizer: Tokenizer, vocabulary: Vocabulary) -> ByteTable | None:
    """The table of a tokenizer, None where its decoder is none that is known here, or the library does not agree."""
    rule = _rule(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder is not None else None
    if rule is None:
        return None
    pieces = [b"" if token is None else rule.piece(token) for token in vocabulary.tokens]
    is_fallback = [rule.has_fallback and _BYTE_TOKEN.fullmatch(token or "") is not None for token in vocabulary.tokens]
    if not _agrees(tokenizer, vocabulary, rule, pieces, is_fallback):
        logger.warning("the tokenizer decodes its ids otherwise than was expected: text takes the slower way")
        return None
    ids = IdTable.of(pieces, vocabulary.is_special)
    ids.kinds[is_fallback] |= FALLBACK
    return ByteTable(ids, rule.has_fallback, rule.strips_space)


def _agrees(
    tokenizer: Tokenizer, vocabulary: Vocabulary, rule: _Rule, pieces: list[bytes], is_fallback: list[bool]
) -> bool:
    """Whether the library's text of all ids in order, of shuffled ones, and of pairs is that of the table. Fallback
    bytes are left out: what the library makes of them is not a matter of one id (see `text_kernels.py`)."""
    ids = np.flatnonzero(~np.array(is_fallback, np.bool_))
    if ids.size == 0:
        return False
    rng = np.random.default_rng(0)
    batches = [*_chunks(ids), *_chunks(rng.permutation(ids)), *rng.choice(ids, (512, 2)), *rng.choice(ids, (512, 1))]
    for batch in batches:
        token_ids = batch.tolist()
        for skips in (False, True):
            said = [i for i in token_ids if not vocabulary.is_special[i]] if skips else token_ids
            expected = b"".join([pieces[i] for i in said])
            if rule.strips_space:
                expected = expected.removeprefix(b" ")
            if tokenizer.decode(token_ids, skip_special_tokens=skips) != expected.decode(errors="replace"):
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
        self._is_said, self._any_word = vocabulary.is_said[skips_special], vocabulary.any_word
        self._begin(self._priming_ids(prompt_token_ids))

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
            if not text:
                return priming
        return self._any_word if ids else []

    def step(self, token_id: int) -> str:
        """What can be read now that could not before this id: whole characters, often none or more than one."""
        if not self._says_something(token_id):
            return ""
        lost = ""
        if len(self._pending) == MAX_PENDING_IDS:
            lost = self._broken_text()
            self._begin(self._any_word)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            if not str(error).startswith(INVALID_PREFIX):
                raise
            lost = self._broken_text()
            text = self._restart(token_id)
        self._pending.append(token_id)
        if not text:
            return lost
        # Swapped, not made anew: new lists by the million would set the garbage collector to work.
        self._before, self._pending = self._pending, self._before
        self._pending.clear()
        return lost + text

    def _restart(self, token_id: int) -> str | None:
        """What came before has another text once this id follows, so the library refuses it: begins anew with it, as
        behind any text."""
        for priming in (self._any_word, []):
            self._begin(priming)
            try:
                return self._stream.step(self._tokenizer, token_id)
            except Exception as error:
                if not priming or not str(error).startswith(INVALID_PREFIX):
                    raise
        return None

    def rest(self) -> str:
        """What the ids without text so far come to when nothing follows: an incomplete character is one U+FFFD."""
        text, num_bytes = self._broken_text(), self._num_incomplete_bytes()
        # A decoder that falls back to bytes writes U+FFFD for each.
        if num_bytes and text.endswith(REPLACEMENT * num_bytes):
            text = text[: len(text) - num_bytes + 1]
        return text

    def _broken_text(self) -> str:
        """What the library makes of the ids without text so far."""
        if not self._pending:
            return ""
        # Where anything was said, behind a word: no decoder takes a first space off then.
        word = self._any_word if self._before else []
        before = word + self._before
        if not (text := self._decode(before + self._pending)).startswith(self._decode(before)):
            before = word
            text = self._decode(before + self._pending)
        return text[len(self._decode(before)) :]

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
        data.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return False
