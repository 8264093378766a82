"""What two books show, compared to the last byte. `what` names the book in a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncbook import Book, ContractError, Frame, SpecDecodeStats, StepOutputs
from tests.reference import COLUMNS, Finish, ReferenceBook, ReferenceOutputs, ReferenceRefused, ReferenceSpecStats

Tables = tuple[np.ndarray, np.ndarray]


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
    )


def assert_frame(frame: Frame, expected: dict[str, np.ndarray], what: str) -> None:
    """Every column."""
    for name, column in expected.items():
        shown = getattr(frame, name)
        assert shown.dtype == COLUMNS[name]
        assert not shown.flags.writeable
        if shown.tobytes() != column.tobytes():
            raise AssertionError(f"{what}, frame of step {frame.step}, {name}: {shown} is not {column}")


def padded_tables(book: Book) -> Tables:
    """Both tables with the padding behind `max_model_len`, where nothing may ever be written."""
    layout, memory = book.config.layout, book._segment.readable()
    return layout.token_ids.view(memory), layout.is_token_ids.view(memory)


def assert_tables(tables: Tables, reference: ReferenceBook, what: str) -> None:
    """Both tables whole, also what no column shows."""
    length = reference.max_model_len
    expected_tables = (reference.token_ids_table(), reference.is_token_ids_table())
    for name, shown, expected in zip(("token_ids", "is_token_ids"), tables, expected_tables, strict=True):
        if shown[:, :length].tobytes() != expected.tobytes():
            raise AssertionError(f"{what}, {name}: {shown[:, :length]} is not {expected}")
        assert not shown[:, length:].any(), f"{what}, {name} behind max_model_len"


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
        stats.invalid_draft_tokens, stats.num_rows_held, stats.admitted_requests, stats.released_requests,
        stats.outputs_dropped_requests, stats.replayed_messages, stats.stale_messages, stats.bad_messages,
    )  # fmt: skip
    expected = (
        reference.step, reference.step, reference.num_submitted_tokens, reference.num_committed_tokens,
        reference.num_invalid_draft_tokens, reference.num_rows_held, reference.num_admitted, reference.num_released,
        0, 0, 0, 0,
    )  # fmt: skip
    assert shown == expected, what
    assert_rounds(book.spec_decode_stats(), reference.spec_decode_stats(), what)


def assert_rounds(shown: SpecDecodeStats, expected: ReferenceSpecStats, what: str) -> None:
    """Counts of draft rounds."""
    for name in (*vars(expected), "mean_acceptance_length"):
        assert getattr(shown, name) == getattr(expected, name), f"{what}, {name}"
