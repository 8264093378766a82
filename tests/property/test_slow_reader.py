"""Random calls while nobody takes the outputs: they come in bigger pieces, and never with a gap."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import pytest

import asyncbook.embedded
from asyncbook import Book, RequestParams
from tests.property.compare import plain
from tests.property.operations import CONFIGS, drive
from tests.property.trio import TIMEOUT_S, Trio
from tests.reference import Entry, Finish, ReferenceOutputs, is_nan, value_of

# Ids in their order, logprobs of an id behind it, and ends as (finish reason, stop reason), by request id.
Events = dict[str, list[int | Entry | tuple[int, int]]]


def cumulative(events: list[int | Entry | tuple[int, int]]) -> float:
    """Sum of the logprobs since the last end."""
    total = 0.0
    for event in events:
        if isinstance(event, Entry):
            total += value_of(event.bits[0])
        elif isinstance(event, tuple):
            total = 0.0
    return total


def add_events(events: Events, deliveries: Iterable[ReferenceOutputs]) -> None:
    """What was delivered, without who came with whom and in which piece."""
    for delivery in deliveries:
        for i, request_id in enumerate(delivery.request_ids):
            logprobs = delivery.logprobs[i] if delivery.logprobs else None
            if logprobs is None:
                events[request_id] += delivery.token_ids[i]
            else:
                for token_id, entry in zip(delivery.token_ids[i], logprobs.entries, strict=True):
                    events[request_id] += [token_id, entry]
                assert logprobs.cumulative == repr(cumulative(events[request_id]))
                assert logprobs.has_nan == any(map(is_nan, logprobs.entries))
            if delivery.finish_reasons[i]:
                events[request_id].append((delivery.finish_reasons[i], delivery.stop_reasons[i]))


def forget_ended(events: Events) -> None:
    """Keeps what came since each request's last end: sums go on from there."""
    for request_id, came in list(events.items()):
        ends = [index for index, event in enumerate(came) if isinstance(event, tuple) and not isinstance(event, Entry)]
        if ends:
            del came[: ends[-1] + 1]
        if not came:
            del events[request_id]


class SlowTrio(Trio):
    """Compares everything but the outputs, which it takes when it is told to."""

    def _compare_embedded_outputs(self, new: list[ReferenceOutputs]) -> None:
        pass

    def _compare_sidecar_outputs(self) -> None:
        pass

    def take_all(self) -> int:
        """All outputs of both books must come, and be those of the reference. Returns in how many pieces they came."""
        expected: Events = defaultdict(list)
        add_events(expected, self._awaited)
        self._awaited.clear()
        return sum(self._take(book, expected) for book in (self.embedded, self.sidecar))

    def _take(self, book: Book, expected: Events) -> int:
        events: Events = defaultdict(list)
        num_pieces = 0
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            pieces = [plain(outputs) for outputs in book.poll_outputs()]
            num_pieces += len(pieces)
            add_events(events, pieces)
            is_right = all(expected[request_id][: len(came)] == came for request_id, came in events.items())
            if events == expected or not is_right or time.monotonic() > deadline:
                break
        assert events == expected, book
        return num_pieces


@pytest.mark.parametrize(("name", "most_calls"), [("many in flight", 6000), ("many rows", 1500)])
def test_a_slow_reader_gets_bigger_pieces(monkeypatch: pytest.MonkeyPatch, name: str, most_calls: int) -> None:
    monkeypatch.setattr(asyncbook.embedded, "MAX_QUEUED_OUTPUTS", 2)
    trio = SlowTrio(CONFIGS[name])
    try:
        for seed, num_calls in enumerate((20, 100, 400, most_calls)):
            drive(trio, seed, num_calls)
            num_deliveries = len(trio._awaited)
            assert trio.take_all() < 2 * num_deliveries
    finally:
        trio.close()


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_an_aborted_request_ends_before_the_next_of_its_id_begins(
    monkeypatch: pytest.MonkeyPatch, ends_by_itself: bool
) -> None:
    # An abort frees the id while the row is held. What waits of the aborted request once came last.
    monkeypatch.setattr(asyncbook.embedded, "MAX_QUEUED_OUTPUTS", 0)
    with asyncbook.open(CONFIGS["many in flight"]) as book:
        first = book.admit("request", [1], RequestParams(max_tokens=1 if ends_by_itself else None))
        book.submit(book.batch([first]), np.array([2], np.int32))
        book.abort(first)
        second = book.admit("request", [1])
        book.submit(book.batch([second]), np.array([3], np.int32))
        book.release(second)
        monkeypatch.undo()
        events: Events = defaultdict(list)
        add_events(events, map(plain, book.poll_outputs()))
    end = Finish.LENGTH if ends_by_itself else Finish.ABORT
    assert events == {"request": [2, (end, -1), 3, (Finish.ABORT, -1)]}
