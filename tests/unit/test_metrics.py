"""The Prometheus endpoint says what `stats()` says."""

from __future__ import annotations

import urllib.request

import numpy as np
import pytest

import asyncbook

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from asyncbook.metrics import serve_metrics
from tests.conftest import SMALL, step


def test_a_scrape_says_what_stats_says() -> None:
    with asyncbook.open(asyncbook.BookConfig(**SMALL)) as book:
        row = book.admit("a", [1], asyncbook.RequestParams(eos_token_id=9))
        for token_id in (5, 6, 9, 7):
            step(book, [row], [token_id])
            book.frame()
        server, thread = serve_metrics({"engine-0": book.stats}, port=0)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as page:
                text = page.read().decode()
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
    samples = {
        (sample.name, *(value for label, value in sorted(sample.labels.items()) if label != "book")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["asyncbook_applied_steps_total",] == 4
    assert samples["asyncbook_committed_tokens_total",] == 3
    assert samples["asyncbook_dropped_tokens_total", "finished"] == 1
    assert samples["asyncbook_finished_requests_total", "stop"] == 1
    assert (samples["asyncbook_rows", "held"], samples["asyncbook_rows", "free"]) == (1, 3)
    for name in ("submit", "queue", "apply", "read"):
        buckets = [value for key, value in samples.items() if key[0] == f"asyncbook_{name}_seconds_bucket"]
        assert buckets == sorted(buckets), "cumulative"
        assert samples[f"asyncbook_{name}_seconds_bucket", "+Inf"] == 4
    assert samples["asyncbook_lag_steps_bucket", "1.0"] == 4
    assert all(np.isfinite(value) for value in samples.values())
