"""Log buckets for times: the leading bit and the three bits below it. At most 1/8 too wide, no allocation, no clock."""

from __future__ import annotations

from asyncbook.ipc.layout import HISTOGRAM_SUB_BITS, NUM_HISTOGRAM_BUCKETS

_SUB_BUCKETS = 1 << HISTOGRAM_SUB_BITS


def bucket_of(duration_ns: int) -> int:
    """Index of the bucket of a duration; the last one takes all that is longer."""
    if duration_ns < _SUB_BUCKETS:
        return max(duration_ns, 0)
    shift = duration_ns.bit_length() - 1 - HISTOGRAM_SUB_BITS
    return min((shift + 1) * _SUB_BUCKETS + (duration_ns >> shift) - _SUB_BUCKETS, NUM_HISTOGRAM_BUCKETS - 1)


def bucket_start_ns(bucket: int) -> int:
    """The least duration in a bucket."""
    if bucket < _SUB_BUCKETS:
        return bucket
    shift = bucket // _SUB_BUCKETS - 1
    return (bucket % _SUB_BUCKETS + _SUB_BUCKETS) << shift
