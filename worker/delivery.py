"""How a sidecar delivers: from the outbox into the outputs logs."""

from __future__ import annotations

import logging

from asyncbook.ipc.log_ring import lines_of, put_behind_columns
from asyncbook.ipc.outputs_log import OutputsLogWriter
from asyncbook.worker.outbox import Departed, Outbox

logger = logging.getLogger(__name__)


class LogDelivery:
    """The reader of a sidecar's bookkeeper: memory that the runner reads when it likes, and subscribers as well."""

    def __init__(self, log: OutputsLogWriter) -> None:
        self._log = log

    def take_from(self, outbox: Outbox, step: int) -> bool:
        """Writes what is new as of `step`; False where rows have to wait for the runner to read."""
        while (departed := outbox.take_departed()) is not None:
            self._write_departed(departed, outbox, step)
        log = self._log.outputs
        while outbox.has_pending:
            room = log.room(self._log.min_lines)
            if room == 0:
                return self._spill(outbox, step)
            columns = outbox.take_pending(log.block(room))
            if columns.n == 0:
                return self._write_to_overflow(outbox, step)
            self._log.publish(log, step, columns)
        return True

    def _spill(self, outbox: Outbox, step: int) -> bool:
        """The runner is slow, and subscribers are not to wait for it: what it does not read goes to the other log as
        well."""
        if not self._log.broadcast.is_on or self._log.outputs.is_held:
            return False
        if self._log.overflow.room(self._log.min_lines):
            return self._write_to_overflow(outbox, step)
        return self._cut_off(step) and self.take_from(outbox, step)

    def _cut_off(self, step: int) -> bool:
        """Both logs are full. Whether nothing more is kept for the runner from here on, because there are subscribers
        and it has never read anything."""
        log = self._log
        if not log.broadcast.is_on or log.was_ever_read or log.cut_off_step:
            return False
        logger.warning(
            "nobody reads the outputs in the runner, and there are subscribers: from step %d on nothing is kept for "
            "the runner; BookConfig(runner_reads_outputs=False) says so from the start",
            step,
        )
        log.cut_off(step)
        return True

    def _write_to_overflow(self, outbox: Outbox, step: int) -> bool:
        """There is more room in the other log, for a row whose text alone is too much for the outputs log as well."""
        log = self._log.overflow
        room = log.room(self._log.min_lines)
        columns = outbox.take_pending(log.block(room)) if room else None
        if columns is None or columns.n == 0:
            return False
        self._log.publish(log, step, columns)
        return self.take_from(outbox, step)

    def _write_departed(self, departed: Departed, outbox: Outbox, step: int) -> None:
        """Now or never: nobody keeps it."""
        columns = departed.columns()
        size = columns.record_size
        for log in (self._log.outputs, self._log.overflow):
            if log.room(lines_of(size)) >= size:
                put_behind_columns(log.block(size), columns)
                self._log.publish(log, step, columns)
                return
        if self._cut_off(step):
            self._write_departed(departed, outbox, step)
            return
        self._log.drop(departed.request_no, step, columns)
        outbox.num_dropped_requests += 1
