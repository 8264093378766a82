"""Group D of the cases from the field, stop handling and text, on every kind of book. What a row says to which ids is
tested in `tests/unit/test_stops.py`; here is what a user of a book sees of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncbook import Book, FinishReason, InvalidRequest, RequestParams, Row
from asyncbook.ipc import wire
from tests.conftest import TIMEOUT_S, MakeBook, columns, delivered, in_flight, step
from tests.unit.text_oracle import byte_level, of_pieces

STOP, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR

# Every piece of every case, so that all tests share their sidecars.
PIECES = [
    "DEF", "G", "HI", "J", " xDEFGHIJK", "he", "llo x", "y", "one, five", " six", "a", "ST", "OP", "\n", "b", "c",
    "five", " END", "aa", "\N{CAT FACE}",
]  # fmt: skip
OpenBook = Callable[..., Book]


@pytest.fixture(scope="session")
def pieces_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose ids say `PIECES`, in this order."""
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.json"
    of_pieces(PIECES, ["<eos>"]).save(str(path))
    return path


@pytest.fixture
def book(make_book: MakeBook, pieces_path: Path) -> Book:
    """A book that says pieces."""
    return make_book(tokenizer=str(pieces_path))


def ids(*pieces: str) -> list[int]:
    """The ids that say them."""
    return [PIECES.index(piece) for piece in pieces]


def admit(book: Book, request_id: str = "a", **params: Any) -> Row:
    """A request with a prompt of one piece."""
    return book.admit(request_id, ids("b"), RequestParams(**params))


def say(book: Book, row: Row, *steps: Sequence[str]) -> list[str]:
    """Steps, each of one or several pieces, and the text that came with each."""
    texts = []
    for pieces in steps:
        n = len(pieces)
        step(book, [row], np.array([ids(*pieces)], np.int32), scheduled=None if n == 1 else [n], d=[n - 1])
        texts.append("".join(text for outputs in book.poll_outputs() for text in outputs.texts or []))
    return texts


def end_of(book: Book) -> tuple[FinishReason, Any, str]:
    """Why the only request that ended did, and its last text."""
    (end,) = [delta for outputs in book.poll_outputs() for delta in outputs if delta.finish_reason]
    assert end.text is not None
    return end.finish_reason, end.stop_reason, end.text


def one_by_one(book: Book, row: Row, *pieces: str) -> tuple[str, FinishReason, Any, list[int]]:
    """A step for each piece: the whole text, why it ended, and the ids that came."""
    texts, token_ids, end = [], [], (FinishReason.NONE, None)
    for piece in pieces:
        step(book, [row], np.array(ids(piece), np.int32))
        for outputs in book.poll_outputs():
            for delta in outputs:
                texts.append(delta.text or "")
                token_ids += delta.token_ids.tolist()
                end = (delta.finish_reason, delta.stop_reason)
    return "".join(texts), end[0], end[1], token_ids


def test_d1_a_stop_string_over_several_tokens(book: Book) -> None:
    row = admit(book, stop=["DEFGHIJ"])
    assert say(book, row, ["DEF"], ["G"], ["HI"]) == ["", "", ""]
    assert one_by_one(book, row, "J") == ("", STOP, "DEFGHIJ", ids("J"))
    assert columns(book, row)["num_output_tokens"] == 4
    assert columns(book, row)["stop_reason"] == -1
    other = admit(book, "b", stop=["DEFGHIJ"])
    assert one_by_one(book, other, " xDEFGHIJK") == (" x", STOP, "DEFGHIJ", ids(" xDEFGHIJK"))


def test_d2_what_is_held_comes_when_the_request_ends_otherwise(book: Book) -> None:
    row = admit(book, stop=["xyz"], max_tokens=3)
    assert say(book, row, ["he"], ["llo x"]) == ["he", "llo "]
    assert one_by_one(book, row, "y") == ("xy", LENGTH, None, ids("y"))
    other = admit(book, "b", stop=["five"])
    assert one_by_one(book, other, "one, five", " six") == ("one, ", STOP, "five", ids("one, five"))


def test_d2_an_abort_delivers_what_is_held(book: Book) -> None:
    row = admit(book, stop=["xyz"])
    assert say(book, row, ["llo x"]) == ["llo "]
    book.abort(row)
    step(book, [], [])
    assert end_of(book) == (ABORT, None, "x")


def test_d4_a_stop_string_before_the_end_of_sequence_in_one_step(book: Book) -> None:
    row = admit(book, stop=["STOP"], eos_token_id=len(PIECES))
    step(book, [row], np.array([[*ids("a", "ST", "OP"), len(PIECES)]], np.int32), d=[3], scheduled=[4])
    assert end_of(book) == (STOP, "STOP", "a")
    assert columns(book, row)["num_output_tokens"] == 3


@pytest.mark.parametrize("width", [1, 5])
def test_d6_a_stop_string_before_min_tokens_does_not_count(book: Book, width: int) -> None:
    row = admit(book, stop=["\n"], min_tokens=4)
    pieces = ["a", "\n", "b", "c", "\n"]
    steps = [pieces] if width == 5 else [[piece] for piece in pieces]
    got, end = "", None
    for sampled in steps:
        n = len(sampled)
        step(book, [row], np.array([ids(*sampled)], np.int32), d=[n - 1], scheduled=[n])
        for outputs in book.poll_outputs():
            for delta in outputs:
                got, end = got + str(delta.text), (delta.finish_reason, delta.stop_reason)
    assert (got, end) == ("a\nbc", (STOP, "\n"))


@pytest.mark.parametrize("steps", [[["five"], [" END"]], [["five", " END", "a"]]])
def test_d9_the_text_of_a_stop_id_is_not_delivered(book: Book, steps: list[list[str]]) -> None:
    row = admit(book, stop_token_ids=ids(" END"))
    texts, token_ids = "", []
    for sampled in steps:
        n = len(sampled)
        step(book, [row], np.array([ids(*sampled)], np.int32), d=[n - 1], scheduled=[n])
        for outputs in book.poll_outputs():
            for delta in outputs:
                texts, token_ids, end = texts + str(delta.text), token_ids + delta.token_ids.tolist(), delta
    assert (texts, token_ids) == ("five", ids("five", " END"))
    assert (end.finish_reason, end.stop_reason) == (STOP, PIECES.index(" END"))


def test_d9_its_text_is_delivered_where_it_is_asked_for(book: Book) -> None:
    row = admit(book, stop_token_ids=ids(" END"), include_stop_str_in_output=True)
    assert one_by_one(book, row, "five", " END")[0] == "five END"
    other = admit(book, "b", stop=["five"], include_stop_str_in_output=True)
    assert one_by_one(book, other, "one, five") == ("one, five", STOP, "five", ids("one, five"))


@pytest.mark.parametrize("bad", [-5, 100, 2**31])
def test_d11_a_bad_id_ends_its_own_request_and_its_text_is_delivered(book: Book, bad: int) -> None:
    row, other = admit(book, stop=["xyz"]), admit(book, "b")
    batch = book.batch([row, other])
    step(book, batch, np.array(ids("llo x", "a"), np.int64))
    book.poll_outputs()
    step(book, batch, np.array([bad, *ids("c")], np.int64))
    deltas = {delta.request_id: delta for outputs in book.poll_outputs() for delta in outputs}
    assert (deltas["a"].finish_reason, deltas["a"].text) == (ERROR, "x")
    assert deltas["b"].text == "c"


# Relatives


def test_a_stop_string_ends_the_row_in_the_frame_of_its_step(book: Book) -> None:
    row = admit(book, stop=["aa"])
    batch = book.batch([row])
    with in_flight(book):
        numbers = [book.submit(batch, np.array(ids(piece), np.int32)) for piece in ("aa", "b")]
    book.wait_applied(numbers[1], TIMEOUT_S)
    with book.frame(numbers[0]) as frame:
        assert frame.finish_reason[row.index] == STOP
        assert frame.num_output_tokens[row.index] == 1
    assert book.frame(numbers[1]).num_output_tokens[row.index] == 1, "what was in flight is dropped"


def test_a_stop_id_comes_before_a_stop_string_and_both_before_the_length(book: Book) -> None:
    row = admit(book, stop=["aa"], stop_token_ids=ids("aa"), max_tokens=1)
    assert one_by_one(book, row, "aa")[1:3] == (STOP, PIECES.index("aa"))
    other = admit(book, "b", stop=["aa"], max_tokens=1)
    assert one_by_one(book, other, "aa")[1:3] == (STOP, "aa")


def test_a_partial_prefill_says_nothing(book: Book) -> None:
    row = book.admit("a", ids("b", "b", "b"), RequestParams(stop=["a"]))
    step(book, [row], np.array(ids("a"), np.int32), scheduled=[2])
    assert delivered(book) == {}
    assert one_by_one(book, row, "c")[:2] == ("c", FinishReason.NONE)


def test_a_request_that_comes_back_goes_on_with_its_text(book: Book) -> None:
    row = admit(book, stop=["STOP"])
    assert say(book, row, ["a"], ["ST"]) == ["a", ""]
    book.release(row)
    step(book, [], [])
    assert end_of(book) == (ABORT, None, "ST")
    again = book.admit("a", ids("b"), RequestParams(stop=["STOP"]), output_token_ids=ids("a", "ST"))
    assert one_by_one(book, again, "OP")[:3] == ("", STOP, "STOP")


def test_a_preempted_request_goes_on_with_its_text(book: Book) -> None:
    row = admit(book, stop=["STOP"])
    assert say(book, row, ["a"], ["ST"]) == ["a", ""]
    book.preempt(row)
    row = book.resume(row)
    assert one_by_one(book, row, "OP")[:3] == ("", STOP, "STOP")


def test_outputs_of_several_requests_are_one_buffer_with_offsets(book: Book) -> None:
    rows = [admit(book, name) for name in ("x", "y", "z")]
    step(book, rows, np.array(ids("he", "a", "\N{CAT FACE}"), np.int32))
    (outputs,) = book.poll_outputs()
    assert outputs.texts is not None
    by_id = dict(zip(outputs.request_ids, outputs.texts, strict=True))
    assert by_id == {"x": "he", "y": "a", "z": "\N{CAT FACE}"}
    assert bytes(outputs.texts.data).decode() == "".join(outputs.texts)
    assert outputs.texts.offsets.tolist()[-1] == 7


def test_a_slow_reader_gets_all_of_the_text(book: Book) -> None:
    row = admit(book, stop=["DEFGHIJ"])
    for piece in ("a", "DEF", "G", "he", "DEF"):
        step(book, [row], np.array(ids(piece), np.int32))
    book.release(row)
    step(book, [], [])
    text = "".join(text for outputs in book.poll_outputs() for text in outputs.texts or [])
    assert text == "aDEFGheDEF"


@pytest.mark.parametrize("kind", ["sidecar", "ring"])
def test_a_sidecar_that_took_over_goes_on_with_the_text(make_book: MakeBook, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer = byte_level()
    tokenizer.save(str(path))
    prompt, outputs = tokenizer.encode("the cat").ids, tokenizer.encode(" sat 😀 on 你好世界 the mat. STOP here").ids
    stops = ("STOP", "mat!")
    book = make_book(fresh=True, tokenizer=str(path), vocab_size=1000, max_model_len=100)
    row = book.admit("a", prompt, RequestParams(stop=stops))
    batch, got = book.batch([row]), ""
    for place, token_id in enumerate(outputs):
        if place in (len(outputs) // 3, 2 * len(outputs) // 3):
            assert book.sidecar_pid is not None
            os.kill(book.sidecar_pid, signal.SIGKILL)
        step(book, batch, np.array([token_id], np.int32))
        got += "".join(text for new in book.poll_outputs() for text in new.texts or [])
    assert got == " sat 😀 on 你好世界 the mat. "
    assert book.frame().finish_reason[row.index] == STOP


# Contract


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3], "\ud800"])
def test_stop_strings_that_cannot_be_are_refused(book: Book, stop: Any) -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        admit(book, stop=[stop] if isinstance(stop, str) else stop)


@pytest.mark.parametrize("stop", [["x" * (wire.MAX_STOP_BYTES + 1)], ["xy"] * (wire.MAX_STOP_BYTES // 2 + 1)])
def test_stop_strings_have_a_bound(book: Book, stop: list[str]) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {wire.MAX_STOP_BYTES}"):
        admit(book, stop=stop)


def test_stop_strings_need_a_tokenizer(make_book: MakeBook) -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        make_book().admit("a", [1], RequestParams(stop=["a"]))


def test_a_book_without_a_tokenizer_has_no_texts(make_book: MakeBook) -> None:
    book = make_book()
    row = book.admit("a", [1])
    step(book, [row], [5])
    (outputs,) = book.poll_outputs()
    assert outputs.texts is None
    assert outputs.stop_reasons.dtype == np.int32


@pytest.mark.parametrize("kind", ["embedded", "sidecar"])
def test_a_tokenizer_that_is_not_there_is_named(make_book: MakeBook, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        make_book(fresh=True, tokenizer=str(tmp_path / "nowhere.json"))
