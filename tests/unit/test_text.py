"""Text of rows against the oracle: incremental text is that of decoding everything at once."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from asyncbook.ipc import jit
from asyncbook.worker import detokenize
from asyncbook.worker.detokenize import MAX_PENDING_IDS
from asyncbook.worker.text import TextRows
from asyncbook.worker.text_kernels import BLOCK_SIZE, NUM_FREE
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

KINDS = ("table", "streams", "metaspace", "metaspace-streams")
NUM_ROWS = 5
CHARACTERS = st.sampled_from([*"abc  \n.STOPEND", "é", "e\u0301", "你", "好", "😀", "🙂", "👩‍👩‍👧", "\u00a0", "ø"])
TEXT = st.lists(CHARACTERS, max_size=20).map("".join)


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
    assert [kinds[name].text.uses_table for name in KINDS] == [True, False, True, False]


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
    return ids[: draw(st.integers(0, len(ids)))] if draw(st.booleans()) else ids


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
    ids = data.draw(outputs(kind) if kind.tokenizer is metaspace() else outputs(kind) | broken_outputs(kind))
    skips = data.draw(st.booleans())
    kind.text.open(0, kind.prompt, skip_special_tokens=skips)
    steps = split(data.draw, ids)
    _, pieces = append_steps(kind.text, 0, steps)
    known = kind.texts(ids, skips)
    num_outputs = np.cumsum([len(step) for step in steps]).tolist()
    assert ["".join(pieces[: i + 1]) for i in range(len(steps))] == [known[n] for n in num_outputs]
    assert "".join(pieces) + kind.text.take_one(0, True) == whole_text(kind.tokenizer, kind.prompt, ids, skips)
    assert kind.text.take_one(0, True) == ""


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_broken_bytes_are_the_same_text_in_a_table_and_in_streams(kinds: dict[str, Kind], data: st.DataObject) -> None:
    """What the library makes of a broken run of fallback bytes depends on what was read of it before, so the text of
    decoding all at once is no measure; for byte-level ids it is, and was compared above. A space is never written as a
    fallback byte: the library would take it off, and put it back as U+FFFD where the run is broken later."""
    table, streams = kinds["metaspace"], kinds["metaspace-streams"]
    space = byte_id(table.tokenizer, 0x20)
    ids = [token_id for token_id in data.draw(broken_outputs(table)) if token_id != space]
    prompt = data.draw(st.sampled_from([table.prompt, [1], [1, *table.bytes_of("你".encode())]]))
    texts = []
    for kind in (table, streams):
        kind.text.open(0, prompt)
        texts.append("".join(append_steps(kind.text, 0, [[token_id] for token_id in ids])[1]))
        texts[-1] += kind.text.take_one(0, True)
    assert texts[0] == texts[1]


def test_every_kind_of_broken_utf8_is_what_the_library_makes_of_it(kinds: dict[str, Kind]) -> None:
    """All pairs of bytes, and three or four where the least and the greatest of a range stand beside each other."""
    edges = bytes.fromhex("417F808F909FA0BFC0C1C2DFE0E1ECEDEEEFF0F1F3F4F5FF")
    first = bytes.fromhex("E0EDF0F1F4")
    parts = [*product(range(256), range(256)), *product(first, edges, edges), *product(first, edges, edges, edges)]
    data = b"a".join(map(bytes, parts))
    kind = kinds["table"]
    byte_ids = np.array(kind.bytes_of(bytes(range(256))), np.int32)
    ids = byte_ids[np.frombuffer(data, np.uint8)]
    rows = TextRows(kind.path, 1)  # others are looked at for how much they grow
    rows.append_one(0, ids)
    text = rows.take_one(0, True)
    assert text == data.decode(errors="replace")
    assert text == kind.tokenizer.decode(ids.tolist())


# The prompt


@pytest.mark.parametrize("length", [1, 30, 500])
def test_the_first_output_is_written_as_behind_the_prompt(kind: Kind, length: int) -> None:
    prompt = (kind.encode("the cat sat on the mat, ") * length)[: length + 1]
    ids = kind.encode("hello hello")
    kind.text.open(0, prompt)
    kind.text.append_one(0, ids)
    before = kind.tokenizer.decode(prompt)
    assert kind.text.take_one(0) == kind.tokenizer.decode(prompt + ids).removeprefix(before)


@pytest.mark.parametrize("num_special", [1, 40])
def test_behind_special_tokens_alone_it_is_written_as_the_first(kind: Kind, num_special: int) -> None:
    ids = kind.encode("hello hello")
    for prompt in ([1] * num_special, [1] * num_special + [100_000]):
        kind.text.open(0, prompt)
        kind.text.append_one(0, ids)
        assert kind.text.take_one(0) == kind.tokenizer.decode(ids)
    prompt = kind.encode("cat") + [1] * num_special
    kind.text.open(0, prompt)
    kind.text.append_one(0, ids)
    assert "cat" + kind.text.take_one(0) == kind.tokenizer.decode(prompt + ids)


@pytest.mark.parametrize("uses_table", [True, False])
def test_ids_of_a_prompt_that_are_no_text_but_are_there(tmp_path: Path, uses_table: bool) -> None:
    """What the next id is written behind is found in front of them; a space alone is taken off, and takes it all."""
    tokenizer = Tokenizer.from_str(metaspace().to_str())
    parts = [("▁", " "), ("x", "")]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(*part) for part in parts]
        + [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = TextRows(tmp_path / "tokenizer.json", 1, uses_table=uses_table)
    assert text.uses_table == uses_table
    says_nothing, space, outputs = tokenizer.token_to_id("x"), tokenizer.token_to_id("▁"), tokenizer.encode("hello").ids
    for prompt in ([*tokenizer.encode("cat").ids, *[says_nothing] * 30], [space]):
        text.open(0, prompt)
        text.append_one(0, outputs)
        assert text.take_one(0) == " hello" == whole_text(tokenizer, prompt, outputs)


@pytest.mark.parametrize("prompt", ["a 你", "你好" * 30, "🙂" * 40, "a" + "你" * 20 + "🙂" * 30])
@pytest.mark.parametrize("num_cut", [0, 1, 2])
def test_a_prompt_that_ends_within_a_character_changes_nothing(kind: Kind, prompt: str, num_cut: int) -> None:
    ids = kind.bytes_of(prompt.encode())
    kind.text.open(0, ids[: len(ids) - num_cut])
    outputs = kind.encode("the cat")
    kind.text.append_one(0, outputs)
    assert kind.text.take_one(0) == kind.tokenizer.decode(kind.encode("a") + outputs).removeprefix("a")


# Ends


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_incomplete_character_at_the_end_is_one_replacement(kind: Kind, num_bytes: int) -> None:
    kind.text.open(0, kind.prompt, stop=[REPLACEMENT])
    assert kind.text.append_one(0, kind.bytes_of("a😀".encode()[: 1 + num_bytes])) == -1
    assert kind.text.take_one(0) == "a"
    assert kind.text.take_one(0, True) == REPLACEMENT
    assert kind.text.take_one(0, True) == ""
    assert kind.text.append_one(0, kind.encode("cat")) == -1
    assert kind.text.take_one(0, True) == ""


def test_what_is_held_at_a_release_is_not_delivered_again(kind: Kind) -> None:
    """A request that was aborted delivered what it held; taken up again it still knows that a stop string had begun."""
    ids = kind.bytes_of(b"abcde")
    for row, earlier in ((0, 2), (1, 3)):
        kind.text.open(row, kind.prompt, stop=["bcd"])
        assert kind.text.append_one(row, ids[:earlier]) == -1
        assert kind.text.take_one(row) + kind.text.take_one(row, True) == "abc"[:earlier]
        assert kind.text.open(row, kind.prompt, ids[:earlier], stop=["bcd"]) == -1
        assert kind.text.append_one(row, ids[earlier:]) == 3 - earlier
        assert kind.text.take_one(row, True) == ""
        assert kind.text.stop_string(row) == "bcd"
    kind.text.open(0, kind.prompt, ids[:3], stop=["bcx"])
    assert kind.text.append_one(0, ids[3:]) == -1
    assert kind.text.take_one(0, True) == "de"


def test_earlier_outputs_that_complete_a_stop_string_end_the_request_again(kind: Kind) -> None:
    ids = kind.bytes_of(b"abcde")
    assert kind.text.open(0, kind.prompt, ids[:3], stop=["bc"]) == 2
    assert (kind.text.stop_string(0), kind.text.take_one(0, True)) == ("bc", "")
    assert kind.text.open(0, kind.prompt, ids[:4], stop=["bc"]) == -1, "it did not end it then"
    assert kind.text.open(0, kind.prompt, ids[:3], stop=["bc"], min_tokens=3) == -1
    assert kind.text.open(0, kind.prompt, ids[:3], stop=["bc"], last_is_stop_id=True) == -1


# Memory


def test_a_slow_reader_gets_it_in_one_piece(kind: Kind) -> None:
    ids = kind.encode("the cat sat on the mat 你好")
    kind.text.open(0, kind.prompt)
    for _ in range(300):
        kind.text.append_one(0, ids)
    text = kind.text.take_one(0)
    assert text == whole_text(kind.tokenizer, kind.prompt, ids * 300)
    reserved = kind.text.num_bytes_reserved
    for _ in range(20):  # a second tenant with as much does not need more
        kind.text.open(1, kind.prompt)
        for _ in range(300):
            kind.text.append_one(1, ids)
        kind.text.close(1)
    assert kind.text.num_bytes_reserved == reserved
    assert reserved < 4 * len(text.encode()) + 1000 * NUM_ROWS


def test_blocks_come_back(kind: Kind) -> None:
    """However a row goes: read, cut at a stop string, or closed with text waiting."""
    ids = kind.encode("the cat sat on the mat STOP here " * 20)
    reserved = 0
    for turn in range(60):
        kind.text.open(turn % NUM_ROWS, kind.prompt, stop=["STOP here the cat sat on"] if turn % 2 else [])
        kind.text.append_one(turn % NUM_ROWS, ids)
        if turn % 3 == 0:
            kind.text.take_one(turn % NUM_ROWS, turn % 4 == 0)
        reserved = reserved or kind.text.num_bytes_reserved
        if turn == 20:
            reserved = kind.text.num_bytes_reserved
    assert kind.text.num_bytes_reserved == reserved
    for row in range(NUM_ROWS):
        kind.text.close(row)
    assert int(kind.text._free[NUM_FREE]) == kind.text._links.size


def test_a_row_taken_up_again_after_its_end_was_delivered_writes_on_no_other(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    text, x, broken = TextRows(tmp_path / "tokenizer.json", 2), byte_id(byte_level(), 120), byte_id(byte_level(), 0xF0)
    text.open(0, [x])
    text.append_one(0, [x] * BLOCK_SIZE)
    # One byte of the last U+FFFD is in the next block.
    outputs = [x] * (BLOCK_SIZE - 2) + [broken]
    text.open(1, [x], outputs, num_delivered_bytes=BLOCK_SIZE + 1)
    assert (text.take_one(1), text.take_one(1, True)) == ("", "")
    assert text.take_one(0) == "x" * BLOCK_SIZE


def test_a_stream_without_text_does_not_grow(kinds: dict[str, Kind]) -> None:
    """The library decodes everything again that has had no text yet."""
    kind = kinds["metaspace-streams"]
    kind.text.open(0, kind.prompt)
    broken, special = byte_id(kind.tokenizer, 0xFF), 2
    kind.text.append_one(0, [broken] * 1000 + [special] * 1000)
    stream = kind.text._streams[0]
    assert stream is not None
    assert len(stream._pending) <= MAX_PENDING_IDS
    assert kind.text.take_one(0, True) == REPLACEMENT * 1000


# Which tokenizers are a table


def test_a_decoder_that_is_not_known_is_decoded_by_the_library(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 0, 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert not TextRows(tmp_path / "tokenizer.json", 1).uses_table


def test_a_table_that_the_library_does_not_agree_with_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    byte_of, other = detokenize._byte_level, byte_level().id_to_token(300)
    monkeypatch.setattr(detokenize, "_byte_level", lambda token: b"dog" if token == other else byte_of(token))
    assert not TextRows(tmp_path / "tokenizer.json", 1).uses_table
    assert "otherwise than was expected" in caplog.text


def test_an_error_of_the_library_that_is_no_invalid_prefix_is_not_hidden(kinds: dict[str, Kind]) -> None:
    kind = kinds["streams"]
    kind.text.open(0, kind.prompt)
    stream = kind.text._streams[0]
    assert stream is not None

    def fail(*arguments: object) -> str:
        raise RuntimeError("another error")

    stream._stream = SimpleNamespace(step=fail)
    with pytest.raises(RuntimeError, match="another error"):
        kind.text.append_one(0, kind.encode("cat"))


# Rows that stop


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
