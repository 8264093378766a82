"""Random calls. Hypothesis and the seeded driver make the same ones; only where the choices come from differs.

Every operation takes a trio and a source of choices, and makes one call or a few. Sizes are tiny, so that ids, rows,
request ids, lengths and stops collide all the time; most calls are right, some are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from asyncbook import BookConfig, Logprobs, RequestParams, Row
from tests.property.compare import Refused
from tests.property.trio import Trio, TrioBatch
from tests.reference import RowState, State

T = TypeVar("T")
BAD_INT32 = (-2, -5, 2**31 - 1, -(2**31))
BAD_INT64 = (*BAD_INT32, 2**31, 2**40, -(2**31) - 1, -(2**40))

CONFIGS = {
    "many in flight": BookConfig(
        max_num_reqs=4, max_model_len=8, vocab_size=5, num_spec_tokens=2, max_in_flight=8, max_logprobs=2
    ),
    "ring": BookConfig(
        max_num_reqs=4,
        max_model_len=8,
        vocab_size=5,
        num_spec_tokens=2,
        max_in_flight=3,
        max_logprobs=3,
        transport="ring",
    ),
    "no drafts": BookConfig(max_num_reqs=3, max_model_len=6, vocab_size=4),
    # More rows than a cache line of a column has, few of them in a step: frames are copied row by row.
    "many rows": BookConfig(
        max_num_reqs=70, max_model_len=18, vocab_size=6, num_spec_tokens=3, max_in_flight=1, max_logprobs=1
    ),
    "least": BookConfig(
        max_num_reqs=1,
        max_model_len=1,
        vocab_size=1,
        num_spec_tokens=1,
        max_in_flight=1,
        max_logprobs=0,
        transport="ring",
    ),
}


class Choices(Protocol):
    """Where choices come from."""

    def integer(self, least: int, most: int) -> int:
        """From `least` to `most`, both included."""


def once_in(choices: Choices, n: int) -> bool:
    """True once in n times."""
    return choices.integer(1, n) == n


def pick(choices: Choices, items: Sequence[T]) -> T:
    """One of them."""
    return items[choices.integer(0, len(items) - 1)]


def any_row(trio: Trio, choices: Choices) -> Row:
    """Mostly a live handle, sometimes a stale one or one that never was."""
    held = trio.held()
    if held and not once_in(choices, 6):
        return pick(choices, held)
    if trio.handles and not once_in(choices, 4):
        return pick(choices, trio.handles)
    return Row(choices.integer(-1, trio.config.max_num_reqs), choices.integer(0, 3))


def one_of(trio: Trio, choices: Choices, *states: State) -> Row:
    """Mostly a handle of a row in one of these states, else any."""
    rows = [row for row in trio.held() if trio.reference._rows[row.index].state in states]
    return pick(choices, rows) if rows and not once_in(choices, 4) else any_row(trio, choices)


def state_of(trio: Trio, row: Row) -> RowState | None:
    """What the reference knows of the row of a handle."""
    return trio.reference._rows[row.index] if 0 <= row.index < trio.config.max_num_reqs else None


# Admission


def admit(trio: Trio, choices: Choices) -> None:
    """A request, now and then with a mistake; earlier outputs and whatever ends it are likely."""
    config = trio.config
    prompt = _token_ids(trio, choices, 1 if not once_in(choices, 20) else 0)
    outputs = _token_ids(trio, choices, 0) if once_in(choices, 3) else []
    if not once_in(choices, 20):  # else too long perhaps
        outputs = outputs[: max(0, config.max_model_len - len(prompt))]
        prompt = prompt[: config.max_model_len]
    total = len(prompt) + len(outputs)
    options: dict[str, object] = {}
    if outputs:
        options["output_token_ids"] = outputs
    if once_in(choices, 3):
        options["num_computed_tokens"] = choices.integer(0, total) if not once_in(choices, 9) else total + 1
    if once_in(choices, 4):
        mask = [choices.integer(0, 1) == 1 for _ in prompt]
        options["prompt_is_token_ids"] = mask if not once_in(choices, 9) else [*mask, True]
    trio.admit(_request_id(trio, choices), prompt, _params(trio, choices), **options)


def _request_id(trio: Trio, choices: Choices) -> str:
    return f"request-{choices.integer(0, trio.config.max_num_reqs + 1)}"


def _token_ids(trio: Trio, choices: Choices, least: int) -> list[int]:
    """Tokens that leave room most of the time, all of them of the vocabulary most of the time."""
    config = trio.config
    most = config.max_model_len + 1 if once_in(choices, 4) else max(1, config.max_model_len // 2)
    ids = [choices.integer(0, config.vocab_size - 1) for _ in range(choices.integer(least, most))]
    if ids and once_in(choices, 25):
        ids[choices.integer(0, len(ids) - 1)] = pick(choices, (-1, config.vocab_size, 2**31, -(2**40)))
    return ids


def _params(trio: Trio, choices: Choices) -> RequestParams:
    def some_ids(most: int) -> tuple[int, ...]:
        # One above the vocabulary: a stop id may be one that can never come.
        return tuple(choices.integer(0, trio.config.vocab_size) for _ in range(choices.integer(0, most)))

    return RequestParams(
        max_tokens=None if choices.integer(0, 1) else choices.integer(0 if once_in(choices, 9) else 1, 6),
        min_tokens=choices.integer(0, 4) - once_in(choices, 20) if once_in(choices, 3) else 0,
        eos_token_id=pick(choices, (None, 0, some_ids(2))),
        stop_token_ids=some_ids(6) if once_in(choices, 12) else some_ids(1),
        ignore_eos=once_in(choices, 3),
        logprobs=_num_logprobs(trio, choices),
    )


def _num_logprobs(trio: Trio, choices: Choices) -> int | None:
    most = trio.config.max_logprobs
    if most is None:
        return 0 if once_in(choices, 60) else None
    return None if once_in(choices, 3) else choices.integer(0, most + once_in(choices, 30)) - once_in(choices, 60)


# Steps


def submit_new(trio: Trio, choices: Choices) -> None:
    """A new batch and its step."""
    batch = make_batch(trio, choices)
    if not isinstance(batch, Refused):
        _submit(trio, choices, batch)


def submit_kept(trio: Trio, choices: Choices) -> None:
    """A batch that was made before, with handles that went stale since."""
    if trio.batches:
        _submit(trio, choices, pick(choices, trio.batches))


def make_batch(trio: Trio, choices: Choices) -> TrioBatch | Refused:
    """Rows in any order, some of them stale or twice; scheduled as is right, or not."""
    config = trio.config
    rows = trio.held()
    if not once_in(choices, 4):
        rows = [row for row in rows if trio.reference._rows[row.index].state is not State.FINISHED]
    for i in range(len(rows) - 1, 0, -1):  # a shuffle
        j = choices.integer(0, i)
        rows[i], rows[j] = rows[j], rows[i]
    rows = rows[choices.integer(0, len(rows)) if once_in(choices, 3) else 0 :]
    rows = rows[:8] if len(rows) > 8 and not once_in(choices, 10) else rows
    if once_in(choices, 12):
        rows.insert(choices.integer(0, len(rows)), any_row(trio, choices))
    drafts = scheduled = None
    if choices.integer(0, 1):
        most = config.num_spec_tokens + once_in(choices, 30)
        drafts = [choices.integer(-1 if once_in(choices, 90) else 0, most) for _ in rows]
    if choices.integer(0, 1):
        scheduled = [_scheduled(trio, choices, row, drafts[i] if drafts else 0) for i, row in enumerate(rows)]
    if drafts and once_in(choices, 40):
        drafts.pop()
    return trio.batch(rows, num_scheduled_tokens=scheduled, num_draft_tokens=drafts)


def _scheduled(trio: Trio, choices: Choices, row: Row, d: int) -> int:
    """What is left of the row and its drafts, a part of it, one too many, or anything."""
    state = state_of(trio, row)
    left = 1 if state is None else state.num_tokens_no_spec - max(state.num_computed_tokens, state.remembered)
    kind = choices.integer(0, 24)
    count = left + d
    if kind >= 12:
        count = choices.integer(1, max(1, left))
    if kind >= 20:
        count = choices.integer(1, 4)
    if kind >= 23:
        count = left + d + 1
    if once_in(choices, 60):
        return pick(choices, (-1, 0, d - 1, 2**31 - 1, 2**31))
    return max(1, d, count)


def _submit(trio: Trio, choices: Choices, batch: TrioBatch) -> None:
    config = trio.config
    n = len(batch.rows)
    if once_in(choices, 40):
        n = max(0, n + pick(choices, (-1, 1)))
    sampled = _ids(trio, choices, n, 1 + config.num_spec_tokens + once_in(choices, 60))
    drafts = None
    if once_in(choices, 2) and (config.num_spec_tokens or once_in(choices, 20)):
        drafts = _ids(trio, choices, len(batch.rows), max(1, config.num_spec_tokens) + once_in(choices, 60))
    trio.submit(batch, sampled, drafts, _logprobs(trio, choices, sampled))


def _ids(trio: Trio, choices: Choices, n: int, most_width: int) -> np.ndarray:
    """Ragged ids: int32 or int64, [n] or [n, w], in C or Fortran order, with what lies behind padding left as it is."""
    vocab_size = trio.config.vocab_size
    is_wide = once_in(choices, 3)
    width = choices.integer(1, most_width)
    ids = np.full((n, width), -1, np.int64 if is_wide else np.int32)
    is_full = choices.integer(0, 1) == 1
    for i in range(n):
        for j in range(width if is_full else choices.integer(0, width)):
            ids[i, j] = choices.integer(0, vocab_size - 1)
        if once_in(choices, 12):
            bad = (vocab_size, -1, *(BAD_INT64 if is_wide else BAD_INT32))
            ids[i, choices.integer(0, width - 1)] = pick(choices, bad)
    if width == 1 and once_in(choices, 2):
        return ids[:, 0].copy()
    return np.asfortranarray(ids) if once_in(choices, 4) else ids


# What is in a float comes out as it went in: the sign of 0, the bits of a NaN.
LOGPROB_BITS = (0x7FC00001, 0x7F800001, -0x400000, -0x800000, -0x80000000)
LOGPROBS = np.concatenate(
    [np.array(LOGPROB_BITS, np.int32).view(np.float32), np.array([0.0, -0.5, -1.25, -1e-42, -3e38, 1.5], np.float32)]
)


def _logprobs(trio: Trio, choices: Choices, sampled: np.ndarray) -> Logprobs | None:
    """Mostly as many as the book holds, now and then fewer, none, of another id, or of a wrong shape or dtype."""
    most = trio.config.max_logprobs
    if (most is None and not once_in(choices, 60)) or once_in(choices, 8):
        return None
    most = 1 + (most or 0)
    given = choices.integer(1, most + once_in(choices, 60)) if once_in(choices, 4) else most
    random = np.random.default_rng(choices.integer(0, 1 << 20))
    token_ids = random.integers(0, trio.config.vocab_size, (*sampled.shape, given)).astype(sampled.dtype)
    token_ids[..., 0] = sampled
    if once_in(choices, 8):
        wrong = random.integers(0, 4, sampled.shape) == 0
        token_ids[..., 0] += wrong  # of another id
    values = random.choice(LOGPROBS, token_ids.shape) if once_in(choices, 3) else random.normal(-2, 1, token_ids.shape)
    arrays = [token_ids, values.astype(np.float32), random.integers(1, 9, sampled.shape).astype(np.int32)]
    if sampled.ndim == 1 and once_in(choices, 3):
        arrays = [arrays[0][:, None], arrays[1][:, None], arrays[2][:, None]]
    if once_in(choices, 40):
        which = choices.integer(0, 2)
        arrays[which] = pick(
            choices, (arrays[which][..., None], np.zeros(arrays[which].shape, np.float64), arrays[which][1:])
        )
    if once_in(choices, 4):
        arrays = [np.asfortranarray(array) for array in arrays]
    return Logprobs(*arrays)


# The life of a row


def abort(trio: Trio, choices: Choices) -> None:
    trio.abort(any_row(trio, choices))


def preempt(trio: Trio, choices: Choices) -> None:
    trio.preempt(any_row(trio, choices), drop_in_flight=once_in(choices, 2))


def _computed(trio: Trio, choices: Choices, row: Row) -> int:
    """What the row holds or less, sometimes more than that, rarely out of range."""
    state = state_of(trio, row)
    if once_in(choices, 12):
        return choices.integer(-1, trio.config.max_model_len + 1)
    return choices.integer(0, 0 if state is None else state.num_tokens_no_spec)


def resume(trio: Trio, choices: Choices) -> None:
    row = one_of(trio, choices, State.PREEMPTED, State.DROPPING)
    trio.resume(row, _computed(trio, choices, row))


def rewind(trio: Trio, choices: Choices) -> None:
    row = any_row(trio, choices)
    trio.rewind(row, _computed(trio, choices, row))


def release(trio: Trio, choices: Choices) -> None:
    trio.release(one_of(trio, choices, State.FINISHED))


# Reading, and the sidecar's pace


def read(trio: Trio, choices: Choices) -> None:
    trio.read(any_row(trio, choices))


def hold_frame(trio: Trio, choices: Choices) -> None:
    trio.hold_frame(choices.integer(-1, trio.config.max_in_flight + 2))


def pause(trio: Trio, choices: Choices) -> None:
    trio.pause()


def settle(trio: Trio, choices: Choices) -> None:
    trio.settle()


Operation = Callable[[Trio, Choices], None]
OPERATIONS: dict[Operation, int] = {  # and how often each is called
    admit: 22,
    submit_new: 24,
    submit_kept: 18,
    abort: 3,
    preempt: 5,
    resume: 6,
    rewind: 3,
    release: 14,
    read: 2,
    hold_frame: 2,
    pause: 1,
    settle: 3,
}


class SeededChoices:
    """Choices of a numpy generator, drawn in blocks."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._block: list[int] = []

    def integer(self, least: int, most: int) -> int:
        if not self._block:
            self._block = self._generator.integers(0, 1 << 62, 4096).tolist()
        return least + self._block.pop() % (most - least + 1)


def drive(
    trio: Trio,
    seed: int,
    num_calls: int,
    calls_an_episode: int = 300,
    operations: dict[Operation, int] = OPERATIONS,
) -> None:
    """Random calls until there were as many, the trio emptied after every episode. A failure tells the seed and the
    episode's calls."""
    weighted = [operation for operation, weight in operations.items() for _ in range(weight)]
    choices = SeededChoices(seed)
    end = trio.num_calls + num_calls
    episode = 0
    while trio.num_calls < end:
        episode += 1
        episode_end = trio.num_calls + calls_an_episode
        try:
            while trio.num_calls < episode_end:
                pick(choices, weighted)(trio, choices)
            trio.empty()
        except Exception as error:
            error.add_note(f"seed {seed}, episode {episode}, {trio.config}:\n{trio.script()}")
            raise
