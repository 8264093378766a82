"""What an arm delivered of text and logprobs, put together and checked while nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncbook.bench.per_row_outputs import LogprobColumns, places_of
from asyncbook.bench.workloads import Steps
from asyncbook.output_logprobs import TokenLogprobs


class ArmsDiffer(Exception):
    """Two arms committed or delivered different things, or one of them other logprobs than it was given."""


class Delivery(NamedTuple):
    """`counts[i]` new ids of each of `rows`. `texts`: what each row's text grew by; `logprobs` of all ids, one row
    after the other, in columns or as objects. None: the workload has none."""

    rows: Sequence[int]
    counts: Sequence[int]
    texts: Sequence[str] | None = None
    logprobs: LogprobColumns | list[TokenLogprobs] | None = None


class Delivered:
    """All deliveries of an arm. Logprobs are compared with those that came with the steps, to the last bit."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._pieces: list[list[str]] = [[] for _ in range(steps.num_rows)]
        self._num_outputs = np.zeros(steps.num_rows, np.intp)

    def add(self, delivery: Delivery) -> None:
        """Raises `ArmsDiffer` where its logprobs are not those of its ids."""
        if delivery.texts is not None:
            for row, text in zip(delivery.rows, delivery.texts, strict=True):
                self._pieces[row].append(text)
        if self._steps.given is not None:
            self._check_logprobs(delivery)

    def text(self, row: int) -> str:
        """All that was delivered of the row."""
        return "".join(self._pieces[row])

    def _check_logprobs(self, delivery: Delivery) -> None:
        assert self._steps.given is not None
        owners, offsets = places_of(delivery.rows, delivery.counts)
        places = self._num_outputs[owners] + offsets
        self._num_outputs[delivery.rows] += np.array(delivery.counts, np.intp)
        steps, offsets = np.divmod(self._steps.output_places[owners, places], self._steps.workload.width)
        expected = LogprobColumns(*self._steps.given.of_outputs(steps, owners, offsets))
        found = delivery.logprobs
        if found is None:
            raise ArmsDiffer("did not deliver the logprobs that were asked for")
        if isinstance(found, list):
            if len(found) != owners.size:
                raise ArmsDiffer(f"delivered logprobs of {len(found)} ids, expected {owners.size}")
            found, expected = _flat(found), _flat_columns(expected)
        for name, one, other in zip(LogprobColumns._fields, found, expected, strict=True):
            if one.shape != other.shape:
                raise ArmsDiffer(f"delivered {name} of logprobs {list(one.shape)}, expected {list(other.shape)}")
            if not np.array_equal(one, other):
                raise ArmsDiffer(f"delivered other {name} of logprobs than came with the steps")


def _flat(entries: list[TokenLogprobs]) -> LogprobColumns:
    """One behind the other."""
    ids, values, ranks = zip(*(one for entry in entries for one in entry), strict=True) if entries else ((), (), ())
    return LogprobColumns(np.array(ids, np.int32), np.array(values, np.float32), np.array(ranks, np.int32))


def _flat_columns(columns: LogprobColumns) -> LogprobColumns:
    """The same of columns: without the sampled id where it stands among the top ones."""
    token_ids, values, ranks = columns
    all_ranks = np.broadcast_to(np.arange(token_ids.shape[1], dtype=np.int32), token_ids.shape).copy()
    all_ranks[:, 0] = ranks
    is_kept = token_ids != token_ids[:, :1]
    is_kept[:, 0] = True
    return LogprobColumns(token_ids[is_kept], values[is_kept], all_ranks[is_kept])


def without_begun(text: str, stop: Sequence[str]) -> str:
    """The text without its longest end that begins a stop string: what can be delivered of a request that goes on."""
    longest = max((len(string) for string in stop), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(string) > length and string.startswith(text[-length:]) for string in stop):
            return text[:-length]
    return text
