"""Sidecar mode: a book in a process of its own keeps vLLM's run, and vLLM's run stays what it is."""

from __future__ import annotations

import random
from typing import Any

import pytest

import asyncbook
from asyncbook import FinishReason
from asyncbook.integrations.vllm_book import MODE_VARIABLE, BookFeed
from tests.vllm.conftest import MakeEngine
from tests.vllm.scenarios import SCENARIOS
from tests.vllm.simulation import Simulation
from tests.vllm.test_equal import PARTS, acceptance, run_both
from tests.vllm.test_schedulers import CASES, make_pair, operate
from tests.vllm.watch import difference, scheduler_of

TIMEOUT_S = 30.0
STEPS = 300


class Reader:
    """Reads a feed's book after each step, and compares what is committed with what vLLM's requests hold."""

    def __init__(self, feed: BookFeed, requests: dict[str, Any]) -> None:
        self.feed, self.requests = feed, requests
        self.subscription = asyncbook.subscribe(feed.book.address)
        self.delivered: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}
        self.ends: dict[str, FinishReason] = {}
        self.num_histories = 0

    def read(self) -> None:
        book = self.feed.book
        book.wait_applied(book.submitted_step, TIMEOUT_S)
        self.listen()
        for request_id, (request, row) in self.feed.rows.items():
            if self.requests.get(request_id) is request:
                assert book.token_ids(row).tolist() == list(request.all_token_ids), request_id
                self.num_histories += 1

    def listen(self) -> None:
        for outputs in self.subscription.poll_outputs():
            for delta in outputs:
                self.delivered.setdefault(delta.request_id, []).extend(delta.token_ids.tolist())
                self.texts[delta.request_id] = self.texts.get(delta.request_id, "") + (delta.text or "")
                if delta.finish_reason:
                    self.ends[delta.request_id] = delta.finish_reason

    def listen_until(self, ends: set[str]) -> None:
        """Deliveries follow the steps that they are of."""
        while not ends <= self.ends.keys():
            assert self.subscription.wait_outputs(TIMEOUT_S)
            self.listen()


@pytest.mark.parametrize("name", ["mixed", "aborts", "preemption", "drafts, ends"])
def test_the_book_has_what_vllm_delivers(make_engine: MakeEngine, name: str) -> None:
    scenario = SCENARIOS[name]
    reader: Reader | None = None

    def read(llm: Any) -> Any:
        nonlocal reader
        scheduler = scheduler_of(llm)
        reader = Reader(scheduler.book_feed, scheduler.requests)
        return reader

    stock, mine, llm = run_both(make_engine, scenario, "sidecar", read)
    assert reader is not None
    for part in PARTS:
        assert difference(getattr(stock, part), getattr(mine, part), part) is None
    reader.read()
    assert reader.num_histories > 100
    finished = {name: results[-1] for name, results in mine.results.items() if results[-1]["finished"]}
    reader.listen_until(set(finished))
    for request_id, result in finished.items():
        (output,) = result["outputs"]
        # A stop string is found outside the scheduler, which then hears of an abort. What came in the same step, behind
        # the id that completes it, is in the scheduler's request and in the book, and not in the output.
        is_string = output["finish_reason"] == "stop" and isinstance(output["stop_reason"], str)
        delivered = reader.delivered[request_id]
        assert delivered[: len(output["token_ids"])] == output["token_ids"], request_id
        assert len(delivered) == len(output["token_ids"]) or (is_string and "drafts" in name), request_id
        # What stops a request is no part of vLLM's text; and some requests ask for none.
        if output["finish_reason"] == "length" and output["text"]:
            assert reader.texts[request_id] == output["text"], request_id
        assert reader.ends[request_id].name == ("ABORT" if is_string else output["finish_reason"].upper())
    book = scheduler_of(llm).book_feed.book
    assert book.stats().num_rows_held == 0
    if "drafts" in name:
        assert {key: getattr(book.spec_decode_stats(), key) for key in acceptance(mine)} == acceptance(mine)


@pytest.mark.parametrize("name", [name for name in CASES if "asynchronous" in name])
def test_the_history_has_real_ids_under_asynchronous_scheduling(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "sidecar")
    _, simulation = make_pair(name, 1)
    assert isinstance(simulation, Simulation)
    scheduler = simulation.scheduler
    reader = Reader(scheduler.book_feed, scheduler.requests)
    rng = random.Random(1)
    try:
        for number in range(STEPS):
            operate(rng, (simulation,), number)
            if simulation.step() is not None:
                reader.read()
        assert reader.num_histories > STEPS
        while simulation.delivered != {name: reader.delivered.get(name, []) for name in simulation.delivered}:
            assert reader.subscription.wait_outputs(TIMEOUT_S), "the subscriber has not got everything"
            reader.listen()
        assert min(min(ids, default=0) for ids in reader.delivered.values()) >= 0
        assert scheduler.book_feed.num_not_kept == 0
    finally:
        scheduler.book_feed.close()
