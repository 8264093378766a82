"""What the steps of a benchmark bring: a registry of workloads, each drawn from one seed for all arms alike.

To add one (text, logprobs), add a `Workload`, and what it needs to `Steps` and to the arms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncbook import BookConfig, RequestParams

VOCAB_SIZE = 128_000
EOS_TOKEN_ID = VOCAB_SIZE - 1
STOP_TOKEN_IDS = tuple(range(VOCAB_SIZE - 9, VOCAB_SIZE - 1))
FIRST_STOP_ID = STOP_TOKEN_IDS[0]  # what is drawn lies below; stops are put in on purpose
MIN_TOKENS = 8
NUM_PROMPT_TOKENS = 32
SHARE_STOPPED = 0.1  # of the rows, at a step of their own; an engine would give the row to the next request
SHARE_ACCEPTED = 0.6  # of the drafts at each position, given those before it


@dataclass(frozen=True)
class Workload:
    """`num_spec_tokens` drafts a row and step; `has_stops`: an end-of-sequence id and 8 stop ids are looked for, and a
    tenth of the requests meets one."""

    name: str
    what: str
    num_spec_tokens: int = 0
    has_stops: bool = False

    @property
    def width(self) -> int:
        """Ids that a row may get in a step."""
        return 1 + self.num_spec_tokens


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("plain", "one id a row and step, nothing that ends a request"),
        Workload("drafts", "4 drafts a row and step, 60 % accepted at each position", num_spec_tokens=4),
        Workload("stops", "one id a row and step; 9 ids to stop at", has_stops=True),
        Workload("everything", "drafts and stops", num_spec_tokens=4, has_stops=True),
    )
}


@dataclass(frozen=True)
class Steps:
    """What a run samples. `sampled` int32 [steps, rows, width], -1 pads; `drafts` int32 [steps, rows, K] or None."""

    workload: Workload
    sampled: np.ndarray
    drafts: np.ndarray | None

    @property
    def num_steps(self) -> int:
        return int(self.sampled.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.sampled.shape[1])

    @property
    def max_model_len(self) -> int:
        """Longer than any request gets: none ends by its length."""
        return NUM_PROMPT_TOKENS + self.num_steps * self.workload.width + 1

    def drafts_of(self, step: int) -> np.ndarray | None:
        """int32 [rows, K] to verify after the step with this index."""
        return None if self.drafts is None else self.drafts[step]

    def config(self, **options: object) -> BookConfig:
        """A book that these steps fit into."""
        sizes = {"max_num_reqs": self.num_rows, "max_model_len": self.max_model_len, "vocab_size": VOCAB_SIZE}
        return BookConfig(**sizes, num_spec_tokens=self.workload.num_spec_tokens, **options)  # type: ignore[arg-type]

    def params(self) -> RequestParams:
        """What ends a request."""
        if not self.workload.has_stops:
            return RequestParams()
        return RequestParams(min_tokens=MIN_TOKENS, eos_token_id=EOS_TOKEN_ID, stop_token_ids=STOP_TOKEN_IDS)


def make_steps(workload: Workload, num_rows: int, num_steps: int, seed: int = 0) -> Steps:
    """All steps of a run."""
    rng = np.random.default_rng([seed, num_rows, num_steps])
    sampled = rng.integers(0, FIRST_STOP_ID, (num_steps, num_rows, workload.width), np.int32)
    if workload.has_stops:
        rows = np.flatnonzero(rng.random(num_rows) < SHARE_STOPPED)
        stops = np.array((*STOP_TOKEN_IDS, EOS_TOKEN_ID), np.int32)
        sampled[rng.integers(0, num_steps, rows.size), rows, 0] = rng.choice(stops, rows.size)
    if not workload.num_spec_tokens:
        return Steps(workload, sampled, None)
    is_accepted = rng.random((num_steps, num_rows, workload.num_spec_tokens)) < SHARE_ACCEPTED
    sampled[..., 1:][~np.logical_and.accumulate(is_accepted, axis=2)] = -1
    drafts = rng.integers(0, FIRST_STOP_ID, (num_steps, num_rows, workload.num_spec_tokens), np.int32)
    return Steps(workload, sampled, drafts)
