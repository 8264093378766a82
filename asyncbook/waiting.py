"""Waiting in an event loop for descriptors, several waiters each."""

from __future__ import annotations

import asyncio


class DescriptorWaiters:
    """Futures that end when one of their descriptors is readable. A descriptor is watched while somebody waits."""

    def __init__(self) -> None:
        self._waiters: dict[int, set[asyncio.Future[None]]] = {}

    async def readable(self, *descriptors: int) -> None:
        """Until one of them is readable, or forgotten."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        for descriptor in descriptors:
            waiters = self._waiters.setdefault(descriptor, set())
            if not waiters:
                loop.add_reader(descriptor, self._wake, descriptor)
            waiters.add(future)
        try:
            await future
        finally:
            for descriptor in descriptors:
                waiters = self._waiters.get(descriptor, set())
                waiters.discard(future)
                if not waiters and self._waiters.pop(descriptor, None) is not None:
                    loop.remove_reader(descriptor)

    def _wake(self, descriptor: int) -> None:
        for future in self._waiters.get(descriptor, ()):
            if not future.done():
                future.set_result(None)

    def wake_all(self) -> None:
        """Ends every wait, as if its descriptor were readable."""
        for descriptor in list(self._waiters):
            self._wake(descriptor)

    def forget(self, *descriptors: int) -> None:
        """Ends every wait for them and watches them no longer: they are about to be closed, and their numbers to be
        used again."""
        for descriptor in descriptors:
            self._wake(descriptor)
            for future in list(self._waiters.pop(descriptor, ()))[:1]:
                future.get_loop().remove_reader(descriptor)

    def forget_all(self) -> None:
        """`forget` for everything that is waited for."""
        self.forget(*list(self._waiters))
