"""What vLLM is asked in the tests that compare it with itself: for each scenario an engine and its requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "one two three four five one two three four five one two three",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef",
    "Name the planets of the solar system in order, one per line.",
    "A B C D E F G A B C D E F G A B C D",
    "Hello",
    "Write a shopping list for a simple vegetable soup for four people.",
    "In the beginning the committee wrote down what had been agreed upon at the last meeting. " * 9,
)


@dataclass(frozen=True)
class Scenario:
    """`params(number)`: the sampling of request `number`; `at_once` requests join a step; `aborts`: after which step
    which requests are aborted."""

    engine: str
    num_requests: int
    params: Callable[[int], dict[str, Any]]
    at_once: int = 3
    aborts: dict[int, tuple[int, ...]] | None = None

    def requests(self, tokenizer: Any) -> list[tuple[list[int], Any]]:
        """Prompt ids and `SamplingParams`."""
        from vllm import SamplingParams

        asked = []
        for number in range(self.num_requests):
            # Every text at other lengths, so that blocks fill up at different steps.
            ids = tokenizer.encode(TEXTS[number % len(TEXTS)])[: 180 - 5 * (number // len(TEXTS))]
            asked.append((ids, SamplingParams(**{"temperature": 0.0, "max_tokens": 28} | self.params(number))))
        return asked

    def after_step(self, engine: Any, step: int) -> None:
        """Aborts whom it says."""
        numbers = (self.aborts or {}).get(step, ())
        if numbers:
            engine.abort_request([f"request-{number}" for number in numbers])


def one_of(*options: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    """The options in turn."""
    return lambda number: options[number % len(options)]


def seeded(number: int) -> dict[str, Any]:
    return {"temperature": 0.9, "top_p": 0.95, "top_k": 50 if number % 2 else 0, "seed": number}


PENALTIES = one_of(
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.6, "temperature": 0.7, "seed": 3},
    {"repetition_penalty": 1.3},
    {"bad_words": [" the", " and", " Paris"]},
    {},
)
LOGPROBS = one_of({"logprobs": 5}, {"prompt_logprobs": 3}, {"logprobs": 0, "prompt_logprobs": 0}, {})
ENDS = one_of(
    {"min_tokens": 12, "stop_token_ids": [30, 28]},
    {"stop": [".", "\n"]},
    {"stop": ["four", "a, b"], "include_stop_str_in_output": True},
    {"stop_token_ids": [30, 28, 198]},
    {"stop_token_ids": [*range(300, 312)]},  # more than the columns have
    {"ignore_eos": True, "max_tokens": 45},
    {"max_tokens": 1},
    {"max_tokens": 400, "ignore_eos": True},  # ends at max_model_len
    {"stop": ["zzz"], "min_tokens": 5},
)
MIXED_GREEDY: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 2},
    {"presence_penalty": 0.5, "stop": ["."]},
    {"stop_token_ids": [198], "prompt_logprobs": 1},
    {"max_tokens": 3},
    {"min_tokens": 10, "ignore_eos": True, "max_tokens": 70},
    {"detokenize": False, "bad_words": [" of"]},
)
# vLLM 0.32's CPU build cannot sample everywhere. It fails at a prompt's chunk that is not its last if the request has a
# seed ("CPU Generator does not use offset"); and where a request is not greedy, it verifies drafts by values nobody
# wrote, since a Triton kernel would. So sampling is compared where prompts come whole, and without drafts.
MIXED = one_of(
    *({"temperature": 0.8, "seed": 11} | option if "logprobs" in option else option for option in MIXED_GREEDY)
)
ABORTS = {4: (0,), 9: (1, 5), 15: (7, 8, 9), 16: (8, 20)}

SCENARIOS: dict[str, Scenario] = {
    "greedy": Scenario("plain", 16, one_of({}), at_once=16),
    "seeded sampling": Scenario("plain", 12, seeded),
    "penalties and bad words": Scenario("plain", 15, PENALTIES),
    "logprobs": Scenario("plain", 12, LOGPROBS),
    "ends": Scenario("plain", 16, ENDS),
    "aborts": Scenario("plain", 22, one_of({"max_tokens": 40, "ignore_eos": True}), aborts=ABORTS),
    "mixed": Scenario("plain", 21, MIXED),
    "chunked prefill": Scenario("tight", 12, one_of({"max_tokens": 8}), at_once=12),
    "preemption": Scenario("tight", 20, one_of({"max_tokens": 60, "ignore_eos": True}, {"max_tokens": 40})),
    "preemption, mixed": Scenario("tight", 21, one_of(*MIXED_GREEDY)),
    "aborts under preemption": Scenario("tight", 22, one_of({"max_tokens": 60, "ignore_eos": True}), aborts=ABORTS),
    "drafts": Scenario("ngram", 16, one_of({"max_tokens": 45}), at_once=16),
    "drafts, ends": Scenario("ngram", 16, ENDS),
    "drafts, logprobs": Scenario("ngram", 12, LOGPROBS),
    "drafts, mixed": Scenario("ngram", 21, one_of(*MIXED_GREEDY)),
    "drafts, aborts": Scenario("ngram", 22, one_of({"max_tokens": 50, "ignore_eos": True}), aborts=ABORTS),
    "drafts under preemption": Scenario("ngram-tight", 20, one_of({"max_tokens": 70, "ignore_eos": True}, {})),
}
