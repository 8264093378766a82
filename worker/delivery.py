"""How a sidecar delivers: from the outbox into the outputs logs."""

from __future__ import annotations

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
            n, size = outbox.take_pending(log.block(room))
            self._publish(log, step, n, size)
        return True

    def _write_departed(self, departed: Departed, step: int) -> bool:
        """Now or never: nobody keeps it."""
        columns = departed.columns()
        size = columns.block.size
        for log in (self._log.outputs, self._log.overflow):
            if log.room(lines_of(size)) >= size:
                log.block(size)[:] = columns.block
                self._publish(log, step, columns.n, size)
                return True
        return False

    def _publish(self, log: LogWriter, step: int, n: int, size: int) -> None:
        self._log.number += 1
        log.publish(self._log.number, step, n, size)
