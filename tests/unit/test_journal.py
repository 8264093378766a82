"""The journal against a model that keeps every message for ever and computes each answer from all of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from asyncbook.batch import Batch
from asyncbook.ipc import wire
from asyncbook.journal import Journal

NUM_ROWS = 3


class Model:
    """All messages, in order: (seq, message or None for a step, batch of a step or of what is described, data)."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Any, Batch | None, bytes | None]] = []

    def stop_ids(self, seq: int) -> dict[int, list[int]]:
        """Of the requests that hold rows after a message, by row."""
        held: dict[int, list[int]] = {}
        for at, message, _, _ in self.messages:
            if at <= seq and isinstance(message, wire.Admit):
                held[message.row] = message.stop_ids
            elif at <= seq and isinstance(message, wire.Release):
                held.pop(message.row, None)
        return held

    def batches(self, seq: int) -> dict[int, bytes]:
        """What the slots hold after a message."""
        slots: dict[int, bytes] = {}
        for at, message, batch, _ in self.messages:
            if at <= seq and isinstance(message, wire.DescribeBatch):
                assert batch is not None
                slots[message.slot] = bytes(wire.as_bytes(batch.fields))
        return slots

    def needed_slots(self, seq: int) -> set[int]:
        """Slots that a step behind a message uses before they are described anew."""
        needed: set[int] = set()
        described: set[int] = set()
        for at, message, batch, _ in self.messages:
            if at > seq and isinstance(message, wire.DescribeBatch):
                described.add(message.slot)
            elif at > seq and message is None and batch is not None and batch.slot not in described:
                needed.add(batch.slot)
        return needed


def random_message(choices: random.Random, seq: int, held: set[int]) -> Any:
    if choices.random() < 0.5 and len(held) < NUM_ROWS:
        row = choices.choice([row for row in range(NUM_ROWS) if row not in held])
        held.add(row)
        stop_ids = [choices.randrange(9) for _ in range(choices.randrange(3))]
        empty = memoryview(b"")
        return wire.Admit(seq, row, 1, 0, "a", empty, empty, None, 0, 1, 0, [choices.randrange(9)], stop_ids, False)
    if held and choices.random() < 0.6:
        row = choices.choice(sorted(held))
        held.discard(row)
        return wire.Release(seq, row, 1)
    return wire.Abort(seq, 0, 1)


@pytest.mark.parametrize("seed", range(30))
def test_restore_says_what_held_at_the_checkpoint(seed: int) -> None:
    choices = random.Random(seed)
    checkpoint = 0
    journal, model, held = Journal(lambda: checkpoint), Model(), set[int]()
    known: list[Batch | None] = [None] * 4  # few slots, so that they are used again
    for seq in range(1, 200):
        if choices.random() < 0.5:
            message = random_message(choices, seq, held)
            data = wire.encode(message)
            model.messages.append((seq, message, None, data))
            journal.add(message, data)
        elif choices.random() < 0.3 or not any(known):
            slot = choices.randrange(len(known))
            batch = Batch(None, (), np.full((wire.BatchField.COUNT, 1), seq, np.int32))  # type: ignore[arg-type]
            batch.slot = slot
            known[slot] = batch
            message = wire.DescribeBatch(seq, slot, wire.as_bytes(batch.fields))
            data = wire.encode(message)
            model.messages.append((seq, message, batch, data))
            journal.add(message, data)
        else:
            batch = choices.choice([batch for batch in known if batch is not None])
            step_data = choices.choice([b"step%d" % seq, None])
            model.messages.append((seq, None, batch, step_data))
            journal.add_step(seq, step_data, batch)
        if choices.random() < 0.1:
            checkpoint = choices.randint(checkpoint, seq)
        restore = journal.restore(known)
        assert {row.row: row.stop_ids for row in restore.rows} == model.stop_ids(checkpoint)
        expected, shown = model.batches(checkpoint), {batch.slot: bytes(batch.fields) for batch in restore.batches}
        assert shown.items() <= expected.items()
        assert model.needed_slots(checkpoint) <= shown.keys()
        assert journal.messages() == [data for at, _, _, data in model.messages if at > checkpoint and data is not None]
