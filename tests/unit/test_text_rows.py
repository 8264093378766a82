"""Text of rows, one thing at a time: behind which prompt, at its end, in what memory; which tokenizer is a table."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders

from asyncbook.ipc import jit
from asyncbook.worker import detokenize
from asyncbook.worker.detokenize import MAX_PENDING_IDS
from asyncbook.worker.text import TextRows
from asyncbook.worker.text_kernels import BLOCK_SIZE, NUM_FREE
from tests.unit.text_kinds import KINDS, NUM_ROWS, Kind, make_kinds
from tests.unit.text_oracle import REPLACEMENT, byte_id, byte_level, metaspace, whole_text


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    jit.compile_all()


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return make_kinds(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, kinds: dict[str, Kind]) -> Kind:
    """One way to decode."""
    return kinds[request.param]


def test_which_tokenizer_is_looked_up(kinds: dict[str, Kind]) -> None:
    assert [kinds[name].text.uses_table for name in KINDS] == [True, False, True, False]


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
    # One byte of the last U+FFFD is in the next block.
    outputs = [x] * (BLOCK_SIZE - 2) + [broken]
    text.open(1, [x], outputs, num_delivered_bytes=BLOCK_SIZE + 1)
    assert text.take_one(1) == ""
    text.append_one(0, [x] * BLOCK_SIZE)
    assert text.take_one(1, True) == ""
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
