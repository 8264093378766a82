"""What the runner keeps of the messages it sent, until a checkpoint holds them: all that another sidecar needs to go on
where the one before it ended, beside the shared memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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


# (sequence number, data, request whose row it releases, batch slot, the batch's fields). `data` is None where a step is
# in the sample ring; the slot is that of a step's batch, or of the batch that is described; fields are a step's only.
# A plain tuple: one is made in every step, on the critical path.
_Entry = tuple[int, bytes | None, _Request | None, int, np.ndarray | None]


class Journal:
    """Messages behind the last checkpoint, in order."""

    def __init__(self, checkpoint_seq: Callable[[], int]) -> None:
        """`checkpoint_seq`: the last message that the newest checkpoint holds."""
        self._checkpoint_seq = checkpoint_seq
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
        self._entries.append((message.seq, data, released, slot, None))
        if len(self._entries) >= TRIM_AT_MESSAGES:
            self._trim(self._checkpoint_seq())

    def add_step(self, seq: int, data: bytes | None, batch: Batch) -> None:
        """A step; `data` is None where it is in the sample ring."""
        self._entries.append((seq, data, None, batch.slot, batch.fields))
        if len(self._entries) >= TRIM_AT_MESSAGES:
            self._trim(self._checkpoint_seq())

    def _trim(self, checkpoint_seq: int) -> None:
        entries = self._entries
        while entries and entries[0][0] <= checkpoint_seq:
            entries.popleft()

    def restore(self, known_batches: list[Batch | None]) -> wire.Restore:
        """What held at the newest checkpoint and is not in the segment. `known_batches`: by slot, as of now."""
        checkpoint_seq = self._checkpoint_seq()
        self._trim(checkpoint_seq)
        released = [request for _, _, request, _, _ in self._entries if request is not None]
        requests = [*self._requests.values(), *released]
        rows = [request.row for request in requests if request.seq <= checkpoint_seq]
        batches = self._batches_at_checkpoint(known_batches)
        return wire.Restore(checkpoint_seq, rows, [wire.RestoredBatch(*batch) for batch in batches.items()])

    def _batches_at_checkpoint(self, known_batches: list[Batch | None]) -> dict[int, memoryview]:
        """A slot that was described since held another batch before, which matters where a step with it is to come."""
        batches: dict[int, memoryview] = {}
        described: set[int] = set()
        for _, _, _, slot, fields in self._entries:
            if fields is None:
                described.add(slot)
            elif slot not in described:
                batches[slot] = wire.as_bytes(fields)
        for slot, batch in enumerate(known_batches):
            if batch is not None and slot not in described:
                batches[slot] = wire.as_bytes(batch.fields)
        return batches

    def messages(self) -> list[bytes]:
        """What has to be sent again, in order; steps in the sample ring are there already."""
        return [data for _, data, _, _, _ in self._entries if data is not None]
