"""Who the outputs are broadcast for, and what they must know to read them.

A subscriber says who it is, gets a place to read from, and reads the broadcast log (`ipc/broadcast.py`) from there on
by itself. It asks to be woken when it has read everything; nobody waits for it, and nothing is kept for it. Its process
is watched by a descriptor, so one that was killed is forgotten, and its name stands in the segment, so that the next
sidecar goes on broadcasting for it.
"""

from __future__ import annotations

import hmac
import logging
import os
import select
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from asyncbook.ipc import wire
from asyncbook.ipc.channel import SidecarChannel
from asyncbook.ipc.errors import BadMessage
from asyncbook.ipc.layout import SubscriberWord
from asyncbook.ipc.outputs_log import OutputsLogWriter
from asyncbook.ipc.runtime_dir import start_time

logger = logging.getLogger(__name__)

NO_WAKE = -1
LOOKS_BETWEEN_CHECKS = 256  # at the socket, between two looks at who has died
LOOKS_WITHOUT_SUBSCRIBERS = 32  # of a sidecar that never waits, between two of which it looks whether there are any


def named_in(message: wire.Admit) -> wire.Named:
    """What an admission says of its request."""
    return wire.Named(message.request_no, message.request_id, message.stop)


class Directory:
    """The requests in the rows: their names, and their stop strings."""

    def __init__(self, request_nos: np.ndarray) -> None:
        self._request_nos = request_nos
        self._named: dict[int, wire.Named] = {}  # by row

    def admit(self, message: wire.Admit) -> None:
        """The request that has taken a row."""
        self._named[message.row] = named_in(message)

    def restore(self, rows: Iterable[wire.RestoredRow]) -> None:
        """Those that a predecessor knew."""
        for row in rows:
            self._named[row.row] = wire.Named(int(self._request_nos[row.row]), row.request_id, row.stop)

    def release(self, row: int) -> None:
        """The row is free."""
        self._named.pop(row, None)

    def all(self) -> list[wire.Named]:
        """Every request in a row."""
        return list(self._named.values())


@dataclass
class _Subscriber:
    """`slot`: its entry in the segment. `wake_at`: the position beyond which it wants to hear of what is written."""

    slot: int
    pidfd: int
    wake_at: int = NO_WAKE


class Subscribers:
    """Of one book. `table`: `Layout.subscribers`, whose entries are those of a predecessor; `request_nos` [rows]: the
    ledger's column. `is_restart`: the requests in the rows are not known before `restore`."""

    def __init__(
        self,
        table: np.ndarray,
        request_nos: np.ndarray,
        channel: SidecarChannel,
        log: OutputsLogWriter,
        token: bytes,
        *,
        is_restart: bool,
    ) -> None:
        self._channel, self._log, self._token = channel, log, token
        self._broadcast = log.broadcast
        self._table = table
        self.directory = Directory(request_nos)
        self._subscribers: dict[bytes, _Subscriber] = {}
        self._orphans: dict[int, int] = {}  # pidfds by slot: a predecessor knew them, and they have not come yet
        self._num_looks = 0
        self._knows_requests = not is_restart
        for slot in np.flatnonzero(self._table[:, SubscriberWord.PID]).tolist():
            pidfd = _open_process(*self._table[slot].tolist())
            if pidfd is None:
                self._table[slot] = 0
            else:
                self._orphans[slot] = pidfd
        if self._broadcast.is_on and not self._orphans:
            self._broadcast.turn_off()

    def restore(self, rows: Iterable[wire.RestoredRow]) -> None:
        """The requests that a predecessor knew."""
        self.directory.restore(rows)
        self._knows_requests = True

    def announce(self, message: wire.Admit) -> None:
        """A request is about to take a row: whatever is delivered of it comes later."""
        if self._broadcast.is_on:
            self._broadcast.write_names(wire.encode([named_in(message)]))

    def serve(self) -> None:
        """What subscribers ask for, and waking those who wait for what was written. While there are none, the socket is
        looked at now and then."""
        self._num_looks += 1
        if not self._broadcast.is_on and self._num_looks % LOOKS_WITHOUT_SUBSCRIBERS:
            return
        self.serve_now()

    def serve_now(self) -> None:
        """`serve`, whether there are any or not. Before a predecessor's requests are known nothing can be said: who has
        asked will ask again."""
        if not self._knows_requests:
            while self._channel.receive_from_subscriber() is not None:
                pass
            return
        while (received := self._channel.receive_from_subscriber()) is not None:
            self._answer(*received)
        if not self._broadcast.is_on:
            return
        written = self._broadcast.written
        num_done = 0  # those who have read everything
        for who, subscriber in list(self._subscribers.items()):
            if NO_WAKE < subscriber.wake_at < written:
                self._wake(who, subscriber)
            num_done += subscriber.wake_at == written
        if num_done == len(self._subscribers) and not self._orphans:
            self._broadcast.begin_anew(self._log.number)
        if self._num_looks % LOOKS_BETWEEN_CHECKS == 0:
            self.forget_dead()

    def wake_all(self) -> None:
        """The sidecar ends: there is nothing more to wait for."""
        for who, subscriber in list(self._subscribers.items()):
            self._wake(who, subscriber)

    def _wake(self, who: bytes, subscriber: _Subscriber) -> None:
        subscriber.wake_at = NO_WAKE
        if not self._channel.send_to_subscriber(who, wire.Woken()):
            self._forget(who)

    def _answer(self, who: bytes, data: bytes) -> None:
        try:
            message = wire.decode_subscriber_message(data)
        except BadMessage as error:
            logger.warning("skipped a bad message of a subscriber: %s", error)
            return
        if isinstance(message, wire.Subscribe):
            self._channel.send_to_subscriber(who, self._subscribe(who, message))
        elif who not in self._subscribers:
            if isinstance(message, wire.WakeAt):
                self._channel.send_to_subscriber(who, wire.Unknown())
        elif isinstance(message, wire.WakeAt):
            self._subscribers[who].wake_at = message.position
        else:
            self._forget(who)

    def _subscribe(self, who: bytes, message: wire.Subscribe) -> wire.AnySubscriberReply:
        if not hmac.compare_digest(message.token, self._token):
            return wire.NotSubscribed("the token is not the one in the book's address")
        # One that had several waits when its sidecar died asks as often. It must not go in between: with the last
        # subscriber the broadcast ends.
        if who not in self._subscribers:
            self.forget_dead()
            slot = self._slot_of(message)
            if slot is None:
                return wire.NotSubscribed(f"the book has {len(self._table)} subscribers, as many as there may be")
            pidfd = self._orphans.pop(slot, None)
            pidfd = _open_process(message.pid, message.start_time) if pidfd is None else pidfd
            if pidfd is None:
                return wire.NotSubscribed(f"the sidecar sees no process {message.pid}: is it in another container?")
            self._table[slot] = message.pid, message.start_time
            self._subscribers[who] = _Subscriber(slot, pidfd)
        self._broadcast.turn_on(self._log.number)
        known = self.directory.all() if message.epoch != self._broadcast.epoch else []
        return wire.Subscribed(self._broadcast.written, self._broadcast.epoch, known)

    def _slot_of(self, message: wire.Subscribe) -> int | None:
        """The entry that a predecessor made for the same process, else a free one."""
        for slot in self._orphans:
            if self._table[slot].tolist() == [message.pid, message.start_time]:
                return slot
        free = np.flatnonzero(self._table[:, SubscriberWord.PID] == 0)
        return int(free[0]) if free.size else None

    def forget_dead(self) -> None:
        """Those whose processes have ended."""
        poll = select.poll()
        pidfds = {subscriber.pidfd: who for who, subscriber in self._subscribers.items()}
        orphans = {pidfd: slot for slot, pidfd in self._orphans.items()}
        for pidfd in (*pidfds, *orphans):
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(0):
            if pidfd in pidfds:
                self._forget(pidfds[pidfd])
            else:
                self._free(orphans[pidfd], self._orphans.pop(orphans[pidfd]))

    def _forget(self, who: bytes) -> None:
        subscriber = self._subscribers.pop(who)
        self._free(subscriber.slot, subscriber.pidfd)

    def _free(self, slot: int, pidfd: int) -> None:
        os.close(pidfd)
        self._table[slot] = 0
        if not self._subscribers and not self._orphans:
            self._broadcast.turn_off()


def _open_process(pid: int, started: int) -> int | None:
    """A descriptor of the process that started then, None where there is none any more."""
    if pid <= 0 or start_time(pid) != started:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    if start_time(pid) != started:  # it ended between the look and the opening, and its number is another's
        os.close(pidfd)
        return None
    return pidfd
