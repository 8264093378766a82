"""What the runner knows of its rows without asking anybody: who holds them, under which generation, what it asked for.

That a step finished a request the runner learns from a frame; until then the row is simply held. See `docs/ledger.md`.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from asyncbook.ipc.errors import BookFull, DuplicateRequest, InvalidRequest, StaleRow


class Row(NamedTuple):
    """A handle: a place in the persistent batch, and how often it had been given out (or renamed) by then."""

    index: int  # type: ignore[assignment]  # the contract's name, for which tuple.index gives way
    generation: int


class HeldRow:
    """A row in somebody's hands."""

    __slots__ = (
        "admit_generation",
        "generation",
        "is_aborted",
        "is_preempted",
        "logprobs_width",
        "num_prompt_tokens",
        "request_id",
        "request_no",
    )

    def __init__(
        self, request_id: str, request_no: int, generation: int, num_prompt_tokens: int, logprobs_width: int
    ) -> None:
        self.request_id = request_id
        self.request_no = request_no
        self.admit_generation = self.generation = generation
        self.num_prompt_tokens = num_prompt_tokens
        self.logprobs_width = logprobs_width  # the sampled id's and the top k; 0: none
        self.is_preempted = False
        self.is_aborted = False


class RowRegistry:
    """Free rows, held rows, and the generations of both. Lowest free index first."""

    def __init__(self, max_num_reqs: int) -> None:
        self._max_num_reqs = max_num_reqs
        self._free = list(range(max_num_reqs))  # a heap
        self._held: list[HeldRow | None] = [None] * max_num_reqs
        self._generations = [0] * max_num_reqs
        self._live_ids: dict[str, int] = {}

    def check_admission(self, request_id: str) -> Row:
        """The handle that `admit` will give out. Raises `DuplicateRequest` or `BookFull`."""
        if request_id in self._live_ids:
            row = self._live_ids[request_id]
            raise DuplicateRequest(f"request {request_id!r} is live in row {row}; abort or release it first")
        if not self._free:
            raise BookFull(f"all {self._max_num_reqs} rows are held, none is free for request {request_id!r}")
        index = self._free[0]
        return Row(index, self._generations[index] + 1)

    def admit(
        self, row: Row, request_id: str, request_no: int, num_prompt_tokens: int, logprobs_width: int = 0
    ) -> None:
        """Gives out the row that `check_admission` promised."""
        heapq.heappop(self._free)
        self._generations[row.index] = row.generation
        self._held[row.index] = HeldRow(request_id, request_no, row.generation, num_prompt_tokens, logprobs_width)
        self._live_ids[request_id] = row.index

    def held(self, row: Row) -> HeldRow:
        """Who holds the row under this very handle. Raises `StaleRow`."""
        try:
            index, generation = row if isinstance(row, Row) else None
            held = self._held[index] if index >= 0 else None
        except (TypeError, ValueError, IndexError):
            raise StaleRow(f"{row!r} names no row, expected a Row with an index below {self._max_num_reqs}") from None
        if held is None:
            raise StaleRow(f"row {index} is free, generation {generation} of it was released")
        if held.generation != generation:
            raise StaleRow(
                f"row {index} is held by request {held.request_id!r} in generation {held.generation}, "
                f"the handle is of generation {generation}"
            )
        return held

    def live_row(self, request_id: str) -> Row:
        """The handle of a request that is neither aborted nor released. Raises `InvalidRequest`."""
        index = self._live_ids.get(request_id)
        held = None if index is None else self._held[index]
        if index is None or held is None:
            raise InvalidRequest(f"request {request_id!r} is not live, expected one that is admitted and not aborted")
        return Row(index, held.generation)

    def renamed(self, row: Row, *, preempted: bool) -> Row:
        """The next handle of a row for `resume` (of a preempted row) or `rewind` (of one that is not)."""
        held = self.held(row)
        if (
            held.is_preempted != preempted and not held.is_aborted
        ):  # nothing but its generation changes in an aborted row
            state, remedy = ("not preempted", "use rewind") if preempted else ("preempted", "resume it first")
            raise InvalidRequest(f"row {row.index} (request {held.request_id!r}) is {state}; {remedy}")
        return Row(row.index, row.generation + 1)

    def rename(self, row: Row) -> None:
        """`row`, from `renamed`, is the row's handle from now on."""
        held = self._held[row.index]
        assert held is not None
        held.generation = self._generations[row.index] = row.generation
        held.is_preempted = False

    def abort(self, row: Row) -> None:
        """Frees the request's id; the row stays held."""
        held = self.held(row)
        if not held.is_aborted:
            held.is_aborted = True
            self._live_ids.pop(held.request_id)

    def release(self, row: Row) -> None:
        """Frees the row."""
        self.abort(row)
        self._held[row.index] = None
        heapq.heappush(self._free, row.index)

    @property
    def num_held(self) -> int:
        return self._max_num_reqs - len(self._free)
