"""Bytes that were sent and are not applied: bounded by the size of the book, however long its sidecar takes."""

from __future__ import annotations

from collections import deque

from asyncbook.ipc.layout import Layout
from asyncbook.ipc.publish import Word

MIN_BYTES = 1 << 26
MAX_MESSAGES = 1 << 14  # that are remembered before it is looked again which of them are applied


class Backlog:
    """Messages other than steps, of which there are few in flight."""

    def __init__(self, layout: Layout, applied_seq: Word) -> None:
        # Room for a whole table of prompts, and as much again as a small book never needs.
        self.max_bytes = layout.logprobs.offset - layout.table_offset + MIN_BYTES
        self._applied_seq = applied_seq
        self._sizes: deque[tuple[int, int]] = deque()
        self._num_bytes = 0

    def has_room(self, size: int) -> bool:
        """Whether a message of this size may be sent. Looks at what is applied only where it seems not."""
        if self._num_bytes + size > self.max_bytes or len(self._sizes) >= MAX_MESSAGES:
            applied_seq = self._applied_seq.load_acquire()
            while self._sizes and self._sizes[0][0] <= applied_seq:
                self._num_bytes -= self._sizes.popleft()[1]
        return not self._sizes or self._num_bytes + size <= self.max_bytes

    def add(self, seq: int, size: int) -> None:
        """A message was sent."""
        self._sizes.append((seq, size))
        self._num_bytes += size
