"""The ways to decode that the tests of text compare."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from asyncbook.worker.text import TextRows
from tests.unit.text_oracle import byte_id, byte_level, certain_texts, metaspace, streamed_texts

KINDS = ("table", "streams", "metaspace", "metaspace-streams")
NUM_ROWS = 5


class Kind:
    """A tokenizer, and rows that decode it one way."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.tokenizer: Tokenizer = metaspace() if name.startswith("metaspace") else byte_level()
        self.path = folder / f"{name}.json"
        self.tokenizer.save(str(self.path))
        self.text = TextRows(self.path, NUM_ROWS, uses_table=not name.endswith("streams"))

    @property
    def prompt(self) -> list[int]:
        return self.encode("hello cat")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def ids_behind_prompt(self, text: str) -> list[int]:
        """Ids of a text that goes on where another ends."""
        if self.tokenizer is byte_level():
            return self.encode(text)
        return self.encode("a" + text)[1:] if self.encode("a" + text)[0] == self.encode("a")[0] else self.encode(text)

    def bytes_of(self, data: bytes) -> list[int]:
        return [byte_id(self.tokenizer, byte) for byte in data]

    def texts(self, outputs: list[int], skips: bool = True) -> list[str]:
        """What this kind knows for certain after each id."""
        if self.text.uses_table:
            return certain_texts(self.tokenizer, self.prompt, outputs, skips)
        return streamed_texts(self.tokenizer, self.prompt, outputs, skips)


def make_kinds(folder: Path) -> dict[str, Kind]:
    """One of each."""
    return {name: Kind(name, folder) for name in KINDS}
