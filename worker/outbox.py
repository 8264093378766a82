"""What is to be delivered. A row waits in the outbox, not its tokens: they are read from the table when the reader can
take them, so a slow reader gets bigger pieces, and what waits for it is bounded by the book.

Only the last piece of a request that was aborted, or whose row was released, does not wait in the row. It is kept here,
at most `MAX_DEPARTED_TOKEN_IDS` ids, logprobs counted as such, and `MAX_DEPARTED_REQUESTS` requests; beyond that the
oldest are dropped whole and counted. (A sidecar does not keep them: they go to the overflow log at once.)
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import numpy as np

from asyncbook.ipc.columns import OutputColumns, Texts, block_size
from asyncbook.ipc.layout import NUM_CHECKPOINTS, Field
from asyncbook.ipc.logprobs import LogprobColumns
from asyncbook.worker import kernels, rules
from asyncbook.worker.logprobs import LogprobTable
from asyncbook.worker.row_texts import RowTexts

MAX_DEPARTED_TOKEN_IDS = 1 << 24
MAX_DEPARTED_REQUESTS = 1 << 20

_NUM_DELIVERED, _NUM_OUTPUT_TOKENS = int(Field.NUM_DELIVERED), int(Field.NUM_OUTPUT_TOKENS)


class Departed(NamedTuple):
    """What an aborted or released request had not delivered."""

    request_no: int
    token_ids: np.ndarray
    finish_reason: int
    stop_reason: int
    texts: Texts | None
    logprobs: LogprobColumns | None

    @property
    def size(self) -> int:
        """Ids, and int32 values of logprobs."""
        return self.token_ids.size + (0 if self.logprobs is None else self.logprobs.size)

    def columns(self) -> OutputColumns:
        """A delivery of this alone."""
        return OutputColumns.of(
            np.array([self.request_no]),
            np.array([self.finish_reason]),
            np.array([self.stop_reason]),
            np.array([self.token_ids.size]),
            self.token_ids,
            self.texts,
            self.logprobs,
        )


class Outbox:
    """Rows with something to deliver (`lists[PENDING]`), and what departed requests left behind."""

    def __init__(
        self,
        work: np.ndarray,
        token_ids: np.ndarray,
        lists: np.ndarray,
        lengths: np.ndarray,
        texts: RowTexts | None = None,
        logprobs: LogprobTable | None = None,
    ) -> None:
        self._work, self._token_ids, self._lists, self._lengths = work, token_ids, lists, lengths
        self._texts, self._logprobs = texts, logprobs
        self._departed: deque[Departed] = deque()
        self._num_departed_token_ids = 0
        self.num_dropped_requests = 0
        # How many ends the process before this one delivered after its last checkpoint, by request number: they happen
        # again, and are not delivered again. Without an entry once they have.
        self.ends_to_skip: Counter[int] = Counter()

    @property
    def has_pending(self) -> bool:
        """Whether a row has something to deliver."""
        return bool(self._lengths[rules.PENDING] > 0)

    @property
    def is_empty(self) -> bool:
        return not self._departed and not self.has_pending

    def take_all(self) -> OutputColumns:
        """All that is to be delivered, departed requests first. It counts as delivered from here on."""
        num_pending = int(self._lengths[rules.PENDING])
        if self._logprobs is None:
            size = block_size(num_pending, kernels.count_pending_ids(self._work, self._lists, self._lengths))
        else:
            size = self._logprobs.size_of_all(self._lists[rules.PENDING], num_pending)
        columns = self._take_rows(np.empty(size, np.int32), num_pending)
        if not self._departed:
            return columns
        pieces = [departed.columns() for departed in self._departed]
        self._departed.clear()
        self._num_departed_token_ids = 0
        return OutputColumns.joined([*pieces, columns])

    def take_pending(self, block: np.ndarray) -> OutputColumns:
        """What rows have to deliver, as much as there is room for: the block of the columns is the beginning of
        `block`, the section of their logprobs lies behind it, and their text has room behind that. No rows where the
        text of one alone is too much."""
        num_pending = int(self._lengths[rules.PENDING])
        if self._texts is None:
            return self._take_rows(block, num_pending)
        offsets = self._texts.measure(self._lists[rules.PENDING, :num_pending])
        sizes = np.arange(1, num_pending + 1) + 1 + -(-offsets[1:] // 4)
        num_rows = int(np.searchsorted(sizes, block.size // 2, side="right"))
        return self._take_rows(block[: block.size - int(sizes[num_rows - 1])] if num_rows else block[:1], num_rows)

    def _take_rows(self, block: np.ndarray, max_rows: int) -> OutputColumns:
        work, whole, logprobs_size = self._work, block, 0
        rows = self._lists[rules.PENDING, :max_rows].copy() if self._texts is not None else None
        if self._logprobs is not None:
            ids_size, logprobs_size = self._logprobs.take(self._lists[rules.PENDING], max_rows, block)
            block = block[:ids_size]
        n, num_token_ids = kernels.take_pending(work, self._token_ids, self._lists, self._lengths, block, max_rows)
        columns = OutputColumns(n, block[: block_size(n, num_token_ids)])
        if self._logprobs is not None:
            columns.logprobs = LogprobColumns.behind(whole, n, columns.block.size, num_token_ids, logprobs_size)
        if rows is not None and self._texts is not None:
            columns.texts = self._texts.take(rows[:n], columns.finish_reasons, columns.stop_reasons)
        return columns

    def take_departed(self) -> Departed | None:
        """The oldest piece of a departed request."""
        if not self._departed:
            return None
        departed = self._departed.popleft()
        self._num_departed_token_ids -= departed.size
        return departed

    def skip_delivered_end(self, row: int) -> None:
        """Where the row's request has ended, and the process before this one delivered that: nothing is to be."""
        request_no = int(self._work[Field.REQUEST_NO, row])
        if self._work[Field.IS_PENDING, row] and request_no in self.ends_to_skip:
            self.ends_to_skip -= Counter((request_no,))  # keeps no zeros
            self.remove(row)
            self._work[_NUM_DELIVERED, row] = self._work[_NUM_OUTPUT_TOKENS, row]

    def depart(self, row: int) -> None:
        """Nothing will follow what the row's request still has to deliver: keeps it, whatever becomes of the row."""
        work = self._work
        if self.ends_to_skip:
            self.skip_delivered_end(row)
        if not work[Field.IS_PENDING, row]:
            return
        self.remove(row)
        request_no = int(work[Field.REQUEST_NO, row])
        first = work[Field.NUM_PROMPT_TOKENS, row] + work[_NUM_DELIVERED, row]
        token_ids = self._token_ids[row, first : work[Field.NUM_TOKENS_NO_SPEC, row]].copy()
        if work[_NUM_OUTPUT_TOKENS, row] - work[_NUM_DELIVERED, row] > token_ids.size:  # one is in a column only
            token_ids = np.append(token_ids, work[Field.LAST_TOKEN_ID, row])
        logprobs = None if self._logprobs is None else self._logprobs.take_row(row)
        work[_NUM_DELIVERED, row] = work[_NUM_OUTPUT_TOKENS, row]
        finish_reasons, stop_reasons = work[Field.FINISH_REASON, row : row + 1], work[Field.STOP_REASON, row : row + 1]
        stop_reasons = stop_reasons.copy()
        texts = None
        if self._texts is not None:
            texts = self._texts.take(np.array([row], np.int32), finish_reasons, stop_reasons)
        self._keep(Departed(request_no, token_ids, int(finish_reasons[0]), int(stop_reasons[0]), texts, logprobs))

    def remove(self, row: int) -> None:
        """The row has nothing to deliver any more."""
        pending = self._lists[rules.PENDING, : self._lengths[rules.PENDING]]
        others = pending[pending != row]
        pending[: others.size] = others
        self._lengths[rules.PENDING] = others.size
        self._work[Field.IS_PENDING, row] = 0
        self._work[Field.IS_DIRTY, row] = NUM_CHECKPOINTS

    def _keep(self, departed: Departed) -> None:
        self._departed.append(departed)
        self._num_departed_token_ids += departed.size
        while self._num_departed_token_ids > MAX_DEPARTED_TOKEN_IDS or len(self._departed) > MAX_DEPARTED_REQUESTS:
            self.take_departed()
            self.num_dropped_requests += 1
