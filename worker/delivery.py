"""How a sidecar delivers: from the outbox into the outputs logs."""

from __future__ import annotations

from asyncbook.ipc.logprobs import section_start
from asyncbook.ipc.outputs_log import LogWriter, OutputsLogWriter, lines_of, size_of
from asyncbook.worker.outbox import Departed, Outbox


class LogDelivery:
    """The reader of a sidecar's bookkeeper: memory that the runner reads when it likes."""

    def __init__(self, log: OutputsLogWriter) -> None:
        self._log = log

    def take_from(self, outbox: Outbox, step: int) -> bool:
        """Writes what is new as of `step`; False where rows have to wait for the runner to read."""
        while (departed := outbox.take_departed()) is not None:
            if not self._write_departed(departed, step):
                outbox.num_dropped_requests += 1
        log = self._log.outputs
        while outbox.has_pending:
            room = log.room(self._log.min_lines)
            if room == 0:
                return False
            self._publish(log, step, *outbox.take_pending(log.block(room)))
        return True

    def _write_departed(self, departed: Departed, step: int) -> bool:
        """Now or never: nobody keeps it."""
        columns = departed.columns()
        size, section = columns.block.size, departed.section
        whole = size_of(size, section.size)
        for log in (self._log.outputs, self._log.overflow):
            if log.room(lines_of(whole)) >= whole:
                block = log.block(whole)
                block[:size] = columns.block
                block[section_start(size) :] = section
                self._publish(log, step, columns.n, size, section.size)
                return True
        return False

    def _publish(self, log: LogWriter, step: int, n: int, size: int, logprobs_size: int) -> None:
        self._log.number += 1
        log.publish(self._log.number, step, n, size, logprobs_size)
