"""Text of rows against the oracle: incremental text is that of decoding everything at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from asyncbook.ipc import jit
from asyncbook.worker.text import TextRows
from tests.unit.text_oracle import (
    REPLACEMENT,
    append_steps,
    byte_id,
    byte_level,
    certain_texts,
    expected_stop,
    held,
    metaspace,
    streamed_texts,
    whole_text,
)

KINDS = ("table", "streams", "metaspace")
NUM_ROWS = 5
CHARACTERS = st.sampled_from([*"abc  \n.STOPEND", "é", "e\u0301", "你", "好", "😀", "🙂", "👩‍👩‍👧", "\u00a0", "ø"])
TEXT = st.lists(CHARACTERS, max_size=20).map("".join)


class Kind:
    """A tokenizer, and rows that decode it one way."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.tokenizer: Tokenizer = metaspace() if name == "metaspace" else byte_level()
        path = folder / f"{name}.json"
        self.tokenizer.save(str(path))
        self.text = TextRows(path, NUM_ROWS, uses_table=name != "streams")

    @property
    def prompt(self) -> list[int]:
        return self.encode("hello cat")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def ids_behind_prompt(self, text: str) -> list[int]:
        """Ids of a text that goes on where another ends."""
        if self.name != "metaspace":
            return self.encode(text)
        return self.encode("a" + text)[1:] if self.encode("a" + text)[0] == self.encode("a")[0] else self.encode(text)

    def bytes_of(self, data: bytes) -> list[int]:
        return [byte_id(self.tokenizer, byte) for byte in data]

    def texts(self, outputs: list[int], skips: bool = True) -> list[str]:
        """What this kind knows for certain after each id."""
        if self.name == "table":
            return certain_texts(self.tokenizer, self.prompt, outputs, skips)
        return streamed_texts(self.tokenizer, self.prompt, outputs, skips)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    jit.compile_all()


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {name: Kind(name, folder) for name in KINDS}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, kinds: dict[str, Kind]) -> Kind:
    """One way to decode."""
    return kinds[request.param]


def test_which_tokenizer_is_looked_up(kinds: dict[str, Kind]) -> None:
    assert [kinds[name].text.uses_table for name in KINDS] == [True, False, False]


# Drawn


@st.composite
def outputs(draw: st.DrawFn, kind: Kind) -> list[int]:
    """Ids of some text, with others between them: special, unknown, single bytes of whole characters."""
    ids: list[int] = []
    for text in draw(st.lists(TEXT, min_size=1, max_size=4)):
        ids += kind.ids_behind_prompt(text)
        extra = draw(st.sampled_from(["none", "special", "unknown", "bytes"]))
        if extra == "special":
            ids += [1]
        elif extra == "unknown":
            ids += [100_000]
        elif extra == "bytes":
            ids += kind.bytes_of(draw(CHARACTERS).encode())
    return ids


@st.composite
def broken_outputs(draw: st.DrawFn, kind: Kind) -> list[int]:
    """Any ids in any order, single bytes among them."""
    some_id = st.integers(0, kind.tokenizer.get_vocab_size() + 3)
    some_byte = st.integers(0, 255).map(lambda byte: byte_id(kind.tokenizer, byte))
    return draw(st.lists(some_id | some_byte, max_size=30))


def split(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    """The ids in steps."""
    steps, rest = [], ids
    while rest:
        size = draw(st.integers(1, 4))
        steps.append(rest[:size])
        rest = rest[size:]
    return steps


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_text_is_that_of_decoding_all_at_once(kinds: dict[str, Kind], name: str, data: st.DataObject) -> None:
    kind = kinds[name]
    ids = data.draw(outputs(kind) if name == "metaspace" else outputs(kind) | broken_outputs(kind))
    skips = data.draw(st.booleans())
    kind.text.open(0, kind.prompt, skip_special_tokens=skips)
    steps = split(data.draw, ids)
    _, pieces = append_steps(kind.text, 0, steps)
    known = kind.texts(ids, skips)
    num_outputs = np.cumsum([len(step) for step in steps]).tolist()
    assert ["".join(pieces[: i + 1]) for i in range(len(steps))] == [known[n] for n in num_outputs]
    assert "".join(pieces) + kind.text.take_one(0, True) == whole_text(kind.tokenizer, kind.prompt, ids, skips)
    assert kind.text.take_one(0, True) == ""


@st.composite
def stop_lists(draw: st.DrawFn, text: str) -> list[str]:
    """Stop strings, most of them from the text."""
    stops = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(len(text) - 1, 0)))
        part = text[start : start + draw(st.integers(1, 4))]
        stops.append(part if part and draw(st.integers(0, 3)) else draw(st.text("abSTO 你\n", min_size=1, max_size=3)))
    return [string for string in stops if REPLACEMENT not in string] or ["a"]


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_stop_strings_end_a_row_where_the_oracle_says(kinds: dict[str, Kind], name: str, data: st.DataObject) -> None:
    kind = kinds[name]
    ids = data.draw(outputs(kind))
    whole = whole_text(kind.tokenizer, kind.prompt, ids)
    stop = data.draw(stop_lists(whole))
    includes_stop, min_tokens = data.draw(st.booleans()), data.draw(st.integers(0, 3) | st.integers(0, 20))
    kind.text.open(0, kind.prompt, stop=stop, include_stop_str_in_output=includes_stop, min_tokens=min_tokens)
    steps = split(data.draw, ids)
    index, pieces = append_steps(kind.text, 0, steps)
    known = kind.texts(ids)
    expected = expected_stop(known, stop, includes_stop, min_tokens)
    num_outputs = 0
    for i, step in enumerate(steps[: len(pieces) - (expected is not None)]):
        num_outputs += len(step)
        text = known[num_outputs]
        ready = text if includes_stop else text.removesuffix(held(text, stop))
        assert "".join(pieces[: i + 1]) == ready
    assert index == (expected.index if expected else -1)
    assert kind.text.stop_string(0) == (expected.stop if expected else None)
    assert "".join(pieces) + kind.text.take_one(0, True) == (expected.text if expected else whole)


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_a_row_taken_up_again_goes_on_exactly(kinds: dict[str, Kind], name: str, data: st.DataObject) -> None:
    """Cut anywhere: prompt, outputs and the number of delivered bytes are all that must be kept."""
    kind = kinds[name]
    ids = data.draw(outputs(kind))
    options: dict[str, Any] = {
        "stop": data.draw(stop_lists(whole_text(kind.tokenizer, kind.prompt, ids))),
        "include_stop_str_in_output": data.draw(st.booleans()),
        "min_tokens": data.draw(st.integers(0, 10)),
    }
    text = kind.text
    text.open(0, kind.prompt, **options)
    cut = data.draw(st.integers(0, len(ids)))
    is_read = data.draw(st.booleans())
    at_cut = text.append_one(0, ids[:cut])
    ids_kept = ids[: at_cut + 1] if at_cut >= 0 else ids[:cut]
    before = text.take_one(0) if is_read else ""
    text.open(1, kind.prompt, ids_kept, **options, num_delivered_bytes=text.num_delivered_bytes(0))
    assert text.stop_string(1) == text.stop_string(0)
    index = -1
    if at_cut < 0:
        index = text.append_one(0, ids[cut:])
        assert text.append_one(1, ids[cut:]) == index
        index += cut if index >= 0 else 0
    assert text.num_delivered_bytes(1) == len(before.encode())
    assert text.take_one(1) == text.take_one(0)
    assert text.take_one(1, True) == text.take_one(0, True)
    # The process is gone between the delivery of the end and whatever releases the row.
    kept = ids_kept if at_cut >= 0 else ids[: index + 1] if index >= 0 else ids
    text.open(2, kind.prompt, kept, **options, num_delivered_bytes=text.num_delivered_bytes(0))
    assert text.take_one(2, True) == ""
