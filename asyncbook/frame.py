"""A frame: all columns as of one step, read-only, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from asyncbook.ipc.layout import COLUMN_DTYPES, FINISH_REASON_COLUMN, Column, Layout, Stamp

if TYPE_CHECKING:
    from asyncbook.copies import FrameCopies
    from asyncbook.device.columns import TensorColumns

Columns = dict[str, np.ndarray]


class FrameViews:
    """Read-only views of every slot of the frame ring, made once a book."""

    def __init__(self, layout: Layout, memory: memoryview) -> None:
        self._layout, self._memory = layout, memory
        self._tensors: dict[int, TensorColumns] = {}
        self.num_frames = layout.num_frames
        self.columns = [self._columns(layout, memory, slot) for slot in range(layout.num_frames)]
        self.stamps = layout.stamps.view(memory)

    @staticmethod
    def _columns(layout: Layout, memory: memoryview, slot: int) -> Columns:
        block = layout.frame_int32(slot).view(memory)
        n = layout.max_num_reqs
        columns = {column.name.lower(): block[column, :n].view(COLUMN_DTYPES[column.name.lower()]) for column in Column}
        columns[FINISH_REASON_COLUMN] = layout.frame_uint8(slot).view(memory)[:n]
        return columns

    def tensors(self, slot: int) -> TensorColumns:
        """The columns of a slot as CPU tensors over the same memory, made when they are first asked for."""
        if slot not in self._tensors:
            from asyncbook.device.columns import TensorColumns, tensor_at

            block = tensor_at(self._memory, self._layout.frame_int32(slot).offset, self._layout.frame_bytes)
            self._tensors[slot] = TensorColumns(self._layout, block)
        return self._tensors[slot]


class Frame:
    """Every column as of `step`, each of shape [max_num_reqs].

    The views hold while up to `max_in_flight + 1` later steps are submitted; `check()`, and leaving a `with` block over
    the frame, raise `FrameExpired` when the memory may have been given to a later step. To keep values longer, copy.
    """

    __slots__ = ("_check", "_columns", "_copies", "_stamp", "_views", "step")

    def __init__(self, step: int, views: FrameViews, copies: FrameCopies, check: Callable[[int], None]) -> None:
        self.step = step
        self._views, self._copies = views, copies
        slot = step % views.num_frames
        self._columns = views.columns[slot]
        self._stamp = views.stamps[slot]
        self._check = check

    def check(self) -> None:
        """Raises `FrameExpired` unless what was read so far is what the frame said."""
        self._check(self.step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.check()

    def __repr__(self) -> str:
        return f"Frame(step={self.step})"

    @property
    def num_prompt_tokens(self) -> np.ndarray:
        """int32: tokens of the prompt, earlier outputs not among them."""
        return self._columns["num_prompt_tokens"]

    @property
    def num_tokens_no_spec(self) -> np.ndarray:
        """int32: committed tokens, prompt included."""
        return self._columns["num_tokens_no_spec"]

    @property
    def num_tokens(self) -> np.ndarray:
        """int32: committed tokens and the drafts behind them."""
        return self._columns["num_tokens"]

    @property
    def num_computed_tokens(self) -> np.ndarray:
        """int32: tokens whose keys and values the engine holds."""
        return self._columns["num_computed_tokens"]

    @property
    def num_output_tokens(self) -> np.ndarray:
        """int32: tokens sampled for the request, earlier outputs included."""
        return self._columns["num_output_tokens"]

    @property
    def num_accepted_tokens(self) -> np.ndarray:
        """int32: drafts that verification accepted in the row's last step, 0 without drafts."""
        return self._columns["num_accepted_tokens"]

    @property
    def last_token_id(self) -> np.ndarray:
        """int32: the token committed last."""
        return self._columns["last_token_id"]

    @property
    def stop_reason(self) -> np.ndarray:
        """int32: the id that ended the request, -1 where none did, 0 in a free row."""
        return self._columns["stop_reason"]

    @property
    def generation(self) -> np.ndarray:
        """uint32: how often the row was given out or renamed."""
        return self._columns["generation"]

    @property
    def finish_reason(self) -> np.ndarray:
        """uint8: a `FinishReason`."""
        return self._columns["finish_reason"]

    @property
    def apply_start_ns(self) -> int:
        """When the bookkeeper began with the step, on CLOCK_MONOTONIC."""
        return int(self._stamp[Stamp.APPLY_START_NS])

    @property
    def published_ns(self) -> int:
        """When the bookkeeper published the step, on CLOCK_MONOTONIC."""
        return int(self._stamp[Stamp.APPLY_END_NS])

    @property
    def apply_ns(self) -> int:
        """How long the bookkeeper worked on the step, outputs aside."""
        return self.published_ns - self.apply_start_ns

    def to_device(self, stream: Any = None) -> TensorColumns:
        """All columns as tensors on the book's device, by one copy on `stream`, by default the device's current one.

        Returns at once; what is run on that stream afterwards sees the columns. Until the copy is done the frame is
        not overwritten: a `submit` that would do so raises `InFlightFull`, and `room` waits for the copy. Without a
        device, and where its memory cannot be pinned, the copy is done when this returns. Raises `FrameExpired`.
        """
        self._check(self.step)
        return self._copies.copy(self.step, stream)

    @property
    def torch(self) -> TensorColumns:
        """All columns as CPU tensors that share the frame's memory, as long as the frame holds. For reading only: the
        memory is mapped read-only, torch cannot know that, and a write through them ends the process (SIGSEGV)."""
        return self._views.tensors(self.step % self._views.num_frames)
