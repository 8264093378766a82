"""Text of rows against the oracle: incremental text is that of decoding everything at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbook.ipc import jit
from tests.unit.text_kinds import KINDS, Kind, make_kinds
from tests.unit.text_oracle import REPLACEMENT, append_steps, byte_id, expected_stop, held, metaspace, whole_text

CHARACTERS = st.sampled_from([*"abc  \n.STOPEND", "é", "e\u0301", "你", "好", "😀", "🙂", "👩‍👩‍👧", "\u00a0", "ø"])
TEXT = st.lists(CHARACTERS, max_size=20).map("".join)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    jit.compile_all()


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return make_kinds(tmp_path_factory.mktemp("tokenizers"))


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
