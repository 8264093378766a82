"""The only zmq code: two PAIR sockets between a runner and its sidecar, and a ROUTER for subscribers.

    commands      runner -> sidecar         the ordered stream; never blocks the runner: a full queue is an answer
    events        sidecar -> runner         ready, wake-ups, faults; few
    subscribers   sidecar <-> subscribers   who listens, wake-ups; few

Outputs go through shared memory (`outputs_log.py`, `broadcast.py`), where they outlive the process that wrote them.

The runner binds both in a directory of its own that only its user can enter, with a name that cannot be guessed.
A PAIR socket takes one peer, so a second sidecar cannot listen in; who the peer is, the handshake's token says.
"""

from __future__ import annotations

import os
import select
import shutil
import threading
from pathlib import Path

import zmq

from asyncbook.ipc import wire
from asyncbook.ipc.errors import BookClosed, HandshakeFailed
from asyncbook.ipc.runtime_dir import SUBSCRIBERS_SOCKET, check_private, create_directory

SOCKET_NAMES = ("commands", "events")
# An option of libzmq that pyzmq has no name for: processes of other users are turned away when they connect.
_IPC_FILTER_UID = 59

MAX_QUEUED_COMMANDS = 8192
LIBZMQ_VERSION = zmq.zmq_version()
NUM_DESCRIPTORS = 32  # of a context with two sockets, each with a peer, and of the process at the other end

# option: (commands, events)
SOCKET_OPTIONS: dict[int, tuple[int, int]] = {
    zmq.LINGER: (0, 0),
    zmq.SNDHWM: (MAX_QUEUED_COMMANDS, 64),
    zmq.RCVHWM: (1024, 64),
    # Connect only once the peer is there: a message sent too early is an error, not a queue that fills unseen.
    zmq.IMMEDIATE: (1, 1),
}


SUBSCRIBERS_OPTIONS: dict[int, int] = {
    zmq.LINGER: 0,
    zmq.SNDHWM: 64,
    zmq.RCVHWM: 64,
    zmq.MAXMSGSIZE: wire.MAX_SUBSCRIBER_MESSAGE_BYTES,
    zmq.ROUTER_MANDATORY: 1,  # an error, not silence, for a subscriber that is gone
    _IPC_FILTER_UID: os.getuid(),
}


def _check_descriptors() -> None:
    """Raises `HandshakeFailed` where a channel would find no descriptors: libzmq ends the whole process then."""
    spare: list[int] = []
    try:
        while len(spare) < NUM_DESCRIPTORS:
            spare.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        raise HandshakeFailed(
            f"a sidecar needs up to {NUM_DESCRIPTORS} descriptors: {error.strerror}; raise the limit (ulimit -n)"
        ) from error
    finally:
        for descriptor in spare:
            os.close(descriptor)


def _open_sockets(context: zmq.Context, max_command_bytes: int) -> list[zmq.Socket]:  # type: ignore[type-arg]
    sockets = []
    max_bytes = (max_command_bytes, wire.MAX_EVENT_BYTES)
    for index in range(len(SOCKET_NAMES)):
        socket = context.socket(zmq.PAIR)
        for option, values in SOCKET_OPTIONS.items():
            socket.setsockopt(option, values[index])
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes[index])
        sockets.append(socket)
    return sockets


class _Channel:
    """Sockets of one side and their end."""

    def __init__(self, directory: Path, max_command_bytes: int) -> None:
        self.directory = directory
        self._context = zmq.Context(io_threads=1)
        # The thread that moves the bytes is woken in the middle of `submit`; as a batch thread it does not take the
        # core away from the thread that woke it.
        self._context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
        self._commands, self._events = self._sockets = _open_sockets(self._context, max_command_bytes)

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()

    @staticmethod
    def _receive(socket: zmq.Socket) -> bytes | None:  # type: ignore[type-arg]
        try:
            return socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    @staticmethod
    def _send(socket: zmq.Socket, data: bytes) -> bool:  # type: ignore[type-arg]
        try:
            socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class RunnerChannel(_Channel):
    """The runner's side. One for each sidecar: a new one starts with new sockets in a new directory.

    A book is used from one thread, but another may close it, or collect it. zmq's sockets must not be used from two
    threads at once: a lock keeps them apart, and `close` first ends a wait that holds it.
    """

    def __init__(self) -> None:
        _check_descriptors()
        super().__init__(create_directory(SOCKET_NAMES), wire.MAX_EVENT_BYTES)  # it receives no commands
        self._lock = threading.RLock()  # collected in the middle of a call, a book closes its channel in that thread
        self._close_event = os.eventfd(0, os.EFD_CLOEXEC)
        for name, socket in zip(SOCKET_NAMES, self._sockets, strict=True):
            socket.setsockopt(_IPC_FILTER_UID, os.getuid())
            socket.bind(f"ipc://{self.directory / name}")

    def _check_open(self) -> None:
        if self._close_event < 0:
            raise BookClosed("the book was closed in another thread")

    def send_command(self, data: bytes) -> bool:
        """False where the sidecar has not taken the messages before."""
        with self._lock:
            self._check_open()
            return self._send(self._commands, data)

    def ring_doorbell(self) -> None:
        """Wakes a sleeping sidecar: an empty message. One that does not fit needs no sending, others wake it."""
        self.send_command(b"")

    def wait_command_room(self, timeout_ms: int) -> bool:
        """Whether a command can be sent, after at most this long."""
        with self._lock:
            self._check_open()
            return bool(self._commands.poll(timeout_ms, zmq.POLLOUT))

    def receive_event(self) -> bytes | None:
        """The next event, None where there is none yet."""
        with self._lock:
            self._check_open()
            return self._receive(self._events)

    def wait_event(self, timeout_ms: int | None, *other_descriptors: int) -> None:
        """Until an event can be received, another descriptor is readable, or time is over (None: no limit)."""
        with self._lock:
            self._check_open()
            poller = zmq.Poller()
            poller.register(self._events, zmq.POLLIN)
            for descriptor in (self._close_event, *other_descriptors):
                poller.register(descriptor, zmq.POLLIN)
            poller.poll(timeout_ms)

    @property
    def events_descriptor(self) -> int:
        """Becomes readable when events may have come; edge-triggered: receive until None before waiting on it."""
        with self._lock:
            self._check_open()
            return int(self._events.getsockopt(zmq.FD))

    def end_waits(self) -> None:
        """Ends a wait in another thread, and every later one at once."""
        if self._close_event >= 0:
            os.eventfd_write(self._close_event, 1)

    def close(self) -> None:
        """Closes the sockets and removes the directory. Idempotent."""
        self.end_waits()
        with self._lock:
            if self._close_event < 0:
                return
            os.close(self._close_event)
            self._close_event = -1
            self._close()
        shutil.rmtree(self.directory, ignore_errors=True)


class SidecarChannel(_Channel):
    """The sidecar's side. `subscribers`: the folder for the socket of subscribers, None for no such socket. Raises
    `HandshakeFailed` where a directory is not this user's own."""

    def __init__(self, directory: Path, max_command_bytes: int, subscribers: Path | None = None) -> None:
        check_private(directory)
        super().__init__(directory, max_command_bytes)
        for name, socket in zip(SOCKET_NAMES, self._sockets, strict=True):
            socket.connect(f"ipc://{directory / name}")
        self._watched: list[int] = []
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._subscribers: zmq.Socket | None = None  # type: ignore[type-arg]
        if subscribers is not None:
            check_private(subscribers)
            self._subscribers = self._listen(subscribers / SUBSCRIBERS_SOCKET)

    def _listen(self, path: Path) -> zmq.Socket:  # type: ignore[type-arg]
        socket = self._context.socket(zmq.ROUTER)
        for option, value in SUBSCRIBERS_OPTIONS.items():
            socket.setsockopt(option, value)
        path.unlink(missing_ok=True)  # a predecessor's
        socket.bind(f"ipc://{path}")
        self._poller.register(socket, zmq.POLLIN)
        self._sockets.append(socket)
        return socket

    def watch(self, descriptor: int) -> None:
        """Waits end when this descriptor is readable, too."""
        self._watched.append(descriptor)
        self._poller.register(descriptor, zmq.POLLIN)

    def receive_command(self) -> bytes | None:
        """The next command, None where there is none yet."""
        return self._receive(self._commands)

    def receive_from_subscriber(self) -> tuple[bytes, bytes] | None:
        """(who, message), None where there is none yet."""
        socket = self._subscribers
        if socket is None or not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        who, *parts = socket.recv_multipart()
        return who, parts[0] if len(parts) == 1 else b""

    def send_to_subscriber(self, who: bytes, reply: wire.AnySubscriberReply) -> bool:
        """False where it is gone. One that takes nothing misses this, and will ask again."""
        assert self._subscribers is not None
        try:
            self._subscribers.send_multipart([who, wire.encode(reply)], zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError:  # no such peer any more
            return False
        return True

    def wait_command(self, timeout_ms: int | None) -> bool:
        """Waits until a command or a subscriber's message can be received, a watched descriptor is readable, or time is
        over (None: no limit). False where a watched descriptor is readable."""
        return all(isinstance(socket, zmq.Socket) for socket, _ in self._poller.poll(timeout_ms))

    def nap(self, timeout_s: float) -> bool:
        """Waits for fractions of the milliseconds that `wait_command` knows, and for no command. False where a watched
        descriptor is readable."""
        return not select.select(self._watched, [], [], timeout_s)[0]

    def send_event(self, event: wire.Event, timeout_ms: int = 1000) -> bool:
        """False where the runner did not take it in time."""
        self._events.setsockopt(zmq.SNDTIMEO, timeout_ms)
        try:
            self._events.send(wire.encode(event))
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int = 1000) -> None:
        """Lets what was sent reach the runner, for at most this long, and closes the sockets."""
        for socket in self._sockets:
            socket.setsockopt(zmq.LINGER, linger_ms)
        self._close()


class SubscriberChannel:
    """A subscriber's side of the socket in a book's folder. It connects again by itself to whoever binds that next."""

    def __init__(self, folder: Path) -> None:
        _check_descriptors()
        check_private(folder)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.IMMEDIATE, 1), (zmq.SNDHWM, 64), (zmq.RECONNECT_IVL, 10)):
            self._socket.setsockopt(option, value)
        self._socket.connect(f"ipc://{folder / SUBSCRIBERS_SOCKET}")

    def send(self, message: wire.AnySubscriberMessage) -> bool:
        """False where there is no sidecar at the moment."""
        return _Channel._send(self._socket, wire.encode(message))

    def receive(self) -> wire.AnySubscriberReply | None:
        """The next reply, None where there is none yet. Raises `BadMessage`."""
        data = _Channel._receive(self._socket)
        return None if data is None else wire.decode_subscriber_reply(data)

    def wait(self, timeout_ms: int, *, to_send: bool = False, descriptors: tuple[int, ...] = ()) -> None:
        """Until a reply can be received (or a message sent), a descriptor is readable, or time is over."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if to_send else 0))
        for descriptor in descriptors:
            poller.register(descriptor, zmq.POLLIN)
        poller.poll(timeout_ms)

    @property
    def descriptor(self) -> int:
        """Becomes readable when replies may have come; edge-triggered: receive until None before waiting on it."""
        return int(self._socket.getsockopt(zmq.FD))

    def close(self, linger_ms: int = 100) -> None:
        """Lets what was sent reach the sidecar, for at most this long. Idempotent."""
        if not self._context.closed:
            self._socket.close(linger_ms)
            self._context.term()
