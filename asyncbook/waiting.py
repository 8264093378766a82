"""Waiting in an event loop for descriptors, several waiters each."""

from __future__ import annotations

import asyncio

_Key = tuple[asyncio.AbstractEventLoop, int]


class DescriptorWaiters:
    """Futures that end when one of their descriptors is readable. A descriptor is watched while somebody waits, by each
    loop that somebody waits in: a loop that was closed in the middle of a wait is nobody else's trouble."""

    def __init__(self) -> None:
        self._waiters: dict[_Key, set[asyncio.Future[None]]] = {}

    async def readable(self, *descriptors: int) -> None:
        """Until one of them is readable, or forgotten."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        for descriptor in descriptors:
            waiters = self._waiters.setdefault((loop, descriptor), set())
            if not waiters:
                loop.add_reader(descriptor, _wake, waiters)
            waiters.add(future)
        try:
            await future
        finally:
            for descriptor in descriptors:
                waiters = self._waiters.get((loop, descriptor), set())
                waiters.discard(future)
                if not waiters:
                    self._unwatch((loop, descriptor))

    def _unwatch(self, key: _Key) -> None:
        loop, descriptor = key
        if self._waiters.pop(key, None) is not None and not loop.is_closed():
            loop.remove_reader(descriptor)

    def wake_all(self) -> None:
        """Ends every wait: something has changed that a descriptor may not tell of."""
        for (loop, _), waiters in self._waiters.items():
            if not loop.is_closed():
                _wake(waiters)

    def forget(self, *descriptors: int) -> None:
        """Ends every wait for them and watches them no longer: they are about to be closed, and their numbers to be
        used again."""
        for key in [key for key in self._waiters if key[1] in descriptors]:
            waiters = self._waiters[key]
            self._unwatch(key)
            if not key[0].is_closed():
                _wake(waiters)

    def forget_all(self) -> None:
        """`forget` for everything that is waited for."""
        self.forget(*[descriptor for _, descriptor in self._waiters])


def _wake(waiters: set[asyncio.Future[None]]) -> None:
    for future in waiters:
        if not future.done():
            future.set_result(None)
