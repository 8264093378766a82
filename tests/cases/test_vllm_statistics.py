"""What verification accepted, against what vLLM 0.32 reported for the same run.

`tests/data/vllm_spec_decode_run.json` holds a run of real vLLM with n-gram drafts (`tools/record_vllm_run.py`, whose
head describes the file): chunked prefills, prefix-cache hits, preemptions, stop ids, `min_tokens`, lengths. Its steps
are given to a book one by one. The book's statistics must be vLLM's after every step, and so must each request's
outputs and end.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncbook import Book, FinishReason, RequestParams, Row
from tests.conftest import TIMEOUT_S, Delivered, MakeBook, delivered, ids_of

RECORDING = Path(__file__).resolve().parent.parent / "data" / "vllm_spec_decode_run.json"
FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

Recording = dict[str, Any]


@cache
def recording() -> Recording:
    """The file. Whoever changes something in it takes a copy."""
    loaded: Recording = json.loads(RECORDING.read_text())
    return loaded


class Replay:
    """A recorded run on a book. `rows` are those of the requests that have not ended in the recording."""

    def __init__(self, make_book: MakeBook, run: Recording) -> None:
        engine = run["run"]["engine"]
        # A sidecar's book may be one that earlier tests have used, and its counters go on: a fresh one starts at zero.
        self.book: Book = make_book(
            fresh=True,
            max_num_reqs=len(run["requests"]),
            max_model_len=engine["max_model_len"],
            vocab_size=run["run"]["vocab_size"],
            num_spec_tokens=engine["speculative_config"]["num_speculative_tokens"],
        )
        self.recording = run
        self.rows: dict[int, Row] = {}
        self.deliveries: dict[str, Delivered] = {}
        self.reported = np.zeros(3 + self.book.config.num_spec_tokens, np.int64)

    def admit(self, number: int, num_computed_tokens: int) -> None:
        """A request as vLLM took it in."""
        request = self.recording["requests"][number]
        params = RequestParams(
            max_tokens=request["max_tokens"],
            min_tokens=request.get("min_tokens", 0),
            eos_token_id=self.recording["run"]["eos_token_id"],
            stop_token_ids=tuple(request.get("stop_token_ids", ())),
            ignore_eos=request.get("ignore_eos", False),
        )
        self.rows[number] = self.book.admit(
            f"request-{number}", request["prompt"], params, num_computed_tokens=num_computed_tokens
        )

    def step(self, step: dict[str, Any]) -> None:
        """What happened before the step, and the step."""
        book, drafts = self.book, step["drafts"]
        for number in step["preempted"]:
            book.preempt(self.rows[number])
        for number, num_computed_tokens in step["resumed"]:
            self.rows[number] = book.resume(self.rows[number], num_computed_tokens=num_computed_tokens)
        for number, num_computed_tokens in step["new"]:
            self.admit(number, num_computed_tokens)
        batch = book.batch(
            [self.rows[number] for number, _ in step["scheduled"]],
            num_scheduled_tokens=[count for _, count in step["scheduled"]],
            num_draft_tokens=[len(drafts.get(str(number), ())) for number, _ in step["scheduled"]],
        )
        book.wait_applied(book.submit(batch, ids_of(step["sampled"])), TIMEOUT_S)
        if "reported" in step:
            *totals, per_pos = step["reported"]
            self.reported += [*totals, *per_pos]
        for request_id, delivery in delivered(book).items():
            known = self.deliveries.setdefault(request_id, Delivered([]))
            known.token_ids += delivery.token_ids
            known.finish_reason, known.stop_reason = delivery.finish_reason, delivery.stop_reason
            if delivery.finish_reason:
                book.release(self.rows.pop(int(request_id.removeprefix("request-"))))

    def check_statistics(self) -> None:
        """The book's are the sum of what vLLM reported so far."""
        stats = self.book.spec_decode_stats()
        shown = [
            stats.num_drafts,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            *stats.num_accepted_tokens_per_pos,
        ]
        assert shown == self.reported.tolist()

    def run(self) -> None:
        """Every step, looked at after each."""
        for step in self.recording["steps"]:
            self.step(step)
            self.check_statistics()

    def check_report(self) -> None:
        """vLLM's totals: the counters that it exports, and the figures that it logs, to the digits that it logs."""
        stats, report = self.book.spec_decode_stats(), self.recording["report"]
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"):
            assert getattr(stats, name) == report[name], name
        assert f"{stats.mean_acceptance_length:.2f}" == report["logged_mean_acceptance_length"]
        assert [f"{rate:.3f}" for rate in stats.acceptance_rate_per_pos] == report["logged_acceptance_rate_per_pos"]

    def check_results(self) -> None:
        """Each request's outputs and end. vLLM names the id that stopped a request only where it is the user's own."""
        assert self.rows == {}
        eos_token_id = self.recording["run"]["eos_token_id"]
        for number, result in enumerate(self.recording["results"]):
            delivery = self.deliveries[f"request-{number}"]
            assert delivery.token_ids == result["outputs"], number
            assert delivery.finish_reason is FINISH_REASONS[result["finish_reason"]], number
            stop_reason = result["stop_reason"]
            if stop_reason is None and result["finish_reason"] == "stop":
                stop_reason = eos_token_id
            assert delivery.stop_reason == stop_reason, number


def test_statistics_and_outputs_are_vllms(make_book: MakeBook) -> None:
    replay = Replay(make_book, recording())
    replay.run()
    replay.check_report()
    replay.check_results()


def test_the_run_has_what_it_is_for() -> None:
    """A recording without chunks or preemptions would prove less, silently."""
    run = recording()
    assert run["run"]["vllm"].startswith("0.32")
    steps, requests, results = run["steps"], run["requests"], run["results"]
    assert sum(len(step["preempted"]) for step in steps) >= 5
    assert sum(not ids for step in steps for ids in step["sampled"]) >= 3  # chunks of a prompt
    assert any(computed for step in steps for _, computed in step["new"])  # prefix-cache hits
    assert {len(ids) for step in steps for ids in step["drafts"].values()} == {1, 2, 3, 4, 5}
    assert {result["stop_reason"] for result in results} >= {None, 28, 198}
    assert any(
        len(request["prompt"]) + len(result["outputs"]) == run["run"]["engine"]["max_model_len"]
        for request, result in zip(requests, results, strict=True)
    )
    # A stop inside accepted drafts: more was verified than was delivered.
    assert sum(len(ids) for step in steps for ids in step["sampled"]) > sum(
        len(result["outputs"]) for result in results
    )


@pytest.mark.parametrize("kind", ["embedded"], indirect=True)
@pytest.mark.parametrize("field", ["accepted", "draft", "position"])
def test_one_count_changed_is_found(make_book: MakeBook, field: str) -> None:
    run = copy.deepcopy(recording())
    rounds = [step for step in run["steps"] if "reported" in step and step["reported"][2] > 1]
    step = rounds[len(rounds) // 2]
    match field:
        case "accepted":  # one verified id fewer
            next(ids for ids in step["sampled"] if len(ids) > 1).pop()
        case "draft":
            next(iter(step["drafts"].values())).pop()
        case "position":
            step["reported"][3][1] += 1
    with pytest.raises(AssertionError):
        Replay(make_book, run).run()
