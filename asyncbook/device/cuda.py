"""A CUDA device, by torch's own streams and events. Only the runner makes one."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncbook.ipc.errors import ContractError
from asyncbook.ipc.layout import INT32_MIN

_cuda: Any = torch.cuda  # much of it has no types
CUDA_HOST_REGISTER_PORTABLE = 1  # pinned for every context of the process, not only for the one of this device


class CudaDevice:
    """`torch.device("cuda", index)`, for one book: books of two threads must not share the mark."""

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self._device = torch.device("cuda", index)
        self._mark = _cuda.Event()  # of `follow`, which looks at its last record only

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def register(self, address: int, num_bytes: int) -> str:
        # The device first: without one the runtime would make a context on device 0, for hundreds of megabytes. What
        # was current before is current again afterwards.
        with torch.cuda.device(self._device):
            cudart = _cuda.cudart()
            error = cudart.cudaHostRegister(address, num_bytes, CUDA_HOST_REGISTER_PORTABLE)
            if int(error) == 0:
                return ""
            self._forget_error()
            return f"cudaHostRegister of {num_bytes} bytes: {cudart.cudaGetErrorString(error)}"

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            cudart = _cuda.cudart()
            if int(cudart.cudaHostUnregister(address)) != 0:  # the runtime is being unloaded, and took all of it along
                self._forget_error()

    def _forget_error(self) -> None:
        """A failed call of the runtime leaves its error behind, and the next kernel launch, whosever it is, would
        raise it. torch has no call that takes it away."""
        runtime = _runtime_library()
        if runtime is not None:
            runtime.cudaGetLastError()
            return
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)  # the launch that raises it, and so takes it away

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def new_stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream = _cuda.Stream(self._device)
        return stream

    def current_stream(self) -> torch.cuda.Stream:
        if torch.cuda.is_current_stream_capturing():
            raise ContractError(
                f"the current stream of {self.name} records a CUDA graph: a step or a copy of a frame is of one moment "
                f"and cannot be played again; call this after the graph's replay"
            )
        return torch.cuda.current_stream(self._device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # Both contiguous and of one dtype where one is host memory, so this is one cudaMemcpyAsync; with pinned memory
        # that returns at once.
        target.copy_(source, non_blocking=True)

    def fill(self, target: torch.Tensor, value: int) -> None:
        target.fill_(value)  # the value travels with the launch: no memory has to hold it

    def narrow(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        target.masked_fill_(target != source, INT32_MIN)

    def follow(self, stream: torch.cuda.Stream) -> None:
        # Waits for the record made here; a later record of the same event does not change what was waited for.
        self._mark.record(stream)
        torch.cuda.current_stream(self._device).wait_event(self._mark)

    def record(self) -> torch.cuda.Event:
        event: torch.cuda.Event = _cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_done(self, event: torch.cuda.Event) -> bool:
        done: bool = _cuda.Event.query(event)
        return done

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        array: np.ndarray = tensor.detach().cpu().numpy()
        return array


def _runtime_library() -> ctypes.CDLL | None:
    """The CUDA runtime that torch has loaded; None where it is a part of torch's own library."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "libcudart" in path:
            return ctypes.CDLL(f"/{path}")
    return None
