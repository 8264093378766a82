"""What is to be delivered. A row waits in the outbox, not its tokens: they are read from the table when the reader can
take them, so a slow reader gets bigger pieces, and what waits for it is bounded by the book.

Only the last piece of a request that was aborted, or whose row was released, does not wait in the row. It is kept here,
at most `MAX_DEPARTED_TOKEN_IDS` ids and `MAX_DEPARTED_REQUESTS` requests; beyond that the oldest are dropped whole and
counted.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from asyncbook.ipc.columns import OutputColumns, block_size
from asyncbook.worker import kernels, rules
from asyncbook.worker.rules import Field

MAX_DEPARTED_TOKEN_IDS = 1 << 24
MAX_DEPARTED_REQUESTS = 1 << 20

_NUM_DELIVERED, _NUM_OUTPUT_TOKENS = int(Field.NUM_DELIVERED), int(Field.NUM_OUTPUT_TOKENS)


class _Departed(NamedTuple):
    """What an aborted or released request had not delivered."""

    request_no: int
    token_ids: np.ndarray
    finish_reason: int
    stop_reason: int


class Outbox:
    """Rows with something to deliver (`lists[PENDING]`), and what departed requests left behind."""

    def __init__(self, work: np.ndarray, token_ids: np.ndarray, lists: np.ndarray, lengths: np.ndarray) -> None:
        self._work, self._token_ids, self._lists, self._lengths = work, token_ids, lists, lengths
        self._departed: deque[_Departed] = deque()
        self._num_departed_token_ids = 0
        self._piece_size = 1  # ids of a row in the last pieces, at most: what to make room for
        self.num_dropped_requests = 0
        self.request_nos = np.zeros(lists.shape[1], np.int32)

    def open(self, row: int, request_no: int) -> None:
        """The row's outputs belong to this request from now on."""
        self.request_nos[row] = request_no

    @property
    def is_empty(self) -> bool:
        return not self._departed and self._lengths[rules.PENDING] == 0

    def take(self) -> OutputColumns:
        """All that is to be delivered, departed requests first. It counts as delivered from here on."""
        columns = self._take_pending()
        if self._departed:
            columns = self._take_departed(columns)
        return columns

    def _take_pending(self) -> OutputColumns:
        n = int(self._lengths[rules.PENDING])
        num_token_ids = n * self._piece_size
        while True:
            block = np.empty(block_size(n, num_token_ids), np.int32)
            size = block_size(
                n,
                kernels.take_pending(self._work, self._token_ids, self._lists, self._lengths, self.request_nos, block),
            )
            if size <= block.size:
                return OutputColumns(n, block[:size])
            # Steps with drafts stay on average far below their most ids; room for the average is found once.
            num_token_ids = size - block_size(n, 0)
            self._piece_size = -(-num_token_ids // n)

    def _take_departed(self, columns: OutputColumns) -> OutputColumns:
        request_nos, pieces, finish_reasons, stop_reasons = zip(*self._departed, strict=True)
        self._departed.clear()
        self._num_departed_token_ids = 0
        return OutputColumns.of(
            np.concatenate([request_nos, columns.request_nos]),
            np.concatenate([finish_reasons, columns.finish_reasons]),
            np.concatenate([stop_reasons, columns.stop_reasons]),
            np.concatenate([[piece.size for piece in pieces], np.diff(columns.offsets)]),
            np.concatenate([*pieces, columns.token_ids]),
        )

    def depart(self, row: int) -> None:
        """Nothing will follow what the row's request still has to deliver: keeps it, whatever becomes of the row."""
        work = self._work
        if not work[Field.IS_PENDING, row]:
            return
        first = work[Field.NUM_PROMPT_TOKENS, row] + work[_NUM_DELIVERED, row]
        token_ids = self._token_ids[row, first : work[Field.NUM_TOKENS_NO_SPEC, row]].copy()
        if work[_NUM_OUTPUT_TOKENS, row] - work[_NUM_DELIVERED, row] > token_ids.size:  # one is in a column only
            token_ids = np.append(token_ids, work[Field.LAST_TOKEN_ID, row])
        self._departed.append(
            _Departed(
                int(self.request_nos[row]),
                token_ids,
                int(work[Field.FINISH_REASON, row]),
                int(work[Field.STOP_REASON, row]),
            )
        )
        self._num_departed_token_ids += token_ids.size
        pending = self._lists[rules.PENDING, : self._lengths[rules.PENDING]]
        others = pending[pending != row]
        pending[: others.size] = others
        self._lengths[rules.PENDING] = others.size
        work[Field.IS_PENDING, row] = 0
        work[_NUM_DELIVERED, row] = work[_NUM_OUTPUT_TOKENS, row]
        while self._num_departed_token_ids > MAX_DEPARTED_TOKEN_IDS or len(self._departed) > MAX_DEPARTED_REQUESTS:
            self._num_departed_token_ids -= self._departed.popleft().token_ids.size
            self.num_dropped_requests += 1
