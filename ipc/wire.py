"""The messages: msgspec structs, msgpack, tagged, array-like; one union a direction, one decoder each.

Runner to sidecar is one ordered stream. Every message of it carries `seq`, one higher than the one before; the sidecar
applies each once. Arrays travel as raw little-endian bytes and are read without a copy. Nothing here is ever pickled.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
import typing
from typing import Any

import msgspec
import numpy as np

from asyncbook.ipc.errors import BadMessage
from asyncbook.ipc.layout import Layout, layout_hash

MAX_EVENT_BYTES = 1 << 16
MAX_SUBSCRIBER_MESSAGE_BYTES = 256
MAX_STOP_IDS = 1 << 16  # of a request
MAX_STOP_BYTES = 1 << 14  # of all stop strings of a request, as UTF-8
MAX_REQUEST_ID_BYTES = 1 << 16
NUM_BATCH_SLOTS = 32  # batches the book remembers; the runner describes an older one again

NO_BYTES = memoryview(b"")


class Command(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """Runner to sidecar. `seq` counts from 1."""

    seq: int


class Admit(Command, tag=1):
    """Gives a free row to a request. `*_token_ids`: int32 bytes; `is_token_ids`: bool bytes, None for all true."""

    row: int
    generation: int
    request_no: int
    request_id: str
    prompt_token_ids: memoryview
    output_token_ids: memoryview
    is_token_ids: memoryview | None
    num_computed_tokens: int
    max_tokens: int
    min_tokens: int
    eos_token_ids: list[int]
    stop_token_ids: list[int]
    ignore_eos: bool
    stop: list[str] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs_width: int = 0  # the sampled id's and the top k; 0: none

    @property
    def stop_ids(self) -> list[int]:
        """Every id that ends the request."""
        return self.stop_token_ids + ([] if self.ignore_eos else self.eos_token_ids)


class DescribeBatch(Command, tag=2):
    """What a batch slot holds from now on: int32 [5, n] bytes in the order of `BatchField`."""

    slot: int
    fields: memoryview


class Step(Command, tag=3):
    """What one step sampled for the batch in `slot`: int32, `width` ids a row, `draft_width` drafts (0: none given).
    `logprobs`: int32 entries as in `ipc/logprobs.py`, `width` of them for each row of the batch that wants logprobs, of
    at most `logprobs_width` (0: none given)."""

    step: int
    slot: int
    width: int
    sampled_token_ids: memoryview
    draft_width: int
    draft_token_ids: memoryview
    logprobs_width: int = 0
    logprobs: memoryview = NO_BYTES


class Abort(Command, tag=4):
    row: int
    generation: int


class Preempt(Command, tag=5):
    row: int
    generation: int
    drop_in_flight: bool


class Resume(Command, tag=6):
    row: int
    generation: int
    num_computed_tokens: int


class Rewind(Command, tag=7):
    row: int
    generation: int
    num_computed_tokens: int


class Release(Command, tag=8):
    row: int
    generation: int


class Barrier(Command, tag=9):
    """Changes nothing; `APPLIED_SEQ` reaching its `seq` says that all before it is applied."""


class Stop(Command, tag=10):
    """The last message: apply what came before, flush, end."""


class RestoredRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a request in a row was admitted with and the segment does not hold."""

    row: int
    request_id: str
    stop_ids: list[int]  # of the user, and end-of-sequence ids that count
    stop: list[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool


class RestoredBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a batch slot held; see `DescribeBatch`."""

    slot: int
    fields: memoryview


class Restore(Command, tag=11):
    """The first message to a sidecar that took over: what it needs to go on from its checkpoint, which is of `seq`. It
    has no place in the order itself."""

    rows: list[RestoredRow]
    batches: list[RestoredBatch]


class BatchField:
    """Rows of a batch's int32 [5, n]. `GENERATION` is uint32 in the same bytes."""

    ROW = 0
    GENERATION = 1
    NUM_SCHEDULED_TOKENS = 2  # DEFAULT_SCHEDULED: all tokens of the row not computed yet, and its drafts
    NUM_DRAFT_TOKENS = 3
    LOGPROBS_WIDTH = 4  # that the row's request wants, as in its `Admit`
    COUNT = 5


DEFAULT_SCHEDULED = -1


class Setup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """First thing in the sidecar's lifetime pipe: what it needs and does not find in the segment."""

    token: bytes
    vocab_size: int
    tokenizer: str | None  # path of a tokenizer.json
    spin_us: int
    idle_policy: str
    sidecar_cpu: int | None
    max_command_bytes: int
    is_restart: bool  # another sidecar had the segment before: wait for `Restore`
    runner_reads_outputs: bool
    subscribers: str  # folder for the socket of subscribers, empty where there is none
    subscribers_token: bytes
    schema_hash: str


# The set-up goes through a pipe: its length, then its bytes.
SETUP_LENGTH = struct.Struct("<I")


class Event(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Sidecar to runner."""


class Compiling(Event, tag=1):
    """Kernels are being compiled; the runner waits longer and tells its user."""

    cache_path: str


class Ready(Event, tag=2):
    """The sidecar is up and proves with `token` that it is the process that was started."""

    token: bytes
    pid: int
    layout_version: int
    schema_hash: str


class Refused(Event, tag=3):
    """The sidecar will not work with this runner. `kind`: name of the error to raise."""

    token: bytes
    kind: str
    reason: str


class Wake(Event, tag=4):
    """The step that the runner sleeps for is published."""

    step: int


class Fault(Event, tag=5):
    """The sidecar ends because of an error of its own."""

    reason: str


class Named(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What a subscriber must know of a request: deliveries have its number, and a stop string's place in the list."""

    request_no: int
    request_id: str
    stop: list[str]


class SubscriberMessage(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Subscriber to sidecar."""


class Subscribe(SubscriberMessage, tag=1):
    """Proves with `token` that it could read the book's address. `epoch`: 0 at first, later the one it reads in."""

    token: bytes
    pid: int
    start_time: int
    epoch: int


class WakeAt(SubscriberMessage, tag=2):
    """Asks for a `Woken` once the broadcast log is written beyond this position."""

    position: int


class Unsubscribe(SubscriberMessage, tag=3):
    """The last one."""


class SubscriberReply(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Sidecar to subscriber."""


class Subscribed(SubscriberReply, tag=1):
    """Where to read from, and whom what is there is of."""

    position: int
    epoch: int
    requests: list[Named]


class Woken(SubscriberReply, tag=2):
    """There is something to read, or the sidecar ends."""


class Unknown(SubscriberReply, tag=3):
    """This sidecar, a new one perhaps, does not know who that is: subscribe first."""


class NotSubscribed(SubscriberReply, tag=4):
    """Why not."""

    reason: str


AnySubscriberMessage = Subscribe | WakeAt | Unsubscribe
AnySubscriberReply = Subscribed | Woken | Unknown | NotSubscribed
AnyCommand = Admit | DescribeBatch | Step | Abort | Preempt | Resume | Rewind | Release | Barrier | Stop | Restore
AnyEvent = Compiling | Ready | Refused | Wake | Fault


def max_command_bytes(layout: Layout) -> int:
    """No command of a right runner is longer. Numbers take 9 bytes at most, and 5 stand in front of an array."""
    n = layout.max_num_reqs
    stops = 9 * MAX_STOP_IDS + 6 * MAX_STOP_BYTES  # 5 at most stand in front of a string, which has a byte or more
    admission = MAX_REQUEST_ID_BYTES + 5 * layout.max_model_len + stops
    batch = 4 * BatchField.COUNT * n
    step = 4 * n * (1 + 2 * layout.num_spec_tokens + (1 + layout.num_spec_tokens) * layout.entry_size)
    # As many stop ids as all rows may have are more than any message should bring: a book of a few rows with many.
    restore = NUM_BATCH_SLOTS * (batch + 64) + min(n * (stops + MAX_REQUEST_ID_BYTES), 1 << 30) + 64 * n
    return max(admission, batch, step, restore) + 4096


def schema_hash() -> str:
    """16 hex digits that change when any message's fields, types, order or tag change, or the layout of the segment."""
    return hashlib.blake2b("\n".join((layout_hash(), *_messages())).encode(), digest_size=8).hexdigest()


@functools.cache
def _messages() -> tuple[str, ...]:
    """What every message is, in text."""
    text = []
    unions = (AnyCommand, AnyEvent, AnySubscriberMessage, AnySubscriberReply)
    for message in (*itertools.chain(*map(typing.get_args, unions)), Setup, Named):
        info = msgspec.inspect.type_info(message)
        assert isinstance(info, msgspec.inspect.StructType)
        fields = [(field.name, repr(field.type)) for field in info.fields]
        text.append(repr((message.__name__, info.tag, info.array_like, fields)))
    return tuple(text)


_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)
_event_decoder: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)
_message_decoder: msgspec.msgpack.Decoder[AnySubscriberMessage] = msgspec.msgpack.Decoder(AnySubscriberMessage)
_reply_decoder: msgspec.msgpack.Decoder[AnySubscriberReply] = msgspec.msgpack.Decoder(AnySubscriberReply)
_names_decoder: msgspec.msgpack.Decoder[list[Named]] = msgspec.msgpack.Decoder(list[Named])
_setup_decoder: msgspec.msgpack.Decoder[Setup] = msgspec.msgpack.Decoder(Setup)

encode = _encoder.encode


def _decode(decoder: Any, data: memoryview | bytes, what: str) -> Any:
    try:
        return decoder.decode(data)
    # ValidationError is a DecodeError. The last two: nested too deeply, or longer than there is memory.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise BadMessage(f"{what} of {len(data)} bytes does not decode: {error}") from error


def decode_command(data: memoryview | bytes) -> AnyCommand:
    """Raises `BadMessage` for anything that is not a whole, valid command."""
    return typing.cast(AnyCommand, _decode(_command_decoder, data, "a command"))


def decode_event(data: memoryview | bytes) -> AnyEvent:
    """Raises `BadMessage` for anything that is not a whole, valid event."""
    return typing.cast(AnyEvent, _decode(_event_decoder, data, "an event"))


def decode_subscriber_message(data: memoryview | bytes) -> AnySubscriberMessage:
    """Raises `BadMessage` for anything that is not a whole, valid message of a subscriber."""
    return typing.cast(AnySubscriberMessage, _decode(_message_decoder, data, "a subscriber's message"))


def decode_subscriber_reply(data: memoryview | bytes) -> AnySubscriberReply:
    """Raises `BadMessage` for anything that is not a whole, valid reply."""
    return typing.cast(AnySubscriberReply, _decode(_reply_decoder, data, "a reply to a subscriber"))


def decode_names(data: memoryview | bytes) -> list[Named]:
    """Raises `BadMessage` for anything that is not a list of `Named`."""
    return typing.cast("list[Named]", _decode(_names_decoder, data, "names"))


def decode_setup(data: memoryview | bytes) -> Setup:
    """Raises `BadMessage` for anything that is not a whole, valid `Setup`."""
    return typing.cast(Setup, _decode(_setup_decoder, data, "a setup"))


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array, read-only, without a copy."""
    return array.data.cast("B").toreadonly() if array.size else NO_BYTES
