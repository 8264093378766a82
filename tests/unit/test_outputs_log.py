"""The outputs logs alone: against a list, with wraps, padding, a full log, two logs in one order, and a crash."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from asyncbook.ipc import jit, layout
from asyncbook.ipc.columns import OutputColumns
from asyncbook.ipc.layout import Layout
from asyncbook.ipc.outputs_log import LogWriter, OutputsLogReader, OutputsLogWriter, lines_of

NUM_LINES = 24
Delivery = tuple[int, int, list[int]]  # number, step, block


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MIN_OUTPUTS_LOG_BYTES", NUM_LINES * layout.LINE_BYTES)
    monkeypatch.setattr(layout, "OVERFLOW_LOG_BYTES", NUM_LINES * layout.LINE_BYTES)
    jit.compile_all()


def new_layout() -> Layout:
    return Layout(max_num_reqs=1, max_model_len=8, num_spec_tokens=0, max_in_flight=1)


def columns_of(num_ids: int, first_id: int) -> OutputColumns:
    ids = np.arange(first_id, first_id + num_ids, dtype=np.int32)
    return OutputColumns.of(np.array([first_id]), np.array([0]), np.array([-1]), np.array([num_ids]), ids)


def write(log: OutputsLogWriter, which: LogWriter, columns: OutputColumns, step: int) -> bool:
    """Whether there was room for it."""
    size = columns.block.size
    if which.room(lines_of(size)) < size:
        return False
    which.block(size)[:] = columns.block
    log.number += 1
    which.publish(log.number, step, columns)
    return True


class LogMachine(RuleBasedStateMachine):
    """Writer, reader, checkpoints and crashes in any order; a list says what must come out."""

    def __init__(self) -> None:
        super().__init__()
        self.layout = new_layout()
        self.memory = memoryview(bytearray(self.layout.total_bytes))
        start, end = self.layout.runner_offset, self.layout.runner_end
        self.reader = OutputsLogReader(self.layout, self.memory.toreadonly(), self.memory[start:end])
        self.writer = OutputsLogWriter(self.layout, self.memory)
        self.unread: deque[Delivery] = deque()
        self.since: list[Delivery] = []  # written behind the last checkpoint
        self.dropped: list[int] = []
        self.checkpoint = (0, 0, 0, 0)
        self.count = 0

    @rule(num_ids=st.integers(0, 200), is_overflow=st.booleans())
    def write(self, num_ids: int, is_overflow: bool) -> None:
        columns = columns_of(num_ids, self.count)
        which = self.writer.overflow if is_overflow else self.writer.outputs
        if write(self.writer, which, columns, self.count):
            self.count += 1
            delivery = (self.writer.number, self.count - 1, columns.block.tolist())
            self.unread.append(delivery)
            self.since.append(delivery)
        else:
            assert lines_of(columns.block.size) > 1

    @rule()
    def read(self) -> None:
        record = self.reader.take()
        if not self.unread:
            assert record is None
            return
        assert record is not None
        assert (record.number, record.step, record.columns.block.tolist()) == self.unread.popleft()

    @precondition(lambda self: len(self.dropped) < 500)
    @rule(request_no=st.integers(0, 50))
    def drop(self, request_no: int) -> None:
        self.writer.note_drop(request_no)
        self.dropped.append(request_no)

    @rule()
    def write_checkpoint(self) -> None:
        writer = self.writer
        number = self.checkpoint[0] + 1
        self.checkpoint = (number, writer.outputs.written, writer.overflow.written, writer.number)
        writer.checkpointed(number)
        self.since.clear()
        self.dropped.clear()

    @rule(is_begun=st.booleans())
    def crash(self, is_begun: bool) -> None:
        if is_begun and (room := self.writer.outputs.room(1)):  # a record that was never published
            self.writer.outputs.block(room)[:] = -7
        self.writer = OutputsLogWriter(self.layout, self.memory)
        records, dropped = self.writer.take_over(*self.checkpoint)
        assert [(r.number, r.step, r.columns.block.tolist()) for r in records] == self.since
        assert dropped == self.dropped
        assert self.writer.number == (self.since[-1][0] if self.since else self.checkpoint[3])

    @invariant()
    def room_is_real(self) -> None:
        for log in (self.writer.outputs, self.writer.overflow):
            assert 0 <= log.room(1) <= (NUM_LINES - 1) * 16


def test_the_logs_are_a_list() -> None:
    how = settings(
        max_examples=150,
        stateful_step_count=60,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    machine: Any = LogMachine
    run_state_machine_as_test(machine, settings=how)


def test_what_no_checkpoint_knows_is_not_overwritten_though_it_was_read() -> None:
    machine = LogMachine()
    machine.write(200, False)
    machine.read()
    size = columns_of(200, 0).block.size
    assert machine.writer.outputs.room(lines_of(size)) < size
    assert machine.writer.outputs.is_held
    machine.write_checkpoint()
    assert not machine.writer.outputs.is_held
    assert machine.writer.outputs.room(lines_of(size)) >= size


def test_a_reader_in_another_thread_gets_every_record_whole() -> None:
    machine = LogMachine()
    num_records = 3000
    came: list[int] = []

    def read() -> None:
        while len(came) < num_records:
            record = machine.reader.take()
            if record is not None:
                block = record.columns.block
                came.append(record.number)
                assert block[-1] - block[0] == block.size - 6, "a torn record"

    thread = threading.Thread(target=read)
    thread.start()
    written = 0
    while written < num_records and thread.is_alive():
        which = machine.writer.overflow if written % 5 == 0 else machine.writer.outputs
        if write(machine.writer, which, columns_of(1 + written % 60, written), written):
            written += 1
            machine.writer.checkpointed(written)
    thread.join(60)
    assert came == list(range(1, num_records + 1))
