"""What a book asks of a device, and which device a name means.

A device runs what it is given later, in order within a stream. Everything here that says "on the current stream"
returns at once. Streams and events are the device's own; nobody else looks into them.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

logger = logging.getLogger("asyncbook")

Stream = Any
Event = Any


class Device(Protocol):
    """A device with memory of its own, used from one thread."""

    name: str

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is one of a device of this kind."""

    def register(self, address: int, num_bytes: int) -> str:
        """Pins memory of this process, so that copies of it need nobody to wait. Says why it could not, else ""."""

    def unregister(self, address: int) -> None:
        """Undoes `register`. Nothing may be pending on the memory."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the device, its contents whatever they are."""

    def new_stream(self) -> Stream:
        """A stream beside the caller's."""

    def current_stream(self) -> Stream:
        """The caller's stream. Raises `ContractError` where it records a graph: that would be played again later."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Makes it the current stream inside the block."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On the current stream: as `target.copy_(source)`. One of them may be pinned memory."""

    def fill(self, target: torch.Tensor, value: int) -> None:
        """On the current stream: `value` into every element of memory on the device."""

    def narrow(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On the current stream: int64 into int32, both on the device; what is no int32 becomes the least one."""

    def follow(self, stream: Stream) -> None:
        """What comes on the current stream from here on runs after what is on `stream` by now."""

    def record(self) -> Event:
        """A mark on the current stream."""

    def is_done(self, event: Event) -> bool:
        """Whether the device has come past the mark. Never waits."""

    def wait(self, event: Event) -> None:
        """Until the device has come past the mark."""

    def synchronize(self) -> None:
        """Until the device has done everything, whoever asked for it."""

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        """A copy in the memory of the CPU; waits for what the current stream makes of the tensor."""


def open_device(name: str) -> Device | None:
    """The device of this name; None, and a warning the first time, where this machine has no such thing.

    Raises `ValueError` for a number that is not among those of the machine.
    """
    if name.startswith("fake"):
        from asyncbook.device.fake import FakeDevice

        return FakeDevice(int(name.partition(":")[2] or 0))
    num_devices = _count_cuda_devices()
    if num_devices == 0:
        _say_pageable(name, "torch finds no CUDA device here")
        return None
    index = int(name.partition(":")[2]) if ":" in name else torch.cuda.current_device()
    if index >= num_devices:
        raise ValueError(f"device is {name!r}, expected one of cuda:0 to cuda:{num_devices - 1}")
    from asyncbook.device.cuda import CudaDevice

    return CudaDevice(index)


@cache
def _count_cuda_devices() -> int:
    """Asked in the runner only, and once: a sidecar has neither torch nor a CUDA context."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@cache
def _say_pageable(name: str, reason: str) -> None:
    """Says it once."""
    logger.warning("%s: no pinned memory (%s); copies use pageable memory, and are waited for", name, reason)


_refusals: dict[str, str] = {}  # by device: why memory could not be pinned, which is not tried again


def pin(device: Device, address: int, num_bytes: int) -> bool:
    """Whether the memory is pinned for the device from here on. A refusal is remembered, and said once."""
    if device.name in _refusals:
        return False
    reason = device.register(address, num_bytes)
    if reason:
        _refusals[device.name] = reason
        _say_pageable(device.name, reason)
    return not reason
