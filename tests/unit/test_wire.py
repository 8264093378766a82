"""Messages: each comes out as it went in, and nothing else comes out at all."""

from __future__ import annotations

import contextlib
import pickle
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbook.ipc import layout, wire
from asyncbook.ipc.columns import OutputColumns
from asyncbook.ipc.errors import AsyncbookError, BadMessage
from tests.conftest import MakeBook, step, tokens

INT64 = st.integers(-(2**63), 2**63 - 1)
VIEWS: st.SearchStrategy[Any] = st.binary().map(lambda data: memoryview(data))
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: INT64,
    bool: st.booleans(),
    str: st.text(),
    bytes: st.binary(),
    memoryview: VIEWS,
    int | None: st.none() | INT64,
    str | None: st.none() | st.text(),
    memoryview | None: st.none() | VIEWS,
    list[int]: st.lists(INT64, max_size=5),
    list[str]: st.lists(st.text(max_size=5), max_size=5),
    list[wire.RestoredRow]: st.lists(
        st.builds(
            wire.RestoredRow,
            INT64,
            st.text(max_size=5),
            st.lists(INT64, max_size=5),
            st.lists(st.text(max_size=5), max_size=3),
            st.booleans(),
            st.booleans(),
        ),
        max_size=3,
    ),
    list[wire.RestoredBatch]: st.lists(st.builds(wire.RestoredBatch, INT64, VIEWS), max_size=3),
}
COMMANDS, EVENTS = typing.get_args(wire.AnyCommand), typing.get_args(wire.AnyEvent)
DECODERS: dict[str, tuple[Callable[[bytes], Any], tuple[Any, ...]]] = {
    "command": (wire.decode_command, COMMANDS),
    "event": (wire.decode_event, EVENTS),
    "setup": (wire.decode_setup, (wire.Setup,)),
}
MESSAGES = [pytest.param(decode, struct, id=struct.__name__) for decode, structs in DECODERS.values()
            for struct in structs]  # fmt: skip


def instances(struct: Any) -> st.SearchStrategy[Any]:
    """Any message of this kind."""
    fields = typing.get_type_hints(struct)
    return st.builds(struct, **{name: BY_TYPE[field] for name, field in fields.items()})


def plain(value: Any) -> Any:
    """A message's values, memory as bytes."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return (type(value), *(plain(getattr(value, name)) for name in value.__struct_fields__))
    return value


@pytest.mark.parametrize(("decode", "struct"), MESSAGES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_message_comes_out_as_it_went_in(decode: Callable[[bytes], Any], struct: Any, data: st.DataObject) -> None:
    message = data.draw(instances(struct))
    encoded = wire.encode(message)
    for received in (decode(encoded), decode(memoryview(encoded))):  # type: ignore[arg-type]
        assert plain(received) == plain(message)


@pytest.mark.parametrize(("decode", "struct"), MESSAGES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_message_that_is_cut_or_goes_on_is_bad(
    decode: Callable[[bytes], Any], struct: Any, data: st.DataObject
) -> None:
    encoded = wire.encode(data.draw(instances(struct)))
    for end in {0, 1, len(encoded) // 2, len(encoded) - 1}:
        with pytest.raises(BadMessage):
            decode(encoded[:end])
    for more in (b"\x00", encoded):
        with pytest.raises(BadMessage):
            decode(encoded + more)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(sorted(DECODERS)))
def test_any_bytes_are_a_message_or_a_bad_one(data: bytes, kind: str) -> None:
    decode, structs = DECODERS[kind]
    with contextlib.suppress(BadMessage):
        assert isinstance(decode(data), structs)


def test_a_bad_message_says_what_is_bad() -> None:
    assert issubclass(BadMessage, AsyncbookError)
    with pytest.raises(BadMessage, match="a command of 3 bytes does not decode"):
        wire.decode_command(b"\x91\x01\x02")


@pytest.mark.parametrize(("decode", "struct"), MESSAGES)
def test_a_field_of_another_type_is_bad(decode: Callable[[bytes], Any], struct: Any) -> None:
    info = typing.cast(msgspec.inspect.StructType, msgspec.inspect.type_info(struct))
    good: list[Any] = [] if info.tag is None else [info.tag]
    for field in typing.get_type_hints(struct).values():
        good.append(
            {int: 1, bool: True, str: "", str | None: "", list[int]: [1]}.get(
                field, [] if typing.get_origin(field) is list else b""
            )
        )
        if field == int | None:
            good[-1] = None
    assert isinstance(decode(msgspec.msgpack.encode(good)), struct)
    for place in range(len(good)):
        for wrong in (1.5, {"a": 1}, [b""], "text" if not isinstance(good[place], str) else 5):
            with pytest.raises(BadMessage):
                decode(msgspec.msgpack.encode([*good[:place], wrong, *good[place + 1 :]]))
    # Fields at the end that have a default may be left out; all others are needed.
    num_optional = sum(not field.required for field in info.fields)
    with pytest.raises(BadMessage):
        decode(msgspec.msgpack.encode(good[: len(good) - num_optional - 1]))


@pytest.mark.parametrize("kind", ["command", "event"])
@pytest.mark.parametrize("tag", [0, 11, 255, -1, None, "Admit", 1.0])
def test_another_tag_is_bad(kind: str, tag: Any) -> None:
    with pytest.raises(BadMessage):
        DECODERS[kind][0](msgspec.msgpack.encode([tag, 1, 2, 3]))


def test_messages_of_one_direction_are_none_of_the_other() -> None:
    refused = wire.encode(wire.Refused(b"token", "LayoutMismatch", "reason"))
    release = wire.encode(wire.Release(1, 2, 3))
    for decode, message in ((wire.decode_command, refused), (wire.decode_event, release), (wire.decode_setup, release)):
        with pytest.raises(BadMessage):
            decode(message)


def test_tags_are_a_byte_and_never_given_twice() -> None:
    for structs in (COMMANDS, EVENTS):
        tags = [typing.cast(msgspec.inspect.StructType, msgspec.inspect.type_info(struct)).tag for struct in structs]
        assert sorted(typing.cast(list[int], tags)) == list(range(1, len(structs) + 1))


class Trap:
    """What unpickles into a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_runs_no_code(tmp_path: Path, protocol: int) -> None:
    trap = tmp_path / "sprung"
    pickled = pickle.dumps(Trap(trap), protocol)
    for decode, _ in DECODERS.values():
        with pytest.raises(BadMessage):
            decode(pickled)
    command = wire.encode(
        wire.Admit(1, 0, 1, 1, "a", memoryview(pickled), memoryview(pickled), None, 0, 1, 0, [], [], False)
    )
    wire.decode_command(command)
    assert not trap.exists()
    pickle.loads(pickled)
    assert trap.exists()  # it would have


def test_arrays_travel_as_their_bytes() -> None:
    for array in (np.arange(6, dtype=np.int32), np.arange(6).reshape(2, 3), np.array([True, False]), np.zeros((0, 3))):
        data = wire.as_bytes(array)
        assert data.readonly
        assert bytes(data) == array.tobytes()
        if array.size:
            assert np.shares_memory(np.frombuffer(data, np.uint8), array)
    decoded = wire.decode_command(wire.encode(wire.DescribeBatch(1, 0, wire.as_bytes(np.arange(8, dtype=np.int32)))))
    assert isinstance(decoded, wire.DescribeBatch)
    assert np.frombuffer(decoded.fields, np.int32).tolist() == list(range(8))


# The schema


def fresh_hash() -> str:
    """As a new process would reckon it."""
    wire._messages.cache_clear()
    try:
        return wire.schema_hash()
    finally:
        wire._messages.cache_clear()


def test_the_schema_hash_is_the_same_every_time() -> None:
    assert wire.schema_hash() == wire.schema_hash()
    assert len(bytes.fromhex(wire.schema_hash())) == 8


def replaced(name: str, **options: Any) -> Any:
    """The message `name`, a bit different."""
    struct = getattr(wire, name)
    fields = list(typing.get_type_hints(struct).items())
    tag = typing.cast(msgspec.inspect.StructType, msgspec.inspect.type_info(struct)).tag
    settings_ = {"array_like": True, "tag": tag} | {key: value for key, value in options.items() if key != "fields"}
    return msgspec.defstruct(name, options.get("fields", lambda fields: fields)(fields), **settings_)


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("nothing", {}),
        ("a field more", {"fields": lambda fields: [*fields, ("more", int)]}),
        ("a field less", {"fields": lambda fields: fields[:-1]}),
        ("another order", {"fields": lambda fields: fields[::-1]}),
        ("another name", {"fields": lambda fields: [*fields[:-1], ("renamed", fields[-1][1])]}),
        ("another type", {"fields": lambda fields: [*fields[:-1], (fields[-1][0], float)]}),
        ("another tag", {"tag": 99}),
        ("an object", {"array_like": False}),
    ],
)
@pytest.mark.parametrize("name", ["Ready", "Release"])
def test_the_schema_hash_changes_with_a_message(
    monkeypatch: pytest.MonkeyPatch, name: str, what: str, options: dict[str, Any]
) -> None:
    before = fresh_hash()
    union = "AnyEvent" if name == "Ready" else "AnyCommand"
    others = [struct for struct in typing.get_args(getattr(wire, union)) if struct.__name__ != name]
    place = [struct.__name__ for struct in typing.get_args(getattr(wire, union))].index(name)
    others.insert(place, replaced(name, **options))
    monkeypatch.setattr(wire, union, typing.Union[tuple(others)])  # noqa: UP007  made of a list
    assert (fresh_hash() == before) == (what == "nothing")


def test_the_schema_hash_changes_with_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    before = wire.schema_hash()
    monkeypatch.setattr(layout, "LINE_BYTES", 2 * layout.LINE_BYTES)
    assert wire.schema_hash() != before


# Outputs in one block


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 4), INT64.map(lambda number: number % 2**31),
                          st.lists(st.integers(0, 2**31 - 1), max_size=5)), max_size=6))  # fmt: skip
def test_output_columns_come_out_as_they_went_in(requests: list[tuple[int, int, int, list[int]]]) -> None:
    request_nos, finish_reasons, stop_reasons = (
        np.array([request[place] for request in requests], np.int32) for place in range(3)
    )
    num_new = np.array([len(request[3]) for request in requests], np.int32)
    token_ids = np.array([token_id for request in requests for token_id in request[3]], np.int32)
    columns = OutputColumns.of(request_nos, finish_reasons, stop_reasons, num_new, token_ids)
    received = OutputColumns(columns.n, np.frombuffer(wire.as_bytes(columns.block), np.int32))
    assert received.n == len(requests)
    for number, (request_no, finish_reason, stop_reason, ids) in enumerate(requests):
        assert received.request_nos[number] == request_no
        assert received.finish_reasons[number] == finish_reason
        assert received.stop_reasons[number] == stop_reason
        assert received.token_ids[received.offsets[number] : received.offsets[number + 1]].tolist() == ids


# On a live socket


def bad_messages(tmp_path: Path) -> dict[str, bytes]:
    """What no runner sends. A message with a good number would be the next one, if it made sense."""
    return {
        "noise": b"\xc1\xff\x00noise",
        "pickle": pickle.dumps(Trap(tmp_path / "sprung")),
        "a cut message": wire.encode(wire.Release(1, 0, 1))[:-1],
        "an event": wire.encode(wire.Fault("reason")),
    }


@pytest.mark.parametrize("kind", ["sidecar", "ring"])
@pytest.mark.parametrize("what", ["noise", "pickle", "a cut message", "an event"])
def test_a_sidecar_counts_and_skips_what_does_not_decode(make_book: MakeBook, tmp_path: Path, what: str) -> None:
    book: Any = make_book()
    row = book.admit("a", [1])
    step(book, [row], [5])
    before = book.stats().bad_messages
    for _ in range(2):
        assert book._channel.send_command(bad_messages(tmp_path)[what])
    step(book, [row], [6])
    assert book.stats().bad_messages == before + 2
    assert tokens(book, row) == [1, 5, 6]
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("kind", ["sidecar"])
@pytest.mark.parametrize(
    "message",
    [
        lambda seq: wire.Release(seq, 99, 1),
        lambda seq: wire.Abort(seq, -1, 1),
        lambda seq: wire.DescribeBatch(seq, 99, memoryview(b"")),
        lambda seq: wire.DescribeBatch(seq, 0, memoryview(b"12345")),
        lambda seq: wire.Step(seq, 1 << 40, 0, 1, memoryview(b""), 0, memoryview(b"")),
        lambda seq: wire.Admit(seq, 99, 1, 1, "a", memoryview(b"1234"), memoryview(b""), None, 0, 1, 0, [], [], False),
    ],
    ids=["no such row", "a negative row", "no such slot", "half a batch", "no such step", "a row beyond the book"],
)
def test_a_sidecar_survives_what_makes_no_sense(make_book: MakeBook, message: Callable[[int], Any]) -> None:
    book: Any = make_book()
    row = book.admit("a", [1])
    step(book, [row], [5])
    before = book.stats().bad_messages
    assert book._channel.send_command(wire.encode(message(book._seq + 1)))
    step(book, [row], [6])
    assert book.stats().bad_messages == before + 1
    assert tokens(book, row) == [1, 5, 6]
