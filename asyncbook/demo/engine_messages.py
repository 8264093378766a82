"""What a server and its engine's process say to each other: msgpack, a message a packet of a socket pair, never pickle.

Outputs are not among it: the server subscribes to the engine's book.
"""

from __future__ import annotations

import socket

import msgspec

from asyncbook import RequestParams

MAX_BYTES = 1 << 17  # of a message; a packet of this size fits a socket's buffer as Linux has it
MAX_MODEL_LEN = 8192  # so that a prompt fits, with its stop strings


class Complete(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A request for the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: RequestParams


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Nobody wants the rest of this request's answer. One that has ended, or never was, is no mistake."""

    request_id: str


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The engine has loaded: where its book is, and the model's end-of-sequence id."""

    address: str
    eos_token_id: int


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The engine cannot start, and ends."""

    reason: str


AnyRequest = Complete | Abort
AnyReply = Ready | Failed
encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(AnyRequest)
_replies = msgspec.msgpack.Decoder(AnyReply)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """One keeps messages apart, and tells each side of the other's end. No other process can reach it."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def receive_request(end: socket.socket) -> AnyRequest | None:
    """The next one, None where the server is gone. As the socket is: waits, or raises `BlockingIOError`."""
    data = _receive(end)
    return _requests.decode(data) if data else None


def receive_reply(end: socket.socket) -> AnyReply | None:
    """The next one, None where the engine is gone."""
    data = _receive(end)
    return _replies.decode(data) if data else None


def _receive(end: socket.socket) -> bytes:
    try:
        return end.recv(MAX_BYTES)
    except ConnectionError:  # it left without reading everything
        return b""
