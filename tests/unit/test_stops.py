"""Stop strings: the table, and what group D of the cases from the field says, on rows of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbook.ipc import jit
from asyncbook.worker.stops import StopTable, border_lengths
from asyncbook.worker.text import TextRows
from tests.unit.text_oracle import REPLACEMENT, append_steps, byte_id, metaspace, of_pieces

PROMPT = [0]
OPEN = Callable[..., TextRows]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    jit.compile_all()


@pytest.fixture(params=["table", "streams"])
def open_row(request: pytest.FixtureRequest, tmp_path: Path) -> OPEN:
    """`open_row(pieces, special=(), **options of open)`: rows whose ids say these pieces, with row 0 open."""

    def make(pieces: Sequence[str], special: Sequence[str] = (), **options: object) -> TextRows:
        path = tmp_path / "tokenizer.json"
        of_pieces(pieces, special).save(str(path))
        text = TextRows(path, 2, uses_table=request.param == "table")
        assert text.uses_table == (request.param == "table")
        text.open(0, PROMPT, **options)  # type: ignore[arg-type]
        return text

    return make


# The table


@given(st.text("ab", min_size=1, max_size=12))
@settings(deadline=None)
def test_borders_are_the_longest(string: str) -> None:
    for length, border in enumerate(border_lengths(string.encode()), start=1):
        prefix = string[:length]
        assert border == max(k for k in range(length) if prefix.startswith(prefix[length - k :]))


def test_a_row_with_more_or_longer_stop_strings_widens_all() -> None:
    stops = StopTable(2)
    stops.set(0, ["ab", "你"])
    stops.set(1, [f"{number:02}" + "x" * 40 for number in range(9)])
    assert stops.stop_bytes[0, : stops.ends[0, 2]].tobytes().decode() == "ab你"
    assert stops.ends[0, :3].tolist() == [0, 2, 5]
    assert [
        stops.stop_bytes[1, a:b].tobytes()[:2] for a, b in zip(stops.ends[1, :9], stops.ends[1, 1:10], strict=True)
    ] == [b"%02d" % number for number in range(9)]


def test_a_row_given_again_has_nothing_of_the_last_one(open_row: OPEN) -> None:
    text = open_row(["a", "b"], stop=["aaab", "b"])
    text.append_one(0, [0, 0, 0])
    text.open(0, PROMPT, stop=["aaab"])
    assert text.append_one(0, [1]) == -1
    assert text.take_one(0) == "b"
    text.open(0, PROMPT)
    assert text.append_one(0, [0, 0, 0, 1]) == -1
    assert text.take_one(0) == "aaab"


@pytest.mark.parametrize("stop", [[""], ["a", ""], ["\ud800"]])
def test_a_stop_string_that_cannot_be_is_refused(open_row: OPEN, stop: list[str]) -> None:
    text = open_row(["a"])
    with pytest.raises(ValueError, match=r"stop string is empty|surrogates not allowed"):
        text.open(0, PROMPT, stop=stop)


# Which stop string


def test_the_one_whose_last_character_comes_first_wins(open_row: OPEN) -> None:
    text = open_row(["abcdef"], stop=["abcde", "bc", "def"])
    assert text.append_one(0, [0]) == 0
    assert text.stop_string(0) == "bc"
    assert text.take_one(0, True) == "a"


@pytest.mark.parametrize(("stop", "left"), [(["bc", "abc"], "a"), (["abc", "bc"], "")])
def test_of_those_that_end_together_the_first_of_the_list_wins(open_row: OPEN, stop: list[str], left: str) -> None:
    text = open_row(["ab", "c"], stop=stop)
    assert text.append_one(0, [0, 1]) == 1
    assert text.stop_string(0) == stop[0]
    assert text.take_one(0, True) == left


def test_stop_strings_of_the_prompt_do_not_count(open_row: OPEN) -> None:
    text = open_row(["a", "b"])
    text.open(0, [0, 0], stop=["ab"])
    assert text.append_one(0, [1]) == -1
    assert text.take_one(0) == "b"


def test_a_row_that_has_ended_takes_nothing_more(open_row: OPEN) -> None:
    text = open_row(["a", "b"], stop=["b"])
    assert text.append_one(0, [0, 1, 0]) == 1
    assert text.append_one(0, [0, 1]) == -1
    assert text.take_one(0, True) == "a"
    text.open(1, PROMPT)
    assert text.take_one(1, True) == ""
    text.append_one(1, [0])
    assert text.take_one(1, True) == ""


def test_rows_of_one_step_do_not_touch_each_other(open_row: OPEN) -> None:
    text = open_row(["a", "b", "c"], stop=["bc"])
    text.open(1, PROMPT, stop=["c"], include_stop_str_in_output=True)
    rows, width = np.array([1, 0], np.int32), 3
    ids = np.array([0, 2, 1, 1, 2, -1], np.int32)
    complete_at = text.append(rows, ids, width, np.array([3, 2], np.int32), np.zeros(2, np.bool_))
    assert complete_at.tolist() == [1, 1]
    texts = text.take(rows, np.ones(2, np.bool_))
    assert (texts.text(0), texts.text(1)) == ("ac", "")
    assert texts.offsets.tolist() == [0, 2, 2]


# Cases from the field


def test_d1_text_that_may_become_a_stop_string_is_not_delivered(open_row: OPEN) -> None:
    text = open_row(["DEF", "G", "HI", "J", " xDEFGHIJK"], stop=["DEFGHIJ"])
    assert append_steps(text, 0, [[0], [1], [2], [3]]) == (3, ["", "", "", ""])
    assert text.stop_string(0) == "DEFGHIJ"
    assert text.take_one(0, True) == ""
    text.open(1, PROMPT, stop=["DEFGHIJ"])
    assert append_steps(text, 1, [[4]]) == (0, [" x"])
    assert text.take_one(1, True) == ""


def test_d2_held_is_what_can_still_become_a_stop_string_and_no_more(open_row: OPEN) -> None:
    text = open_row(["he", "llo x", "y", "one, five", " six"], stop=["xyz"])
    assert append_steps(text, 0, [[0], [1], [2]]) == (-1, ["he", "llo ", ""])
    assert text.take_one(0, True) == "xy", "held text is delivered when the request ends otherwise"
    text.open(1, PROMPT, stop=["five"])
    assert append_steps(text, 1, [[3, 4]]) == (0, ["one, "])
    assert text.take_one(1, True) == "", "nothing follows a stop string"


def test_d4_a_stop_string_comes_before_the_end_of_sequence_behind_it(open_row: OPEN) -> None:
    text = open_row(["a", "ST", "OP"], ["<eos>"], stop=["STOP"])
    assert text.append_one(0, [0, 1, 2, 3], is_stop_id=True) == 2, "three ids are kept: <eos> is not counted"
    assert text.stop_string(0) == "STOP"
    assert text.take_one(0, True) == "a"


@pytest.mark.parametrize("steps", [[[0], [1], [2], [3], [1]], [[0, 1, 2], [3, 1]], [[0, 1, 2, 3, 1]]])
def test_d6_a_stop_string_before_min_tokens_never_counts(open_row: OPEN, steps: list[list[int]]) -> None:
    text = open_row(["a", "\n", "b", "c"], stop=["\n"], min_tokens=4)
    index, pieces = append_steps(text, 0, steps)
    assert index == 4
    assert "".join(pieces) + text.take_one(0, True) == "a\nbc"


def test_d6_one_that_only_began_before_min_tokens_counts(open_row: OPEN) -> None:
    text = open_row(["a"], stop=["aa"], min_tokens=2)
    assert text.append_one(0, [0, 0, 0]) == 2
    assert text.take_one(0, True) == "a"


@pytest.mark.parametrize("steps", [[[0], [1]], [[0, 1]]])
@pytest.mark.parametrize(("includes", "expected"), [(False, "five"), (True, "five END")])
def test_d9_what_a_stop_id_says_is_no_text(
    open_row: OPEN, steps: list[list[int]], includes: bool, expected: str
) -> None:
    text = open_row(["five", " END"], include_stop_str_in_output=includes)
    pieces = []
    for ids in steps:
        assert text.append_one(0, ids, is_stop_id=ids[-1] == 1) == -1
        pieces.append(text.take_one(0, ids[-1] == 1))
    assert "".join(pieces) == expected


def test_d9_no_stop_string_ends_with_a_stop_id(open_row: OPEN) -> None:
    """Rule 3: the id comes first. Its text is there where it is asked for, and is not cut."""
    text = open_row(["five", " END!"], stop=["END"], include_stop_str_in_output=True)
    assert text.append_one(0, [0, 1], is_stop_id=True) == -1
    assert text.stop_string(0) is None
    assert text.take_one(0, True) == "five END!"


def test_d9_an_end_of_sequence_is_skipped_as_a_special_token(open_row: OPEN) -> None:
    for skips, expected in ((True, "five"), (False, "five<eos>")):
        text = open_row(["five"], ["<eos>"], include_stop_str_in_output=True, skip_special_tokens=skips)
        assert text.append_one(0, [0, 1], is_stop_id=True) == -1
        assert text.take_one(0, True) == expected


def test_d11_ids_outside_of_the_tokenizer_say_nothing(open_row: OPEN) -> None:
    """The ledger refuses those outside of the vocabulary; an engine's vocabulary may be padded."""
    text = open_row(["a", "b"], stop=["ab"])
    text.open(1, PROMPT)
    assert text.append_one(0, [0, -5, 2**31 - 1, 77, 1]) == 4
    assert text.append_one(1, [1]) == -1
    assert (text.take_one(0, True), text.take_one(1)) == ("", "b")


@pytest.mark.parametrize("uses_table", [True, False])
def test_d11_an_invalid_prefix_resets_only_that_stream(tmp_path: Path, uses_table: bool) -> None:
    """Bytes that change the text before them: a run of byte tokens is text as a whole, or broken as a whole."""
    tokenizer = metaspace()
    tokenizer.save(str(tmp_path / "metaspace.json"))
    text = TextRows(tmp_path / "metaspace.json", 2, uses_table=uses_table)
    whole, broken = [byte_id(tokenizer, byte) for byte in "你".encode()], byte_id(tokenizer, 0xF0)
    later = tokenizer.encode("the cat").ids
    for row in (0, 1):
        text.open(row, tokenizer.encode("hello").ids)
    ids = [*whole, broken, *later]
    assert append_steps(text, 0, [[token_id] for token_id in ids])[0] == -1
    assert append_steps(text, 1, [[token_id] for token_id in [*whole, *later]])[0] == -1
    pieces = append_steps(text, 0, [later])[1]
    assert pieces == [" the cat"]
    assert text.take_one(1, True) == ""


@pytest.mark.parametrize("uses_table", [True, False])
def test_d11_the_text_around_an_invalid_prefix(tmp_path: Path, uses_table: bool) -> None:
    tokenizer = metaspace()
    tokenizer.save(str(tmp_path / "metaspace.json"))
    text = TextRows(tmp_path / "metaspace.json", 1, uses_table=uses_table)
    whole, broken = [byte_id(tokenizer, byte) for byte in "你".encode()], byte_id(tokenizer, 0xF0)
    text.open(0, tokenizer.encode("hello").ids)
    _, pieces = append_steps(text, 0, [whole, [broken], tokenizer.encode("the cat").ids, [broken, broken, broken]])
    expected = ["你", "", f"{REPLACEMENT} the cat", ""]
    if not uses_table:
        assert pieces == expected, "the library is asked again when it has text"
    assert "".join(pieces) + text.take_one(0, True) == "".join(expected) + REPLACEMENT * 3
