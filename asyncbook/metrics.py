"""A book's statistics for Prometheus. Needs `asyncbook[metrics]`.

    from asyncbook.metrics import serve_metrics
    serve_metrics({"engine-0": book.stats})  # http://127.0.0.1:9464/metrics

Nothing is counted for it: a scrape reads `Book.stats()`, which any thread may call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from asyncbook.ipc.histogram import bucket_start_ns
from asyncbook.ipc.layout import HISTOGRAM_SUB_BITS, NUM_HISTOGRAM_BUCKETS
from asyncbook.stats import Stats

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PORT = 9464
_SUB_BUCKETS = 1 << HISTOGRAM_SUB_BITS
# Every octave from 1 us to 1 s: a bucket's end there is one here, so the counts are exact.
_TIME_ENDS = [b for b in range(0, NUM_HISTOGRAM_BUCKETS, _SUB_BUCKETS) if 2**10 <= bucket_start_ns(b) <= 2**30]
_STEP_ENDS = range(2, 2 * _SUB_BUCKETS)

Source = Callable[[], Stats]
_COUNTERS: dict[str, tuple[str, Callable[[Stats], int]]] = {
    "submitted_steps": ("Steps that were submitted", lambda stats: stats.submitted_steps),
    "applied_steps": ("Steps that are applied and published", lambda stats: stats.applied_steps),
    "submitted_tokens": ("Ids that applied steps brought", lambda stats: stats.submitted_tokens),
    "committed_tokens": ("Ids that were committed", lambda stats: stats.committed_tokens),
    "invalid_draft_tokens": ("Drafts that were no ids", lambda stats: stats.invalid_draft_tokens),
    "admitted_requests": ("Requests that were given a row", lambda stats: stats.admitted_requests),
    "released_requests": ("Requests whose row was freed", lambda stats: stats.released_requests),
    "messages": ("Messages to the bookkeeper", lambda stats: stats.messages),
    "bad_messages": ("Messages that made no sense", lambda stats: stats.bad_messages),
    "restarts": ("Sidecars that took the book over", lambda stats: stats.num_restarts),
}
_BY_REASON: dict[str, tuple[str, Callable[[Stats], Mapping[str, int]]]] = {
    "dropped_tokens": ("Ids that were not committed", lambda stats: stats.dropped_tokens),
    "finished_requests": (
        "Requests that ended",
        lambda stats: {reason.name.lower(): count for reason, count in stats.finished_requests.items()},
    ),
}
_TIMES: dict[str, tuple[str, Callable[[Stats], np.ndarray]]] = {
    "submit": ("The call of submit", lambda stats: stats.submit_us.counts),
    "queue": ("From submit to the start of apply", lambda stats: stats.queue_us.counts),
    "apply": ("What the bookkeeper took for a step", lambda stats: stats.apply_us.counts),
    "read": ("From publishing a step to the first look at it", lambda stats: stats.read_us.counts),
}


class BookCollector(Collector):
    """Collects from books by their names."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)

    def collect(self) -> Iterator[Metric]:
        """All families, each with a sample a book."""
        books = {name: source() for name, source in self._sources.items()}
        for name, (what, counter) in _COUNTERS.items():
            family = CounterMetricFamily(f"asyncbook_{name}", what, labels=["book"])
            for book, stats in books.items():
                family.add_metric([book], counter(stats))
            yield family
        for name, (what, by_reason) in _BY_REASON.items():
            family = CounterMetricFamily(f"asyncbook_{name}", f"{what}, by reason", labels=["book", "reason"])
            for book, stats in books.items():
                for reason, count in by_reason(stats).items():
                    family.add_metric([book, reason], count)
            yield family
        rows = GaugeMetricFamily("asyncbook_rows", "Rows of the book, by state", labels=["book", "state"])
        for book, stats in books.items():
            rows.add_metric([book, "held"], stats.num_rows_held)
            rows.add_metric([book, "free"], stats.num_rows_free)
        yield rows
        yield from self._histograms(books)

    @staticmethod
    def _histograms(books: Mapping[str, Stats]) -> Iterator[Metric]:
        for name, (what, counts) in _TIMES.items():
            family = HistogramMetricFamily(f"asyncbook_{name}_seconds", what, labels=["book"])
            for book, stats in books.items():
                ends = {bucket: bucket_start_ns(bucket) / 1e9 for bucket in _TIME_ENDS}
                family.add_metric([book], _cumulative(counts(stats), ends), sum_value=None)
            yield family
        lag = HistogramMetricFamily("asyncbook_lag_steps", "Steps in flight when an apply began", labels=["book"])
        for book, stats in books.items():
            ends = {bucket: float(bucket - 1) for bucket in _STEP_ENDS}
            lag.add_metric([book], _cumulative(stats.lag_steps.counts, ends), sum_value=None)
        yield lag


def _cumulative(counts: np.ndarray, ends: Mapping[int, float]) -> list[Any]:
    """Pairs of a bucket's end and what is below it. `ends`: by the first of our buckets that is not."""
    total = np.concatenate([[0], np.cumsum(counts)])
    return [*((repr(end), int(total[bucket])) for bucket, end in ends.items()), ("+Inf", int(total[-1]))]


def serve_metrics(sources: Mapping[str, Source], port: int = PORT, address: str = "127.0.0.1") -> tuple[Any, Thread]:
    """Serves the books at /metrics. Returns server and thread; `server.shutdown()` ends it."""
    registry = CollectorRegistry()
    registry.register(BookCollector(sources))
    return start_http_server(port, address, registry)
