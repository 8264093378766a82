"""What the runner keeps of the messages it sent, until a checkpoint holds them: all that another sidecar needs to go on
where the one before it ended, beside the shared memory."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from asyncbook.batch import Batch
from asyncbook.ipc import wire

TRIM_AT_MESSAGES = 32  # below that nobody looks whether there is something to forget
MAX_MESSAGES = 16384  # kept while there is no sidecar to send them to


class _Request(NamedTuple):
    """An admission, without its tokens, which are in the table."""

    seq: int
    row: wire.RestoredRow


class _Entry(NamedTuple):
    """A message. `data` is None where a step is in the sample ring."""

    seq: int
    data: bytes | None
    released: _Request | None = None
    slot: int = -1  # of a step's batch, or of the batch that is described
    fields: np.ndarray | None = None  # of a step's batch


class Journal:
    """Messages behind the last checkpoint, in order."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self._requests: dict[int, _Request] = {}  # by row

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, message: wire.AnyCommand, data: bytes) -> None:
        """Any message but a step."""
        released, slot = None, -1
        if isinstance(message, wire.Admit):
            row = wire.RestoredRow(
                message.row,
                message.stop_ids,
                message.stop,
                message.include_stop_str_in_output,
                message.skip_special_tokens,
            )
            self._requests[message.row] = _Request(message.seq, row)
        elif isinstance(message, wire.Release):
            released = self._requests.pop(message.row, None)
        elif isinstance(message, wire.DescribeBatch):
            slot = message.slot
        self._entries.append(_Entry(message.seq, data, released, slot))

    def add_step(self, seq: int, data: bytes | None, batch: Batch) -> None:
        """A step; `data` is None where it is in the sample ring."""
        self._entries.append(_Entry(seq, data, None, batch.slot, batch.fields))

    def trim(self, checkpoint_seq: int) -> None:
        """Forgets what a checkpoint holds."""
        entries = self._entries
        while entries and entries[0].seq <= checkpoint_seq:
            entries.popleft()

    def restore(self, checkpoint_seq: int, known_batches: list[Batch | None]) -> wire.Restore:
        """What held at the checkpoint and is not in the segment. `known_batches`: by slot, as of now."""
        self.trim(checkpoint_seq)
        requests = [*self._requests.values(), *(entry.released for entry in self._entries if entry.released)]
        rows = [request.row for request in requests if request.seq <= checkpoint_seq]
        batches = self._batches_at_checkpoint(known_batches)
        return wire.Restore(checkpoint_seq, rows, [wire.RestoredBatch(*batch) for batch in batches.items()])

    def _batches_at_checkpoint(self, known_batches: list[Batch | None]) -> dict[int, memoryview]:
        """A slot that was described since held another batch before, which matters where a step with it is to come."""
        batches: dict[int, memoryview] = {}
        described: set[int] = set()
        for entry in self._entries:
            if entry.fields is None:
                described.add(entry.slot)
            elif entry.slot not in described:
                batches[entry.slot] = wire.as_bytes(entry.fields)
        for slot, batch in enumerate(known_batches):
            if batch is not None and slot not in described:
                batches[slot] = wire.as_bytes(batch.fields)
        return batches

    def messages(self) -> list[bytes]:
        """What has to be sent again, in order; steps in the sample ring are there already."""
        return [entry.data for entry in self._entries if entry.data is not None]
