"""What `asyncbook bench gpu` runs on: a CUDA device, or the fake one, so that the script can be tried anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from asyncbook import Book
from asyncbook.device.fake import FakeDevice


class Platform:
    """`torch_device` is where tensors live, `name` what a book is made with."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_cuda = name.startswith("cuda")
        self.torch_device = torch.device(name if self.is_cuda else "cpu")
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32

    @property
    def card(self) -> str:
        return str(torch.cuda.get_device_name(self.torch_device)) if self.is_cuda else "no GPU: the fake device"

    def launcher(self, book: Book | None) -> Launcher:
        """Launches work in the order of what the book's device is given."""
        if self.is_cuda:
            return Launcher(self, None)
        link = None if book is None else book._device.link
        device = FakeDevice() if link is None else link.device
        assert isinstance(device, FakeDevice)
        return Launcher(self, device)


class Launcher:
    """Work on the current stream, and its end."""

    def __init__(self, platform: Platform, fake: FakeDevice | None) -> None:
        self._platform = platform
        self._fake = fake

    def launch(self, work: Callable[[], Any]) -> None:
        """Runs it on the device; returns at once."""
        if self._fake is None:
            work()
        else:
            self._fake.launch(work)

    def synchronize(self) -> None:
        """Until the device has done all of it."""
        if self._fake is None:
            torch.cuda.synchronize(self._platform.torch_device)
        else:
            self._fake.wait(self._fake.record())

    def mark(self) -> Any:
        """A point in time on the current stream."""
        if self._fake is None:
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            return event
        at: list[int] = []
        self._fake.launch(lambda: at.append(time.monotonic_ns()))
        return at

    def us_between(self, first: Any, last: Any) -> float:
        """Between two marks that the device has passed."""
        return 1e3 * float(first.elapsed_time(last)) if self._fake is None else (last[0] - first[0]) / 1e3


def busy_work(platform: Platform) -> Callable[[], Any]:
    """About a millisecond of work for the device, in the place of a forward pass."""
    if not platform.is_cuda:
        return lambda: time.sleep(0.001)
    matrix = torch.randn((4096, 4096), dtype=torch.bfloat16, device=platform.torch_device)
    result = torch.empty_like(matrix)

    def work() -> None:
        for _ in range(5):
            torch.mm(matrix, matrix, out=result)

    return work
