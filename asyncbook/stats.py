"""Counters and times of a book, read from its shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from asyncbook.ipc.histogram import bucket_start_ns
from asyncbook.ipc.layout import Counter, FinishReason, RowCounter


@dataclass(frozen=True, slots=True)
class _Buckets:
    """How many there were in each bucket. Buckets are log-spaced, at most 1/8 wide."""

    counts: np.ndarray  # int64 [NUM_HISTOGRAM_BUCKETS]

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def _bucket(self, percent: float) -> int | None:
        """The bucket in which this share is reached, None where there is nothing."""
        if self.count == 0:
            return None
        return int(np.searchsorted(np.cumsum(self.counts), self.count * percent / 100))

    def since(self, earlier: Self) -> Self:
        """What came after an earlier state of the same histogram."""
        return type(self)(self.counts - earlier.counts)


@dataclass(frozen=True, slots=True)
class Histogram(_Buckets):
    """Times in microseconds."""

    def percentile_us(self, percent: float) -> float:
        """The upper end of the bucket in which this share of the times is reached; NaN without any."""
        bucket = self._bucket(percent)
        return float("nan") if bucket is None else bucket_start_ns(bucket + 1) / 1000

    @property
    def us_p50(self) -> float:
        return self.percentile_us(50)

    @property
    def us_p90(self) -> float:
        return self.percentile_us(90)

    @property
    def us_p99(self) -> float:
        return self.percentile_us(99)

    @property
    def us_max(self) -> float:
        return self.percentile_us(100)


@dataclass(frozen=True, slots=True)
class StepHistogram(_Buckets):
    """Numbers of steps; exact up to 16."""

    def percentile_steps(self, percent: float) -> float:
        """The least number in the bucket in which this share is reached; NaN without any."""
        bucket = self._bucket(percent)
        return float("nan") if bucket is None else float(bucket_start_ns(bucket))

    @property
    def steps_p50(self) -> float:
        return self.percentile_steps(50)

    @property
    def steps_p99(self) -> float:
        return self.percentile_steps(99)

    @property
    def steps_max(self) -> float:
        return self.percentile_steps(100)


@dataclass(frozen=True, slots=True)
class Stats:
    """What a book has done. `submitted_tokens == committed_tokens + sum(dropped_tokens.values())`, always: nothing
    vanishes. `dropped_tokens` by reason, `finished_requests` by `FinishReason`. `nan_logprobs` and `missing_logprobs`
    count outputs: with a NaN among their logprobs, and without some that their request wants. `messages` were sent;
    `num_restarts`: how often another sidecar took the book over.

    Of each step: `submit_us`, the call in the runner; `queue_us`, from that call to the start of apply; `apply_us`, the
    bookkeeper's work, outputs aside; `read_us`, from publishing it to the first look at its frame (steps whose frame
    nobody took are not in it); `lag_steps`, how many steps were in flight when its apply began, itself among them.
    `wait_for_tokens_us`: for each step that came through the sample ring, how long the sidecar saw it submitted before
    its ids were there, which a device brings later; 0 where they were there at the first look."""

    submitted_steps: int
    applied_steps: int
    num_rows_held: int
    num_rows_free: int
    admitted_requests: int
    released_requests: int
    finished_requests: dict[FinishReason, int]
    submitted_tokens: int
    committed_tokens: int
    dropped_tokens: dict[str, int]
    invalid_draft_tokens: int
    nan_logprobs: int
    missing_logprobs: int
    outputs_dropped_requests: int
    messages: int
    replayed_messages: int
    stale_messages: int
    bad_messages: int
    num_restarts: int
    submit_us: Histogram
    queue_us: Histogram
    apply_us: Histogram
    wait_for_tokens_us: Histogram
    read_us: Histogram
    lag_steps: StepHistogram


@dataclass(frozen=True, slots=True)
class SpecDecodeStats:
    """What verification accepted. A round is a row's step with at least one draft; padding is no draft."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    num_accepted_tokens_per_pos: list[int]

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts: the tokens a round emitted before stops and lengths; 1.0 without a round."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """Share of the rounds in which the draft at each position was accepted."""
        return [accepted / self.num_drafts if self.num_drafts else 0.0 for accepted in self.num_accepted_tokens_per_pos]


DROPPED_PREFIX = "DROPPED_"
_DROP_REASONS = {
    counter.name.removeprefix(DROPPED_PREFIX).lower(): counter
    for counter in Counter
    if counter.name.startswith(DROPPED_PREFIX)
}


def dropped_tokens(counters: np.ndarray) -> dict[str, int]:
    """Ids that were not committed, by reason."""
    return {reason: int(counters[counter]) for reason, counter in _DROP_REASONS.items()}


def finished_requests(counters: np.ndarray) -> dict[FinishReason, int]:
    """Requests that ended, by reason."""
    return {
        reason: int(counters[Counter[f"FINISHED_{reason.name}"]])
        for reason in FinishReason
        if reason is not reason.NONE
    }


def make_stats(counters: np.ndarray, **known: Any) -> Stats:
    """From a book's counters, and what the runner knows itself, by field."""
    return Stats(
        admitted_requests=int(counters[Counter.ADMITTED]),
        released_requests=int(counters[Counter.RELEASED]),
        finished_requests=finished_requests(counters),
        submitted_tokens=int(counters[Counter.SUBMITTED_TOKENS]),
        committed_tokens=int(counters[Counter.COMMITTED_TOKENS]),
        dropped_tokens=dropped_tokens(counters),
        invalid_draft_tokens=int(counters[Counter.INVALID_DRAFT_TOKENS]),
        nan_logprobs=int(counters[Counter.NAN_LOGPROBS]),
        missing_logprobs=int(counters[Counter.MISSING_LOGPROBS]),
        outputs_dropped_requests=int(counters[Counter.OUTPUTS_DROPPED_REQUESTS]),
        replayed_messages=int(counters[Counter.REPLAYED_MESSAGES]),
        stale_messages=int(counters[Counter.STALE_MESSAGES]),
        bad_messages=int(counters[Counter.BAD_MESSAGES]),
        **known,
    )


def spec_decode_stats(
    counters: np.ndarray, names: type[Counter] | type[RowCounter], num_spec_tokens: int
) -> SpecDecodeStats:
    """From a book's or a row's counters."""
    return SpecDecodeStats(
        int(counters[names.DRAFTS]),
        int(counters[names.DRAFT_TOKENS]),
        int(counters[names.ACCEPTED_TOKENS]),
        int(counters[names.EMITTED_TOKENS]),
        counters[names.ACCEPTED_PER_POS : names.ACCEPTED_PER_POS + num_spec_tokens].tolist(),
    )
