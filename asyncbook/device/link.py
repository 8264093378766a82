"""A book's connection with a device: ids on their way from it, frames on their way to it.

Where the shared pages cannot be pinned the same calls work with pageable memory, and are waited for: `brings_ids` is
False then, and a step's ids go by way of the CPU (`to_host`).
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Any

import torch

from asyncbook.device.api import Device, Event, Stream, open_device, pin
from asyncbook.device.columns import TensorColumns, tensor_at
from asyncbook.ipc.errors import InvalidBatch
from asyncbook.ipc.layout import Layout, SlotWord
from asyncbook.ipc.segment import Segment


def open_link(device_name: str, segment: Segment, *, has_ring: bool) -> DeviceLink | None:
    """None where there is no such device: then there are no ids on it either, and frames stay where they are."""
    device = open_device(device_name)
    if device is None:
        return None
    with torch.inference_mode(False):  # what is made here is written to later, in whatever mode that happens
        return DeviceLink(device, segment, has_ring=has_ring)


def _unregister(device: Device, addresses: list[int], memory: memoryview, owner_pid: int) -> None:
    """Before the mapping goes: `memory` is held until here. Nothing is pending on it any more."""
    if os.getpid() == owner_pid:  # a forked child has no CUDA, and the pages are its parent's
        while addresses:
            device.unregister(addresses.pop())


def _abandon(device: Device, addresses: list[int], memory: memoryview, owner_pid: int) -> None:
    """For a book that nobody closed: what is pending, nobody else knows."""
    if addresses and os.getpid() == owner_pid:
        with suppress(RuntimeError):  # at the end of the interpreter the device may be gone
            device.synchronize()
        _unregister(device, addresses, memory, owner_pid)


class DeviceLink:
    """`has_ring`: whether somebody takes steps from the sample ring. Used from one thread."""

    def __init__(self, device: Device, segment: Segment, *, has_ring: bool) -> None:
        layout = segment.layout
        self.device = device
        self._layout = layout
        memory = segment.device_part()
        base = layout.runner_offset
        ring_bytes = layout.frames_offset - base if has_ring else 0
        frames_bytes = layout.num_frames * layout.frame_bytes
        frames = tensor_at(memory, layout.frames_offset - base, frames_bytes)
        self._frames = frames.view(layout.num_frames, layout.frame_bytes)
        address = frames.data_ptr() - (layout.frames_offset - base)
        addresses: list[int] = []
        # At `close`, when the book is collected, or when the interpreter ends: unregistered first, then unmapped.
        self._finalizer = weakref.finalize(self, _abandon, device, addresses, memory, os.getpid())
        is_pinned = True
        # The ring and the frames are written by different sides and mapped apart elsewhere: two ranges, once each.
        for start, num_bytes in ((address, ring_bytes), (frames.data_ptr(), frames_bytes)):
            if is_pinned and num_bytes:
                is_pinned = pin(device, start, num_bytes)
                if is_pinned:
                    addresses.append(start)
        self.is_pinned = is_pinned
        self._ring = DeviceRing(device, layout, memory) if is_pinned and has_ring else None

    @property
    def brings_ids(self) -> bool:
        """Whether `bring` may be called."""
        return self._ring is not None

    def check_ids(self, name: str, ids: Any, num_rows: int, most_width: int) -> torch.Tensor:
        """Ids on this device: int32 or int64, [num_rows] or [num_rows, 1 to most_width]. Raises `InvalidBatch`."""
        if ids.device.type != "cpu" and str(ids.device) != self.device.name:
            raise InvalidBatch(f"{name} is on {ids.device}, expected {self.device.name}, the device of this book")
        if ids.dtype not in (torch.int32, torch.int64):
            raise InvalidBatch(f"{name} is {ids.dtype}, expected torch.int32 or torch.int64")
        shape = tuple(ids.shape)
        if not (len(shape) == 1 or (len(shape) == 2 and 1 <= shape[1] <= most_width)) or shape[0] != num_rows:
            expected = f"[{num_rows}] or [{num_rows}, 1 to {most_width}]"
            raise InvalidBatch(f"{name} has shape {list(shape)}, expected {expected} for a batch of {num_rows} rows")
        tensor: torch.Tensor = ids.detach()
        return tensor

    def check_or_fetch(
        self, names: tuple[str, str], all_ids: tuple[Any, Any], num_rows: int, widths: tuple[int, int]
    ) -> list[Any]:
        """Ids and drafts: those on the device checked, and fetched where it cannot bring them; others as they are."""
        self.device.current_stream()  # before anything is sent: it must not record a graph
        checked = []
        for name, ids, width in zip(names, all_ids, widths, strict=True):
            if isinstance(ids, torch.Tensor) and self.device.owns(ids):
                ids = self.check_ids(name, ids, num_rows, width)
                ids = ids if self.brings_ids else self.device.to_host(ids)
            checked.append(ids)
        return checked

    def bring(self, step: int, sampled: torch.Tensor | None, drafts: torch.Tensor | None) -> None:
        """See `DeviceRing.bring`."""
        assert self._ring is not None
        self._ring.bring(step, sampled, drafts)

    def copy_frame(self, step: int, stream: Stream | None) -> tuple[TensorColumns, Event | None]:
        """A copy of a frame on the device, in one piece, on this stream or the current one. Until the event is done,
        the frame must not be overwritten; None: the copy is done."""
        device = self.device
        with device.on(device.current_stream() if stream is None else stream):
            device.current_stream()  # must not record a graph
            source = self._frames[step % self._layout.num_frames]
            block = device.empty(tuple(source.shape), torch.uint8)  # of the stream that it is written on
            device.copy(block, source)
            event = device.record()
        if not self.is_pinned:
            device.wait(event)
            return TensorColumns(self._layout, block), None
        return TensorColumns(self._layout, block), event

    def close(self, pending: list[Event]) -> None:
        """Waits for what is pending, and lets the pages go. Idempotent."""
        abandoned = self._finalizer.detach()
        if abandoned is None:
            return
        for event in pending:
            self.device.wait(event)
        if self._ring is not None:
            self._ring.wait()
        _, _, arguments, _ = abandoned
        _unregister(*arguments)


class DeviceRing:
    """The runner's side of the sample ring for ids that lie on a device: nobody waits, and no id is looked at.

    On the caller's stream the ids are copied to memory of the ring's own on the device. That is the moment at which
    they are what the step sampled: whatever the caller runs later on that stream may write over its tensor, or give its
    memory back. A stream beside it then waits for this copy and, in order, narrows the ids, copies them into the slot,
    and copies the step's number into the slot's ARRIVED word. So the caller's stream pays for one small copy on the
    device and waits for nothing, and ARRIVED is in memory only after the ids: copies of one stream do not overlap, and
    a copy is complete, its writes to the CPU's memory included, before the next begins. The eight bytes of the word
    are aligned, so they come as a whole.

    The memory between is one piece a slot. Step s + num_ring_slots is submitted only when step s is applied, so by then
    its copies have run, and no event is needed to write there again.
    """

    def __init__(self, device: Device, layout: Layout, memory: memoryview) -> None:
        self._device = device
        self._stream = device.new_stream()
        base, slots = layout.runner_offset, layout.num_ring_slots
        headers = layout.ring_headers
        header_words = headers.shape[1]
        words = tensor_at(memory, headers.offset - base, headers.end - headers.offset).view(torch.int64)
        self._arrived = [words[slot * header_words + SlotWord.ARRIVED :][:1] for slot in range(slots)]
        self._targets = []
        for region in (layout.ring_token_ids, layout.ring_draft_token_ids):
            ids = tensor_at(memory, region.offset - base, region.end - region.offset).view(torch.int32)
            self._targets.append(ids.view(region.shape))
        self._staged = {
            dtype: [device.empty(tuple(target.shape), dtype) for target in self._targets]
            for dtype in (torch.int32, torch.int64)
        }
        self._step = device.empty((1,), torch.int64)

    def bring(self, step: int, sampled: torch.Tensor | None, drafts: torch.Tensor | None) -> None:
        """Starts the ids of a step on their way, and ARRIVED behind them. Those that are None are in the slot."""
        device = self._device
        slot = step % len(self._arrived)
        caller = device.current_stream()
        staged = []
        for index, ids in enumerate((sampled, drafts)):
            if ids is not None and ids.numel():
                memory = self._staged[ids.dtype][index][slot, : ids.numel()]
                device.copy(memory.view(ids.shape), ids)
                staged.append((index, memory))
        with device.on(self._stream):
            device.follow(caller)
            for index, memory in staged:
                n = memory.numel()
                if memory.dtype is torch.int64:
                    wide, memory = memory, self._staged[torch.int32][index][slot, :n]
                    device.narrow(memory, wide)
                device.copy(self._targets[index][slot, :n], memory)
            device.fill(self._step, step)
            device.copy(self._arrived[slot], self._step)

    def wait(self) -> None:
        """Until everything that was brought is there."""
        with self._device.on(self._stream):
            event = self._device.record()
        self._device.wait(event)
