"""What is to be delivered. A row waits in the outbox, not its tokens: they are read from the table when the reader can
take them, so a slow reader gets bigger pieces, and what waits for it is bounded by the book.

Only the last piece of a request whose row was released has no table any more. It is kept here, at most
`MAX_DEPARTED_TOKEN_IDS` ids and `MAX_DEPARTED_REQUESTS` requests; beyond that the oldest are dropped whole and counted.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from asyncbook.ipc.columns import OutputColumns
from asyncbook.worker import kernels, rules
from asyncbook.worker.rules import Field

MAX_DEPARTED_TOKEN_IDS = 1 << 24
MAX_DEPARTED_REQUESTS = 1 << 20


class Outbox:
    """Rows with something to deliver (`lists[PENDING]`), and what departed requests left behind."""

    def __init__(self, work: np.ndarray, token_ids: np.ndarray, lists: np.ndarray, lengths: np.ndarray) -> None:
        num_rows = lists.shape[1]
        self._work, self._token_ids, self._lists, self._lengths = work, token_ids, lists, lengths
        self._departed: deque[tuple[int, np.ndarray, int, int]] = deque()
        self._num_departed_token_ids = 0
        self.num_dropped_requests = 0
        self.request_nos = np.zeros(num_rows, np.int64)
        self._out_request_nos = np.zeros(num_rows, np.int64)
        self._out_offsets = np.zeros(num_rows + 1, np.int32)
        self._out_token_ids = np.zeros(4 * num_rows, np.int32)
        self._out_finish_reasons = np.zeros(num_rows, np.uint8)
        self._out_stop_reasons = np.zeros(num_rows, np.int32)

    def open(self, row: int, request_no: int, request_id: str) -> None:
        """The row's outputs belong to this request from now on."""
        self.request_nos[row] = request_no

    @property
    def is_empty(self) -> bool:
        return not self._departed and self._lengths[rules.PENDING] == 0

    def _gather(self) -> OutputColumns:
        arguments = (self._work, self._token_ids, self._lists, self._lengths, self.request_nos)
        while True:
            num_token_ids = kernels.gather_pending(
                *arguments, self._out_request_nos, self._out_offsets, self._out_token_ids, self._out_finish_reasons,
                self._out_stop_reasons,
            )  # fmt: skip
            if num_token_ids <= self._out_token_ids.size:
                break
            self._out_token_ids = np.zeros(2 * num_token_ids, np.int32)
        n = int(self._lengths[rules.PENDING])
        return OutputColumns(
            self._out_request_nos[:n],
            self._out_offsets[: n + 1],
            self._out_token_ids[:num_token_ids],
            self._out_finish_reasons[:n],
            self._out_stop_reasons[:n],
        )

    def columns(self) -> OutputColumns:
        """All that is to be delivered, departed requests first. Nothing is marked as delivered yet."""
        columns = self._gather()
        if not self._departed:
            return columns
        pieces = [token_ids for _, token_ids, _, _ in self._departed]
        ends = np.cumsum([0, *(piece.size for piece in pieces)])
        return OutputColumns(
            np.concatenate([np.array([no for no, *_ in self._departed], np.int64), columns.request_nos]),
            np.concatenate([ends, columns.offsets[1:] + ends[-1]]).astype(np.int32),
            np.concatenate([*pieces, columns.token_ids]),
            np.concatenate([np.array([reason for *_, reason, _ in self._departed], np.uint8), columns.finish_reasons]),
            np.concatenate([np.array([reason for *_, reason in self._departed], np.int32), columns.stop_reasons]),
        )

    def mark_delivered(self) -> None:
        """The reader has what `columns` returned last."""
        kernels.mark_delivered(self._work, self._lists, self._lengths)
        self._departed.clear()
        self._num_departed_token_ids = 0

    def depart(self, row: int) -> None:
        """The row is about to be cleared: keeps what its request still has to deliver."""
        if not self._work[Field.IS_PENDING, row]:
            return
        columns = self._gather()
        pending = self._lists[rules.PENDING, : self._lengths[rules.PENDING]]
        index = int(np.flatnonzero(pending == row)[0])
        token_ids = columns.token_ids[columns.offsets[index] : columns.offsets[index + 1]].copy()
        self._departed.append(
            (
                int(columns.request_nos[index]),
                token_ids,
                int(columns.finish_reasons[index]),
                int(columns.stop_reasons[index]),
            )
        )
        self._num_departed_token_ids += token_ids.size
        pending[index:-1] = pending[index + 1 :].copy()
        self._lengths[rules.PENDING] -= 1
        self._work[Field.IS_PENDING, row] = 0
        while self._num_departed_token_ids > MAX_DEPARTED_TOKEN_IDS or len(self._departed) > MAX_DEPARTED_REQUESTS:
            self._num_departed_token_ids -= self._departed.popleft()[1].size
            self.num_dropped_requests += 1
