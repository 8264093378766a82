"""The slow and obvious book: docs/ledger.md in plain Python, in the order of that page.

It applies every call at once. Nothing in it is meant to be fast; it is the check on what is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NO_REASON = -1
NAN_BITS = 0x7FC00000
LEAST_INT32, MOST_INT32 = -(2**31), 2**31 - 1
DROP_REASONS = ("stale", "finished", "preempted", "partial_prefill", "overscheduled", "invalid", "after_finish")
COLUMNS: dict[str, type[np.generic]] = {
    "num_prompt_tokens": np.int32,
    "num_tokens_no_spec": np.int32,
    "num_tokens": np.int32,
    "num_computed_tokens": np.int32,
    "num_output_tokens": np.int32,
    "num_accepted_tokens": np.int32,
    "last_token_id": np.int32,
    "stop_reason": np.int32,
    "generation": np.uint32,
    "finish_reason": np.uint8,
}


class Finish(IntEnum):
    """Values of the column `finish_reason`."""

    NONE, STOP, LENGTH, ABORT, ERROR = range(5)


State = Enum("State", "FREE RUNNING PREEMPTED DROPPING FINISHED")
Event = Enum("Event", "ADMIT STEP ABORT PREEMPT PREEMPT_DROP RESUME REWIND RELEASE")
S, E = State, Event
# "The life of a row", (state, event) -> (next state, effect); preempt comes in its two kinds. A pair that is missing is
# a "-" of the page. What a step finishes goes to FINISHED from inside the rules. For an effect "drop X" the ids of the
# step are dropped and counted as X.
LIFE: dict[tuple[State, Event], tuple[State, str]] = {
    (S.FREE, E.ADMIT): (S.RUNNING, "admit"),
    (S.FREE, E.STEP): (S.FREE, "drop stale"),
    (S.RUNNING, E.STEP): (S.RUNNING, "rules"),
    (S.RUNNING, E.ABORT): (S.FINISHED, "abort"),
    (S.RUNNING, E.PREEMPT): (S.PREEMPTED, "preempt"),
    (S.RUNNING, E.PREEMPT_DROP): (S.DROPPING, "preempt"),
    (S.RUNNING, E.REWIND): (S.RUNNING, "generation and computed"),
    (S.RUNNING, E.RELEASE): (S.FREE, "abort and clear"),
    (S.PREEMPTED, E.STEP): (S.PREEMPTED, "rules, computed stays 0"),
    (S.PREEMPTED, E.ABORT): (S.FINISHED, "abort"),
    (S.PREEMPTED, E.PREEMPT): (S.PREEMPTED, "nothing"),
    (S.PREEMPTED, E.PREEMPT_DROP): (S.DROPPING, "nothing"),
    (S.PREEMPTED, E.RESUME): (S.RUNNING, "generation and computed"),
    (S.PREEMPTED, E.RELEASE): (S.FREE, "abort and clear"),
    (S.DROPPING, E.STEP): (S.DROPPING, "drop preempted"),
    (S.DROPPING, E.ABORT): (S.FINISHED, "abort"),
    (S.DROPPING, E.PREEMPT): (S.PREEMPTED, "nothing"),
    (S.DROPPING, E.PREEMPT_DROP): (S.DROPPING, "nothing"),
    (S.DROPPING, E.RESUME): (S.RUNNING, "generation and computed"),
    (S.DROPPING, E.RELEASE): (S.FREE, "abort and clear"),
    (S.FINISHED, E.STEP): (S.FINISHED, "drop finished"),
    (S.FINISHED, E.ABORT): (S.FINISHED, "nothing"),
    (S.FINISHED, E.PREEMPT): (S.FINISHED, "nothing"),
    (S.FINISHED, E.PREEMPT_DROP): (S.FINISHED, "nothing"),
    (S.FINISHED, E.RESUME): (S.FINISHED, "generation"),
    (S.FINISHED, E.REWIND): (S.FINISHED, "generation"),
    (S.FINISHED, E.RELEASE): (S.FREE, "clear"),
}


class ReferenceRefused(Exception):
    """A caller's mistake, refused with nothing changed; `name` is the contract's error class."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


@dataclass(frozen=True)
class ReferenceParams:
    """The contract's defaults; any object with these attributes will do."""

    max_tokens: int | None = None
    min_tokens: int = 0
    eos_token_id: int | Sequence[int] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False


DEFAULT_PARAMS = ReferenceParams()


class Row(NamedTuple):
    """A handle."""

    index: int  # type: ignore[assignment]
    generation: int


@dataclass(frozen=True)
class ReferenceBatch:
    """Who takes part in a step; None where the default holds."""

    rows: tuple[Row, ...]
    num_scheduled_tokens: tuple[int, ...] | None
    num_draft_tokens: tuple[int, ...] | None


class Entry(NamedTuple):
    """The logprobs of one id: its rank, then the ids, itself in front, and the bits of their float32 as int32."""

    rank: int
    token_ids: tuple[int, ...]
    bits: tuple[int, ...]


class RequestLogprobs(NamedTuple):
    """What a delivery has for one request. `cumulative` as text, so that NaN is like NaN."""

    k: int
    entries: list[Entry]
    cumulative: str
    has_nan: bool


@dataclass(frozen=True)
class ReferenceOutputs:
    """One delivery; the four lists are parallel, `stop_reasons` as in the column (-1 for none)."""

    step: int
    request_ids: list[str]
    token_ids: list[list[int]]
    finish_reasons: list[int]
    stop_reasons: list[int]
    logprobs: list[RequestLogprobs | None] = field(default_factory=list)  # empty in a book without


@dataclass
class ReferenceSpecStats:
    """Counters of "Draft rounds"."""

    num_accepted_tokens_per_pos: list[int]
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted ids a round, told by what verification accepted."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass
class RowState:
    """One row: its columns, its line of both tables, and what no frame shows. A new one is a free row."""

    token_ids: list[int]
    is_token_ids: list[bool]
    generation: int = 0
    num_prompt_tokens: int = 0
    num_tokens_no_spec: int = 0
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_accepted_tokens: int = 0
    last_token_id: int = 0
    stop_reason: int = 0
    finish_reason: int = 0
    state: State = State.FREE  # as the book has it
    asked: State = State.FREE  # as the client has it: moved by calls only, never by a step
    admit_generation: int = 0
    remembered: int = 0  # how far `computed` had come, while preempted
    given: int | None = None  # how many drafts the last step's submit gave this row, None where the book took none
    verifies: int | None = None  # the same of the step before, while the next one is applied
    request_id: str = ""
    params: Any = DEFAULT_PARAMS
    undelivered: list[int] = field(default_factory=list)
    entries: list[Entry | None] = field(default_factory=list)  # an output each, None for those that came before the row
    undelivered_entries: list[Entry] = field(default_factory=list)
    cumulative: float = 0.0
    finish_delivered: bool = False
    stats: ReferenceSpecStats = field(default_factory=lambda: ReferenceSpecStats([]))


def verified_ids(ids: list[int]) -> list[int]:
    """The v ids of a row: those before the first -1."""
    return ids[: ids.index(-1)] if -1 in ids else ids


def stops(params: Any, token_id: int, outputs_before: int) -> bool:
    """Step, rule 3, first match: a stop or end-of-sequence id, once `min_tokens` outputs came before it."""
    eos = params.eos_token_id
    eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    named = token_id in list(params.stop_token_ids) or (token_id in eos_ids and not params.ignore_eos)
    return named and outputs_before >= params.min_tokens


def as_rows(samples: Any) -> list[list[int]]:
    """[n] or [n, w], lists or numpy, as n lists of Python ints."""
    rows = samples.tolist() if isinstance(samples, np.ndarray) else samples
    return [[row] if isinstance(row, int) else list(row) for row in rows]


def value_of(bits: int) -> float:
    """The float32 of these bits."""
    return float(np.array(bits, np.int32).view(np.float32))


def is_nan(entry: Entry) -> bool:
    """Whether one of its logprobs came as NaN; one that is missing did not come."""
    return any(token_id != -1 and np.isnan(value_of(bits)) for token_id, bits in zip(*entry[1:], strict=True))


def refuse_if(wrong: bool, name: str, message: str) -> None:
    """The client's refusals."""
    if wrong:
        raise ReferenceRefused(name, message)


class ReferenceBook:
    """docs/ledger.md, one call at a time. Keeps as many frames as the contract lets a reader hold."""

    def __init__(self, *, max_num_reqs: int, max_model_len: int, vocab_size: int, num_spec_tokens: int = 0,
                 max_in_flight: int = 2, max_logprobs: int | None = None) -> None:  # fmt: skip
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.num_spec_tokens = num_spec_tokens
        self.num_frames = max_in_flight + 2
        self.max_logprobs = max_logprobs
        self.step = 0
        self.dropped = dict.fromkeys(DROP_REASONS, 0)
        self.finished = dict.fromkeys(Finish, 0)
        self.num_admitted = self.num_released = 0
        self.num_submitted_tokens = self.num_committed_tokens = 0
        self.num_invalid_draft_tokens = 0
        self.num_nan_logprobs = self.num_missing_logprobs = 0
        self._rows = [self._free_row(0) for _ in range(max_num_reqs)]
        self._live: dict[str, int] = {}  # request_id -> index, while the id is taken
        self._stats = ReferenceSpecStats([0] * num_spec_tokens)
        self._queue: list[ReferenceOutputs] = []
        self._frames = {0: self._take_frame()}

    # Columns, tables, and what a row starts with

    def _free_row(self, generation: int) -> RowState:
        """A free row: zero everywhere but in `generation`."""
        return RowState([0] * self.max_model_len, [False] * self.max_model_len, generation=generation)

    def _take_frame(self) -> dict[str, npt.NDArray[Any]]:
        """All columns as they are now."""
        return {
            name: np.array([getattr(row, name) for row in self._rows], dtype=dtype) for name, dtype in COLUMNS.items()
        }

    def frame(self, step: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """All columns as of a step, by default the last one."""
        wanted = self.step if step is None else step
        refuse_if(wanted > self.step, "NotApplied", f"step {wanted}, applied {self.step}")
        refuse_if(wanted not in self._frames, "FrameExpired", f"step {wanted}, applied {self.step}")
        return self._frames[wanted]

    def token_ids(self, row: tuple[int, int]) -> list[int]:
        """Committed ids of a row as of the latest frame."""
        return self._committed(row).token_ids[: self.frame()["num_tokens_no_spec"][row[0]]]

    def _committed(self, row: tuple[int, int]) -> RowState:
        """The row, unless its admission came after the latest frame."""
        state = self._check_handle(row)
        is_shown = self.frame()["generation"][row[0]] >= state.admit_generation
        refuse_if(not is_shown, "NotApplied", f"row {row} was admitted since")
        return state

    def token_ids_table(self) -> npt.NDArray[np.int32]:
        """The table `token_ids` of this moment."""
        return np.array([row.token_ids for row in self._rows], dtype=np.int32)

    def is_token_ids_table(self) -> npt.NDArray[np.bool_]:
        """The table `is_token_ids` of this moment."""
        return np.array([row.is_token_ids for row in self._rows], dtype=np.bool_)

    def logprobs_table(self, row_size: int) -> npt.NDArray[np.int32]:
        """The table of entries of this moment, int32 [max_num_reqs, row_size]."""
        table = np.zeros((self.max_num_reqs, row_size), np.int32)
        for index, row in enumerate(self._rows):
            k = getattr(row.params, "logprobs", None)
            size = 0 if k is None else 1 + 2 * (1 + k)
            for output, entry in enumerate(row.entries):
                if entry is not None:
                    values = [entry.rank, *entry.token_ids, *entry.bits]
                    table[index, output * size : (output + 1) * size] = values
        return table

    def admit(self, request_id: str, prompt_token_ids: Sequence[int], params: Any = DEFAULT_PARAMS, *,
              output_token_ids: Sequence[int] = (), num_computed_tokens: int = 0,
              prompt_is_token_ids: Sequence[bool] | None = None) -> Row:  # fmt: skip
        """The refusals, then `admit`, then "Re-admission whose earlier outputs end the request"."""
        prompt, outputs = list(prompt_token_ids), list(output_token_ids)
        is_ids = [True] * len(prompt) if prompt_is_token_ids is None else list(prompt_is_token_ids)
        self._check_request(prompt, outputs, params, num_computed_tokens, is_ids)
        refuse_if(request_id in self._live, "DuplicateRequest", f"{request_id} is live")
        free = [index for index, row in enumerate(self._rows) if row.asked is State.FREE]
        refuse_if(not free, "BookFull", f"{self.max_num_reqs} rows are held")
        index = free[0]  # lowest index first
        row = self._rows[index]
        row.asked = LIFE[row.asked, Event.ADMIT][0]
        row.state = LIFE[row.state, Event.ADMIT][0]
        row.generation += 1
        row.admit_generation = row.generation
        everything = prompt + outputs
        row.token_ids[: len(everything)] = everything
        row.is_token_ids[: len(everything)] = is_ids + [True] * len(outputs)
        row.num_prompt_tokens = len(prompt)
        row.num_tokens = row.num_tokens_no_spec = len(everything)
        row.num_computed_tokens = num_computed_tokens
        row.num_output_tokens = len(outputs)
        row.last_token_id = everything[-1]
        row.stop_reason = NO_REASON
        row.request_id = request_id
        row.params = params
        row.entries = [None] * len(outputs)
        row.stats = ReferenceSpecStats([0] * self.num_spec_tokens)
        self._live[request_id] = index
        self.num_admitted += 1
        if outputs and stops(params, outputs[-1], len(outputs) - 1):
            self._finish(row, Finish.STOP, outputs[-1])
        elif outputs and len(everything) >= self.max_model_len:
            self._finish(row, Finish.LENGTH, NO_REASON)
        self._deliver([row])
        return Row(index, row.generation)

    def _check_request(self, prompt: list[int], outputs: list[int], params: Any, computed: int,
                       is_ids: list[bool]) -> None:  # fmt: skip
        """What the client refuses of a request, whatever the book holds. Of several mistakes the first is named."""
        limit = params.max_tokens
        total = len(prompt) + len(outputs)
        refuse_if(limit is not None and limit < 1, "InvalidRequest", f"max_tokens {limit}")
        refuse_if(params.min_tokens < 0, "InvalidRequest", f"min_tokens {params.min_tokens}")
        k, most = getattr(params, "logprobs", None), self.max_logprobs
        refuse_if(k is not None and (most is None or not 0 <= k <= most), "InvalidRequest", f"logprobs {k}")
        for token_id in prompt + outputs:
            refuse_if(not self._is_token(token_id), "InvalidToken", f"{token_id}")
        refuse_if(not prompt, "InvalidRequest", "an empty prompt")
        refuse_if(total > self.max_model_len, "PromptTooLong", f"{total} tokens, max_model_len {self.max_model_len}")
        refuse_if(limit is not None and len(outputs) >= limit, "InvalidRequest", f"outputs meet max_tokens {limit}")
        refuse_if(not 0 <= computed <= total, "InvalidRequest", f"num_computed_tokens {computed} of {total}")
        refuse_if(len(is_ids) != len(prompt), "InvalidRequest", "prompt_is_token_ids is not as long as the prompt")

    def _is_token(self, token_id: int) -> bool:
        """Neither below 0 nor at or above `vocab_size`."""
        return 0 <= token_id < self.vocab_size

    # A step, for each of its rows

    def batch(self, rows: Sequence[tuple[int, int]], *, num_scheduled_tokens: Sequence[int] | None = None,
              num_draft_tokens: Sequence[int] | None = None) -> ReferenceBatch:  # fmt: skip
        """Each row once and not stale; scheduled at least 1 and at least the drafts; drafts 0..num_spec_tokens."""
        handles: list[Row] = []
        for index, generation in rows:
            self._check_handle((index, generation))
            refuse_if((index, generation) in handles, "InvalidBatch", f"row {index} is in the batch twice")
            handles.append(Row(index, generation))
        drafts = None if num_draft_tokens is None else tuple(num_draft_tokens)
        scheduled = None if num_scheduled_tokens is None else tuple(num_scheduled_tokens)
        if drafts is not None:
            refuse_if(len(drafts) != len(handles), "InvalidBatch", "num_draft_tokens has another length")
            refuse_if(any(not 0 <= d <= self.num_spec_tokens for d in drafts), "InvalidBatch", f"drafts {drafts}")
        if scheduled is not None:
            refuse_if(len(scheduled) != len(handles), "InvalidBatch", "num_scheduled_tokens has another length")
            for count, d in zip(scheduled, drafts or [0] * len(handles), strict=True):
                refuse_if(not max(1, d) <= count <= MOST_INT32, "InvalidBatch", f"{count} scheduled with {d} drafts")
        return ReferenceBatch(tuple(handles), scheduled, drafts)

    def submit(self, batch: ReferenceBatch, sampled_token_ids: Any, *, logprobs: Any = None,
               draft_token_ids: Any = None) -> int:  # fmt: skip
        """A whole step: every row's drafts go, then the rows of the batch in order, then the frame and the outputs."""
        sampled = self._check_ids(batch, sampled_token_ids, 1 + self.num_spec_tokens)
        drafts: Sequence[list[int] | None] = [None] * len(batch.rows)
        if draft_token_ids is not None:
            drafts = self._check_ids(batch, draft_token_ids, self.num_spec_tokens)
        given = None if logprobs is None else self._check_logprobs(np.shape(sampled_token_ids), logprobs)
        self.step += 1
        for row in self._rows:
            self._drop_drafts(row)
            row.verifies, row.given = row.given, None
        for i, handle in enumerate(batch.rows):
            scheduled = None if batch.num_scheduled_tokens is None else batch.num_scheduled_tokens[i]
            d = 0 if batch.num_draft_tokens is None else batch.num_draft_tokens[i]
            self._step_row(handle, scheduled, d, verified_ids(sampled[i]), drafts[i], given[i] if given else [])
        self._frames[self.step] = self._take_frame()
        self._frames.pop(self.step - self.num_frames, None)
        self._deliver([self._rows[handle.index] for handle in batch.rows])
        return self.step

    def _check_ids(self, batch: ReferenceBatch, given: Any, most: int) -> list[list[int]]:
        """One row of ids for each row of the batch, none too long, no array without a column."""
        rows = as_rows(given)
        n = len(batch.rows)
        widths = [given.shape[1] if given.ndim == 2 else 1] if isinstance(given, np.ndarray) else [1]
        refuse_if(len(rows) != n, "InvalidBatch", f"{len(rows)} rows of ids for a batch of {n}")
        refuse_if(max([*widths, *map(len, rows)]) > most or 0 in widths, "InvalidBatch", f"not 1 to {most} ids a row")
        return rows

    def _check_logprobs(self, shape: tuple[int, ...], logprobs: Any) -> list[list[Entry]]:
        """For each row an entry for each of its ids. `shape` of the ids, [n] or [n, w]."""
        refuse_if(self.max_logprobs is None, "InvalidBatch", "logprobs for a book without")
        token_ids, values, ranks = logprobs
        shapes = [shape, (shape[0], 1), (shape[0],)] if len(shape) == 1 or shape[1] == 1 else [shape]
        good = ranks.shape in shapes and token_ids.shape[:-1] in shapes and values.shape[:-1] in shapes
        given = token_ids.shape[-1]
        good = good and values.shape[-1] == given and 1 <= given <= 1 + (self.max_logprobs or 0)
        good = good and values.dtype == np.float32 and {token_ids.dtype.kind, ranks.dtype.kind} == {"i"}
        refuse_if(not good, "InvalidBatch", f"logprobs of shapes {[array.shape for array in logprobs]}")
        n, w = shape if len(shape) == 2 else (*shape, 1)
        bits = np.ascontiguousarray(values).view(np.int32).reshape(n, w, given).tolist()
        ids, ranks_of = token_ids.reshape(n, w, given).tolist(), ranks.reshape(n, w).tolist()
        return [
            [Entry(ranks_of[i][j], tuple(ids[i][j]), tuple(bits[i][j])) for j in range(w)]
            for i in range(n)
        ]  # fmt: skip

    def _drop_drafts(self, row: RowState) -> None:
        """Both tables are zero past `num_tokens_no_spec`, and `num_tokens` says so."""
        for position in range(row.num_tokens_no_spec, row.num_tokens):
            row.token_ids[position] = 0
            row.is_token_ids[position] = False
        row.num_tokens = row.num_tokens_no_spec

    def _step_row(self, handle: Row, scheduled: int | None, d: int, ids: list[int], new_drafts: list[int] | None,
                  given: list[Entry]) -> None:  # fmt: skip
        """Rules 1 to 5 for one row of the step; `ids` are the v."""
        row = self._rows[handle.index]
        v = len(ids)
        self.num_submitted_tokens += v
        # Rule 1
        effect = LIFE[row.state, Event.STEP][1]
        if handle.generation != row.generation:
            effect = "drop stale"
        if effect.startswith("drop "):
            self.dropped[effect.removeprefix("drop ")] += v
            return
        # Rule 2, and "Partial prefill in flight over a preemption"
        preempted = effect == "rules, computed stays 0"
        computed = row.remembered if preempted else row.num_computed_tokens
        if scheduled is None:
            scheduled = max(0, row.num_tokens_no_spec - computed) + d
        row.num_accepted_tokens = 0
        if computed + scheduled < row.num_tokens_no_spec:
            self._set_computed(row, computed + scheduled, preempted)
            self.dropped["partial_prefill"] += v
            return
        if not preempted and computed + scheduled > row.num_tokens_no_spec + d:
            self._finish(row, Finish.ERROR, NO_REASON)
            self.dropped["overscheduled"] += v
            return
        # Rule 3, with "v = 0"
        m = self._take_ids(row, ids)
        for index, token_id in enumerate(ids[:m]):
            self._keep_logprobs(row, token_id, given[index] if given else None)
        self._set_computed(row, max(0, computed + scheduled - (d + 1 - m)), preempted)
        # Rule 4
        if d > 0 and v > 0:
            row.num_accepted_tokens = v - 1
            self._count_round(row, d if row.verifies is None else min(d, row.verifies), v, m)
        # Rule 5
        if row.state is State.RUNNING and new_drafts is not None:
            self._write_drafts(row, new_drafts)

    def _set_computed(self, row: RowState, value: int, preempted: bool) -> None:
        """A preempted row keeps 0 in the column; what it would be is remembered."""
        if preempted:
            row.remembered = value
        else:
            row.num_computed_tokens = value

    def _take_ids(self, row: RowState, ids: list[int]) -> int:
        """Rule 3: the v ids one at a time. Returns m."""
        m = 0
        for token_id in ids:
            if row.state is State.FINISHED:
                self.dropped["after_finish"] += 1
            elif not self._is_token(token_id):
                self.dropped["invalid"] += 1
                self._finish(row, Finish.ERROR, token_id if LEAST_INT32 <= token_id <= MOST_INT32 else LEAST_INT32)
            else:
                self._append(row, token_id)
                m += 1
        self.num_committed_tokens += m
        return m

    def _append(self, row: RowState, token_id: int) -> None:
        """Rule 3 for one good id: append (a full row keeps its table as it is), then look for an end."""
        if row.num_tokens_no_spec < self.max_model_len:
            row.token_ids[row.num_tokens_no_spec] = token_id
            row.is_token_ids[row.num_tokens_no_spec] = True
            row.num_tokens_no_spec += 1
            row.num_tokens += 1
        row.num_output_tokens += 1
        row.last_token_id = token_id
        row.undelivered.append(token_id)
        limit = row.params.max_tokens
        long_enough = limit is not None and row.num_output_tokens >= limit
        if stops(row.params, token_id, row.num_output_tokens - 1):
            self._finish(row, Finish.STOP, token_id)
        elif long_enough or row.num_tokens_no_spec >= self.max_model_len:
            self._finish(row, Finish.LENGTH, NO_REASON)

    def _keep_logprobs(self, row: RowState, token_id: int, given: Entry | None) -> None:
        """Logprobs: as many as the request asks for of what came for this id, the rest is missing."""
        k = getattr(row.params, "logprobs", None)
        if k is None:
            return
        if given is None or given.token_ids[0] != token_id:
            given = Entry(0, (), ())
        token_ids, bits = given.token_ids[: 1 + k], given.bits[: 1 + k]
        num_missing = 1 + k - len(token_ids)
        entry = Entry(given.rank, token_ids + (-1,) * num_missing, bits + (NAN_BITS,) * num_missing)
        self.num_missing_logprobs += num_missing > 0
        self.num_nan_logprobs += is_nan(entry)
        row.entries.append(entry)
        row.undelivered_entries.append(entry)
        row.cumulative += value_of(entry.bits[0])

    def _finish(self, row: RowState, reason: Finish, stop_reason: int) -> None:
        """The request ends."""
        self._drop_drafts(row)
        row.state = State.FINISHED
        row.finish_reason, row.stop_reason = reason, stop_reason
        self.finished[reason] += 1

    def _count_round(self, row: RowState, n: int, v: int, m: int) -> None:
        """Draft rounds: for the book and for the request."""
        if n == 0:
            return
        for stats in (self._stats, row.stats):
            stats.num_drafts += 1
            stats.num_draft_tokens += n
            stats.num_accepted_tokens += v - 1
            stats.num_emitted_tokens += m
            for position in range(v - 1):
                stats.num_accepted_tokens_per_pos[position] += 1

    def _write_drafts(self, row: RowState, new_drafts: list[int]) -> None:
        """Rule 5: the ids before the first that is none, as many as have room, behind the committed ones."""
        good = 0
        while good < len(new_drafts) and self._is_token(new_drafts[good]):
            good += 1
        if good < len(new_drafts) and new_drafts[good] != -1:
            self.num_invalid_draft_tokens += 1
        row.given = good
        for token_id in new_drafts[: min(good, self.max_model_len - row.num_tokens_no_spec)]:
            row.token_ids[row.num_tokens] = token_id
            row.is_token_ids[row.num_tokens] = True
            row.num_tokens += 1

    # The life of a row

    def abort(self, row: tuple[int, int]) -> None:
        """FINISHED with ABORT, delivered at once; the request_id is free."""
        self._event(row, Event.ABORT)

    def preempt(self, row: tuple[int, int], *, drop_in_flight: bool = False) -> None:
        """`computed` is 0 and the drafts are gone; ids in flight are delivered or dropped."""
        self._event(row, Event.PREEMPT_DROP if drop_in_flight else Event.PREEMPT)

    def resume(self, row: tuple[int, int], *, num_computed_tokens: int = 0) -> Row:
        """RUNNING under a new generation, `computed` as given."""
        return self._event(row, Event.RESUME, num_computed_tokens)

    def rewind(self, row: tuple[int, int], num_computed_tokens: int) -> Row:
        """`computed` as given, under a new generation."""
        return self._event(row, Event.REWIND, num_computed_tokens)

    def release(self, row: tuple[int, int]) -> None:
        """FREE, aborted first where it had not finished; row and request_id are free."""
        self._event(row, Event.RELEASE)

    def _check_handle(self, handle: tuple[int, int]) -> RowState:
        """The row that a handle names, unless it is stale."""
        index, generation = handle
        refuse_if(not 0 <= index < self.max_num_reqs, "StaleRow", f"no row {index}")
        row = self._rows[index]
        refuse_if(row.asked is State.FREE or row.generation != generation, "StaleRow", f"row {index}, {generation}")
        return row

    def _event(self, handle: tuple[int, int], event: Event, computed: int = 0) -> Row:
        """One call on a row: refused by what the client asked for before, then done to what the book has."""
        row = self._check_handle(handle)
        refuse_if((row.asked, event) not in LIFE, "InvalidRequest", f"{event.name} of a {row.asked.name} row")
        refuse_if(not 0 <= computed <= self.max_model_len, "InvalidRequest", f"num_computed_tokens {computed}")
        row.asked = LIFE[row.asked, event][0]
        if event in (Event.ABORT, Event.RELEASE) and self._live.get(row.request_id) == handle[0]:
            del self._live[row.request_id]
        row.state, effect = LIFE[row.state, event]
        if effect in ("abort", "abort and clear"):
            self._finish(row, Finish.ABORT, NO_REASON)
            self._deliver([row])
        if effect in ("abort and clear", "clear"):
            row = self._rows[handle[0]] = self._free_row(row.generation)
            self.num_released += 1
        if effect == "preempt":
            row.remembered = row.num_computed_tokens
            row.num_computed_tokens = 0
            self._drop_drafts(row)
        if effect in ("generation", "generation and computed"):
            row.generation += 1
        if effect == "generation and computed":
            row.num_computed_tokens = computed
        return Row(handle[0], row.generation)

    @property
    def num_rows_free(self) -> int:
        """Rows that admit can give out."""
        return sum(row.asked is State.FREE for row in self._rows)

    @property
    def num_rows_held(self) -> int:
        """Rows given out and not released."""
        return self.max_num_reqs - self.num_rows_free

    # Outputs

    def _deliver(self, rows: list[RowState]) -> None:
        """One delivery of what is new in these rows, in their order; none where nothing is."""
        news = ReferenceOutputs(self.step, [], [], [], [])
        for row in rows:
            ends_now = row.finish_reason != Finish.NONE and not row.finish_delivered
            if not row.undelivered and not ends_now:
                continue
            news.request_ids.append(row.request_id)
            news.token_ids.append(row.undelivered)
            news.finish_reasons.append(int(row.finish_reason))
            news.stop_reasons.append(row.stop_reason)
            if self.max_logprobs is not None:
                news.logprobs.append(self._logprobs_of(row))
            row.undelivered, row.undelivered_entries = [], []
            row.finish_delivered = ends_now
        if news.request_ids:
            self._queue.append(news)

    def _logprobs_of(self, row: RowState) -> RequestLogprobs | None:
        """What a delivery has for a row; `cumulative` includes what it delivers."""
        k = getattr(row.params, "logprobs", None)
        if k is None:
            return None
        entries = row.undelivered_entries
        return RequestLogprobs(k, entries, repr(row.cumulative), any(map(is_nan, entries)))

    def poll_outputs(self) -> list[ReferenceOutputs]:
        """The deliveries since the last poll, one a step and one for each end that needed no step."""
        deliveries, self._queue = self._queue, []
        return deliveries

    def spec_decode_stats(self, row: tuple[int, int] | None = None) -> ReferenceSpecStats:
        """Draft rounds of the whole book, or of the request in a row."""
        stats = self._stats if row is None else self._committed(row).stats
        return replace(stats, num_accepted_tokens_per_pos=list(stats.num_accepted_tokens_per_pos))
