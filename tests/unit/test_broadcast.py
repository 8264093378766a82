"""The broadcast log against a list: every reader gets everything in order, or is told that it missed something."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from asyncbook.ipc import broadcast, jit, layout
from asyncbook.ipc.broadcast import BroadcastReader, BroadcastWriter, NamesRecord
from asyncbook.ipc.columns import OutputColumns
from asyncbook.ipc.errors import OutputsLost
from asyncbook.ipc.layout import Layout
from asyncbook.ipc.log_ring import lines_of, record_lines

NUM_LINES = 24
Item = bytes | list[int]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_OUTPUTS_LOG_BYTES", "OVERFLOW_LOG_BYTES", "BROADCAST_LOG_BYTES"):
        monkeypatch.setattr(layout, name, NUM_LINES * layout.LINE_BYTES)
    monkeypatch.setattr(broadcast, "WARM_BYTES", layout.LINE_BYTES)
    jit.compile_all()


def new_layout() -> Layout:
    return Layout(max_num_reqs=1, max_model_len=8, num_spec_tokens=0, max_in_flight=1)


def columns_of(num_ids: int, first_id: int) -> OutputColumns:
    ids = np.arange(first_id, first_id + num_ids, dtype=np.int32)
    return OutputColumns.of(np.array([first_id]), np.array([0]), np.array([-1]), np.array([num_ids]), ids)


class BroadcastMachine(RuleBasedStateMachine):
    """One writer, which may be replaced, and two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.layout = new_layout()
        self.memory = memoryview(bytearray(self.layout.total_bytes))
        self.writer = BroadcastWriter(self.layout, self.memory)
        self.writer.turn_on(0)
        self.number = self.first_position = 0
        self.items: list[tuple[Item, int]] = []  # and the position behind each
        self.readers = [self.reader(), self.reader()]
        self.num_read = [0, 0]

    def reader(self) -> BroadcastReader:
        return BroadcastReader(self.layout, self.memory.toreadonly(), self.writer.written, self.writer.epoch)

    @rule(num_ids=st.integers(0, 100))
    def write(self, num_ids: int) -> None:
        self.number += 1
        columns = columns_of(num_ids, self.number)
        self.writer.write_record(record_lines(self.number, self.number, columns))
        self.items.append((columns.block.tolist(), self.writer.written))

    @rule(data=st.binary(max_size=300))
    def write_names(self, data: bytes) -> None:
        self.writer.write_names(data)
        self.items.append((data, self.writer.written))

    @rule()
    def succeed(self) -> None:
        """Another process goes on, which knows a place and a number before it."""
        self.writer = BroadcastWriter(self.layout, self.memory)
        assert self.writer.is_on

    @precondition(lambda self: all(reader.position == self.writer.written for reader in self.readers))
    @rule()
    def begin_anew(self) -> None:
        self.writer.begin_anew(self.number)
        self.first_position = self.writer.written

    @precondition(lambda self: self.writer.written - self.first_position < NUM_LINES // 2)
    @rule()
    def count(self) -> None:
        assert self.writer.last_number_since(0, 0) == self.number

    @rule(which=st.integers(0, 1), most=st.integers(1, 5))
    def read(self, which: int, most: int) -> None:
        for _ in range(most):
            try:
                record = self.readers[which].take()
            except OutputsLost:
                self.check_lost(which)
                return
            if record is None:
                assert self.num_read[which] == len(self.items)
                return
            item, _ = self.items[self.num_read[which]]
            came = record.data if isinstance(record, NamesRecord) else record.columns.block.tolist()
            assert came == item
            self.num_read[which] += 1

    def check_lost(self, which: int) -> None:
        """Only where the oldest record that was not read has begun to be overwritten."""
        position = self.readers[which].position
        assert self.writer.written - position > NUM_LINES
        self.readers[which] = self.reader()
        self.num_read[which] = len(self.items)


def test_the_log_is_a_list_that_forgets() -> None:
    how = settings(
        max_examples=200,
        stateful_step_count=60,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    machine: Any = BroadcastMachine
    run_state_machine_as_test(machine, settings=how)


def test_a_reader_knows_when_the_broadcast_was_interrupted() -> None:
    machine = BroadcastMachine()
    machine.write(3)
    machine.writer.turn_off()
    machine.writer.turn_on(machine.number)
    machine.write(3)
    with pytest.raises(OutputsLost, match="subscribe again"):
        machine.readers[0].take()
    reader = machine.reader()
    machine.write(2)
    record = reader.take()
    assert record is not None
    assert not isinstance(record, NamesRecord)
    assert record.number == 3


def test_what_was_not_broadcast_by_the_predecessor_is_counted_from_where_the_epoch_began() -> None:
    machine = BroadcastMachine()
    machine.write(3)
    machine.writer.turn_off()
    np.frombuffer(machine.memory, np.uint8, offset=machine.layout.broadcast_log.offset)[:] = 0  # given back
    machine.writer.turn_on(7)
    assert BroadcastWriter(machine.layout, machine.memory).last_number_since(0, 0) == 7


def test_a_record_that_is_larger_than_half_of_the_log_ends_what_readers_can_follow() -> None:
    machine = BroadcastMachine()
    columns = columns_of(16 * NUM_LINES, 1)
    assert lines_of(columns.record_size) > NUM_LINES // 2
    machine.writer.write_record(record_lines(1, 1, columns))
    assert machine.writer.is_on
    with pytest.raises(OutputsLost):
        machine.readers[0].take()


def test_readers_in_other_threads_get_records_whole_or_none() -> None:
    machine = BroadcastMachine()
    has_ended = threading.Event()
    counts = [0, 0]

    def read(which: int) -> None:
        reader = machine.readers[which]
        while True:
            ends = has_ended.is_set()
            try:
                record = reader.take()
            except OutputsLost:
                reader = machine.reader()
                continue
            if record is None and ends:
                return
            if record is not None and not isinstance(record, NamesRecord):
                block = record.columns.block
                assert block[-1] - block[0] == block.size - 6, "a torn record"
                assert record.number == block[0]
                counts[which] += 1
            else:
                os.sched_yield()

    threads = [threading.Thread(target=read, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for number in range(1, 20_001):
        machine.writer.write_record(record_lines(number, number, columns_of(1 + number % 60, number)))
        if number % 3 == 0:  # sometimes a reader gets on, and sometimes it is overtaken
            os.sched_yield()
    has_ended.set()
    for thread in threads:
        thread.join(60)
    assert min(counts) > 0
    assert not any(thread.is_alive() for thread in threads)
