"""What two books show, compared to the last byte. `what` names the book in a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncbook import Book, ContractError, Frame, OutputLogprobs, SpecDecodeStats, StepOutputs
from tests.reference import (
    COLUMNS,
    Entry,
    Finish,
    ReferenceBook,
    ReferenceOutputs,
    ReferenceRefused,
    ReferenceSpecStats,
    RequestLogprobs,
)

Tables = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Refused:
    """The answer of a call that was refused: the name of its error."""

    name: str


def answer(call: Any, *args: Any, **kwargs: Any) -> Any:
    """What the call returns, or `Refused`."""
    try:
        return call(*args, **kwargs)
    except ReferenceRefused as error:
        return Refused(error.name)
    except ContractError as error:
        return Refused(type(error).__name__)


def plain(outputs: StepOutputs) -> ReferenceOutputs:
    """A delivery as the reference tells it."""
    n = len(outputs.request_ids)
    ends = outputs.offsets.tolist()
    assert outputs.offsets.dtype == outputs.token_ids.dtype == outputs.stop_reasons.dtype == np.int32
    assert outputs.finish_reasons.dtype == np.uint8
    assert len(ends) == n + 1
    assert (ends[0], ends[-1]) == (0, outputs.token_ids.size)
    return ReferenceOutputs(
        outputs.step,
        outputs.request_ids,
        [outputs.token_ids[ends[i] : ends[i + 1]].tolist() for i in range(n)],
        outputs.finish_reasons.tolist(),
        outputs.stop_reasons.tolist(),
        [] if outputs.logprobs is None else [plain_logprobs(outputs.logprobs, i) for i in range(n)],
    )


def plain_logprobs(logprobs: OutputLogprobs, i: int) -> RequestLogprobs | None:
    """Request i's as the reference tells it."""
    assert logprobs.token_ids.dtype == logprobs.ranks.dtype == logprobs.num_logprobs.dtype == np.int32
    assert (logprobs.logprobs.dtype, logprobs.cumulative.dtype, logprobs.has_nan.dtype) == (
        np.float32,
        np.float64,
        bool,
    )
    assert logprobs.ranks.size == logprobs.offsets[-1]
    assert logprobs.token_ids.size == logprobs.logprobs.size == logprobs.values_offsets[-1]
    k, cumulative = int(logprobs.num_logprobs[i]), repr(float(logprobs.cumulative[i]))
    token_ids, values, ranks = logprobs.arrays_of(i)
    if k < 0:
        assert cumulative == "nan"
        assert not logprobs.has_nan[i]
        assert not ranks.any()
        assert token_ids.size == values.size == 0
        return None
    bits = values.view(np.int32).tolist()
    entries = [
        Entry(*one) for one in zip(ranks.tolist(), map(tuple, token_ids.tolist()), map(tuple, bits), strict=True)
    ]
    return RequestLogprobs(k, entries, cumulative, bool(logprobs.has_nan[i]))


def assert_frame(frame: Frame, expected: dict[str, np.ndarray], what: str) -> None:
    """Every column."""
    for name, column in expected.items():
        shown = getattr(frame, name)
        assert shown.dtype == COLUMNS[name]
        assert not shown.flags.writeable
        if shown.tobytes() != column.tobytes():
            raise AssertionError(f"{what}, frame of step {frame.step}, {name}: {shown} is not {column}")


def padded_tables(book: Book) -> Tables:
    """The tables with the padding behind `max_model_len`, where nothing may ever be written; logprobs are the third."""
    layout, memory = book.config.layout, book._segment.readable()
    return layout.token_ids.view(memory), layout.is_token_ids.view(memory), layout.logprobs.view(memory)


def assert_tables(tables: Tables, reference: ReferenceBook, what: str) -> None:
    """Both tables whole, also what no column shows."""
    length = reference.max_model_len
    expected_tables = (reference.token_ids_table(), reference.is_token_ids_table())
    for name, shown, expected in zip(("token_ids", "is_token_ids"), tables[:2], expected_tables, strict=True):
        if shown[:, :length].tobytes() != expected.tobytes():
            raise AssertionError(f"{what}, {name}: {shown[:, :length]} is not {expected}")
        assert not shown[:, length:].any(), f"{what}, {name} behind max_model_len"
    logprobs, expected = tables[2], reference.logprobs_table(tables[2].shape[1])
    if logprobs.tobytes() != expected.tobytes():
        raise AssertionError(f"{what}, logprobs: {logprobs} is not {expected}")


def assert_counters(book: Book, reference: ReferenceBook, what: str) -> None:
    """Every counter that the reference has, and that nothing vanished."""
    stats = book.stats()
    assert stats.submitted_tokens == stats.committed_tokens + sum(stats.dropped_tokens.values()), what
    assert stats.num_rows_free + stats.num_rows_held == reference.max_num_reqs, what
    assert stats.dropped_tokens == reference.dropped, what
    finished = {Finish(reason): count for reason, count in stats.finished_requests.items()}
    assert finished == {reason: count for reason, count in reference.finished.items() if reason}, what
    shown = (
        stats.submitted_steps, stats.applied_steps, stats.submitted_tokens, stats.committed_tokens,
        stats.invalid_draft_tokens, stats.nan_logprobs, stats.missing_logprobs, stats.num_rows_held,
        stats.admitted_requests, stats.released_requests,
        stats.outputs_dropped_requests, stats.replayed_messages, stats.stale_messages, stats.bad_messages,
    )  # fmt: skip
    expected = (
        reference.step, reference.step, reference.num_submitted_tokens, reference.num_committed_tokens,
        reference.num_invalid_draft_tokens, reference.num_nan_logprobs, reference.num_missing_logprobs,
        reference.num_rows_held, reference.num_admitted, reference.num_released,
        0, 0, 0, 0,
    )  # fmt: skip
    assert shown == expected, what
    assert_rounds(book.spec_decode_stats(), reference.spec_decode_stats(), what)


def assert_rounds(shown: SpecDecodeStats, expected: ReferenceSpecStats, what: str) -> None:
    """Counts of draft rounds."""
    for name in (*vars(expected), "mean_acceptance_length"):
        assert getattr(shown, name) == getattr(expected, name), f"{what}, {name}"
