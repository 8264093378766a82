"""Log buckets for times: every duration has one, and none is more than 1/8 wide."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncbook.ipc.histogram import bucket_of, bucket_start_ns
from asyncbook.ipc.layout import NUM_HISTOGRAM_BUCKETS
from asyncbook.stats import Histogram

LAST = NUM_HISTOGRAM_BUCKETS - 1
DURATIONS = st.integers(0, bucket_start_ns(NUM_HISTOGRAM_BUCKETS) - 1)


@given(DURATIONS)
def test_a_duration_is_in_its_bucket(duration_ns: int) -> None:
    bucket = bucket_of(duration_ns)
    assert 0 <= bucket <= LAST
    assert bucket_start_ns(bucket) <= duration_ns < bucket_start_ns(bucket + 1)


def test_buckets_follow_one_another() -> None:
    starts = [bucket_start_ns(bucket) for bucket in range(NUM_HISTOGRAM_BUCKETS + 1)]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    for bucket, (start, end) in enumerate(itertools.pairwise(starts)):
        assert bucket_of(start) == bucket_of(end - 1) == bucket
        assert end - start == 1 or (end - start) * 8 <= start, "a bucket is more than 1/8 wide"
    assert starts[-1] > 36 * 60 * 10**9


@given(st.integers(0, 2**80))
def test_order_is_kept(duration_ns: int) -> None:
    assert bucket_of(duration_ns) <= bucket_of(duration_ns + 1)


@pytest.mark.parametrize(
    ("duration_ns", "bucket"),
    [(0, 0), (1, 1), (7, 7), (8, 8), (15, 15), (16, 16), (17, 16), (18, 17), (-1, 0), (-(2**40), 0), (2**63, LAST)],
)
def test_by_hand(duration_ns: int, bucket: int) -> None:
    assert bucket_of(duration_ns) == bucket


def histogram(*durations_ns: int) -> Histogram:
    counts = np.zeros(NUM_HISTOGRAM_BUCKETS, np.int64)
    for duration_ns in durations_ns:
        counts[bucket_of(duration_ns)] += 1
    return Histogram(counts)


def test_percentiles_are_the_upper_ends_of_buckets() -> None:
    times = histogram(*[1_000] * 90, *[8_000] * 9, 64_000)
    assert times.count == 100
    for share, duration_ns in ((times.us_p50, 1_000), (times.us_p90, 1_000), (times.us_p99, 8_000),
                               (times.us_max, 64_000)):  # fmt: skip
        assert duration_ns / 1000 < share <= duration_ns / 1000 * 9 / 8


@given(st.lists(DURATIONS, min_size=1, max_size=50))
def test_the_greatest_is_below_the_maximum(durations_ns: list[int]) -> None:
    times = histogram(*durations_ns)
    assert times.us_p50 <= times.us_p90 <= times.us_p99 <= times.us_max
    assert max(durations_ns) / 1000 < times.us_max <= (max(durations_ns) * 9 / 8 + 1) / 1000


def test_without_any_time_there_is_no_percentile() -> None:
    assert histogram().count == 0
    assert all(math.isnan(share) for share in (histogram().us_p50, histogram().us_max, histogram().percentile_us(1)))
