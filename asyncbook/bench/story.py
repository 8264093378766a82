"""Text for benchmarks: natural language as ids of a tokenizer, and the stop strings that are looked for in it.

The stop strings never occur in the story, though it is full of their first letters; the last words complete one.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import click
import numpy as np

STOP = ("the end.", "\n\n\n\n")
LAST_WORDS = " this is the end."


def story_text() -> str:
    """A few thousand characters of natural language, all of them ASCII: no id ends within a character."""
    lines = (files("asyncbook.demo") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return " ".join(json.loads(line)["prompt"] for line in lines)


@dataclass(frozen=True)
class Story:
    """`token_ids` int32, read round and round; `last_words` int32. Every id is below `vocab_size`."""

    tokenizer: Path
    vocab_size: int
    token_ids: np.ndarray
    last_words: np.ndarray

    @classmethod
    def of(cls, tokenizer: Path) -> Story:
        """The story in the ids of a tokenizer.json."""
        from tokenizers import Tokenizer

        library = Tokenizer.from_file(str(tokenizer))
        encodings = (library.encode(text, add_special_tokens=False) for text in (story_text(), LAST_WORDS))
        story, last_words = (np.array(encoding.ids, np.int32) for encoding in encodings)
        vocab_size = 1 + max(library.get_vocab(with_added_tokens=True).values())
        return cls(tokenizer, vocab_size, story, last_words)

    def prompt(self, num_ids: int) -> np.ndarray:
        """int32 [num_ids]: the story from its beginning."""
        return np.resize(self.token_ids, num_ids)

    def outputs(self, row: int, num_ids: int, last_words_at: int = -1) -> np.ndarray:
        """int32 [num_ids]: each row is somewhere else in the story. From `last_words_at` on stand the last words, and
        the story goes on behind them."""
        ids = np.resize(np.roll(self.token_ids, -7 * row), num_ids)
        if last_words_at < 0:
            return ids
        return np.concatenate([ids[:last_words_at], self.last_words, ids[last_words_at:]])[:num_ids]


@contextmanager
def open_story(tokenizer: Path | None) -> Iterator[Story]:
    """The story by this tokenizer.json, or else by SmolLM2's, which is written to a file for as long as this is open.
    Raises `click.ClickException` where there is neither."""
    if importlib.util.find_spec("tokenizers") is None:
        raise click.ClickException('text needs the tokenizers library: pip install "asyncbook[text]"')
    if tokenizer is not None:
        yield Story.of(tokenizer)
        return
    from asyncbook.demo import CannotRun
    from asyncbook.demo.smollm2 import read_tokenizer, smollm2_path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        try:
            from gguf import GGUFReader

            read_tokenizer(GGUFReader(smollm2_path())).save(path)
        except (CannotRun, ModuleNotFoundError) as error:
            raise click.ClickException("text needs --tokenizer tokenizer.json: SmolLM2 is not installed") from error
        yield Story.of(path)
