"""How a sidecar delivers: from the outbox into the outputs logs."""

from __future__ import annotations

from asyncbook.ipc.columns import OutputColumns
from asyncbook.ipc.logprobs import section_start
from asyncbook.ipc.outputs_log import LogWriter, OutputsLogWriter, lines_of
from asyncbook.worker.outbox import Departed, Outbox


class LogDelivery:
    """The reader of a sidecar's bookkeeper: memory that the runner reads when it likes."""

    def __init__(self, log: OutputsLogWriter) -> None:
        self._log = log

    def take_from(self, outbox: Outbox, step: int) -> bool:
        """Writes what is new as of `step`; False where rows have to wait for the runner to read."""
        while (departed := outbox.take_departed()) is not None:
            if not self._write_departed(departed, step):
                self._log.note_drop(departed.request_no)
                outbox.num_dropped_requests += 1
        log = self._log.outputs
        while outbox.has_pending:
            room = log.room(self._log.min_lines)
            if room == 0:
                return False
            columns = outbox.take_pending(log.block(room))
            if columns.n == 0:
                return self._write_long_text(outbox, step)
            self._publish(log, step, columns)
        return True

    def _write_long_text(self, outbox: Outbox, step: int) -> bool:
        """The text of one row alone is too much for the outputs log: there is more room in the other one."""
        log = self._log.overflow
        room = log.room(self._log.min_lines)
        columns = outbox.take_pending(log.block(room)) if room else None
        if columns is None or columns.n == 0:
            return False
        self._publish(log, step, columns)
        return self.take_from(outbox, step)

    def _write_departed(self, departed: Departed, step: int) -> bool:
        """Now or never: nobody keeps it."""
        columns = departed.columns()
        size, section_size = columns.record_size, columns.logprobs_size
        for log in (self._log.outputs, self._log.overflow):
            if log.room(lines_of(size)) >= size:
                block = log.block(size)
                block[: columns.block.size] = columns.block
                if section_size and columns.logprobs is not None:
                    start = section_start(columns.block.size)
                    block[start : start + section_size] = columns.logprobs.section
                self._publish(log, step, columns)
                return True
        return False

    def _publish(self, log: LogWriter, step: int, columns: OutputColumns) -> None:
        self._log.number += 1
        log.publish(self._log.number, step, columns)
