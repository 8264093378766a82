"""What the steps of a benchmark bring: a registry of workloads, each drawn from one seed for all arms alike.

To add one, add a `Workload`, and what it needs to `Steps` and to the arms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from asyncbook import BookConfig, Logprobs, RequestParams
from asyncbook.bench.given_logprobs import GivenLogprobs, draw_logprobs
from asyncbook.bench.story import STOP, Story

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
    tenth of the requests meets one; `num_logprobs`: how many top logprobs each request asks for, None: none at all;
    `has_text`: ids are text in which two stop strings are looked for, and a tenth of the requests meets one."""

    name: str
    what: str
    num_spec_tokens: int = 0
    has_stops: bool = False
    num_logprobs: int | None = None
    has_text: bool = False

    @property
    def width(self) -> int:
        """Ids that a row may get in a step."""
        return 1 + self.num_spec_tokens

    @property
    def remark(self) -> str | None:
        """What a reader of the figures has to know of the arm `numpy (PR)`."""
        parts = ["keeps logprobs in columns"] if self.num_logprobs is not None else []
        parts += ["makes text as the loop does, a row at a time"] if self.has_text else []
        return f"numpy (PR) {' and '.join(parts)}; that is no part of the PR" if parts else None


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("plain", "one id a row and step, nothing that ends a request"),
        Workload("drafts", "4 drafts a row and step, 60 % accepted at each position", num_spec_tokens=4),
        Workload("stops", "one id a row and step; 9 ids to stop at", has_stops=True),
        Workload("drafts+stops", "drafts and stops", num_spec_tokens=4, has_stops=True),
        Workload("logprobs", "one id a row and step, with its logprob and the top 5", num_logprobs=5),
        Workload("text", "one id a row and step, which is text; 2 strings to stop at", has_text=True),
        Workload(
            "everything", "drafts, stops, logprobs and text", num_spec_tokens=4, has_stops=True, num_logprobs=5,
            has_text=True,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Steps:
    """What a run samples. `sampled` int32 [steps, rows, width], -1 pads; `drafts` int32 [steps, rows, K] or None."""

    workload: Workload
    sampled: np.ndarray
    drafts: np.ndarray | None
    given: GivenLogprobs | None = None
    story: Story | None = None

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

    def logprobs_of(self, step: int) -> Logprobs | None:
        """What comes with the step with this index."""
        return None if self.given is None else self.given.of_step(step)

    @cached_property
    def output_places(self) -> np.ndarray:
        """[rows, steps * width]: where each row's ids stand among its places in all steps; the rest is padding's."""
        is_there = np.moveaxis(self.sampled, 1, 0).reshape(self.num_rows, -1) >= 0
        return np.argsort(~is_there, axis=1, kind="stable").astype(np.int32)

    @property
    def prompt(self) -> np.ndarray:
        """Of every request."""
        if self.story is None:
            return np.arange(NUM_PROMPT_TOKENS)
        return self.story.prompt(NUM_PROMPT_TOKENS)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All ids that end a request."""
        return (*STOP_TOKEN_IDS, EOS_TOKEN_ID) if self.workload.has_stops else ()

    @property
    def min_tokens(self) -> int:
        """Outputs before which nothing ends a request."""
        return MIN_TOKENS if self.workload.has_stops else 0

    def config(self, **options: object) -> BookConfig:
        """A book that these steps fit into."""
        sizes: dict[str, object] = {
            "max_num_reqs": self.num_rows,
            "max_model_len": self.max_model_len,
            "vocab_size": VOCAB_SIZE if self.story is None else max(VOCAB_SIZE, self.story.vocab_size),
            "num_spec_tokens": self.workload.num_spec_tokens,
            "max_logprobs": self.workload.num_logprobs,
            "tokenizer": None if self.story is None else self.story.tokenizer,
        }
        return BookConfig(**(sizes | options))  # type: ignore[arg-type]

    def params(self) -> RequestParams:
        """What ends a request, and what it reports."""
        return RequestParams(
            min_tokens=self.min_tokens,
            eos_token_id=EOS_TOKEN_ID if self.workload.has_stops else None,
            stop_token_ids=STOP_TOKEN_IDS if self.workload.has_stops else (),
            stop=() if self.story is None else STOP,
            logprobs=self.workload.num_logprobs,
        )


def make_steps(workload: Workload, num_rows: int, num_steps: int, seed: int = 0, story: Story | None = None) -> Steps:
    """All steps of a run. A workload with text needs a story."""
    if not workload.has_text:
        story = None
    elif story is None:
        raise ValueError(f"the workload {workload.name} has text, and there is no story")
    rng = np.random.default_rng([seed, num_rows, num_steps])
    sampled = rng.integers(0, FIRST_STOP_ID, (num_steps, num_rows, workload.width), np.int32)
    is_there, drafts = np.ones(sampled.shape, np.bool_), None
    if workload.num_spec_tokens:
        is_accepted = rng.random((num_steps, num_rows, workload.num_spec_tokens)) < SHARE_ACCEPTED
        np.logical_and.accumulate(is_accepted, axis=2, out=is_there[..., 1:])
        drafts = rng.integers(0, FIRST_STOP_ID, (num_steps, num_rows, workload.num_spec_tokens), np.int32)
    if story is not None:
        _tell(story, sampled, is_there, rng)
    if workload.has_stops:
        rows = np.flatnonzero(rng.random(num_rows) < SHARE_STOPPED)
        stops = np.array((*STOP_TOKEN_IDS, EOS_TOKEN_ID), np.int32)
        sampled[rng.integers(0, num_steps, rows.size), rows, 0] = rng.choice(stops, rows.size)
    sampled[~is_there] = -1
    given = None if workload.num_logprobs is None else draw_logprobs(sampled, workload.num_logprobs, rng)
    return Steps(workload, sampled, drafts, given, story)


def _tell(story: Story, sampled: np.ndarray, is_there: np.ndarray, rng: np.random.Generator) -> None:
    """Writes the story as the ids that are there, with its last words somewhere in a tenth of the rows."""
    for row in range(sampled.shape[1]):
        num_ids = int(is_there[:, row].sum())
        latest = num_ids - story.last_words.size
        at = int(rng.integers(0, latest + 1)) if rng.random() < SHARE_STOPPED and latest >= 0 else -1
        sampled[:, row][is_there[:, row]] = story.outputs(row, num_ids, at)
