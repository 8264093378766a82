"""A small engine that runs ahead of its book: steps are launched, submitted and applied at three different times.

Its model is deterministic (the next token is a hash of all tokens before it), so what a request must put out is known,
however the engine chunks, preempts, resumes, rewinds, releases and re-admits it meanwhile.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from asyncbook import Batch, Book, FinishReason, RequestParams, Row
from tests.property.operations import SeededChoices, once_in, pick
from tests.property.pace import SidecarPace

TIMEOUT_S = 60.0
GARBAGE = 0  # what a partial prefill samples; nobody may ever see it


def next_token(tokens: list[int], vocab_size: int) -> int:
    """The model."""
    return zlib.crc32(np.array(tokens, np.int32).tobytes()) % vocab_size


def run_synchronously(prompt: list[int], params: RequestParams, vocab_size: int, max_model_len: int) -> Finished:
    """What a runner gives that waits for every token and looks at it before the next."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, vocab_size))
        outputs = tokens[len(prompt) :]
        is_end = tokens[-1] in params.stop_token_ids or (tokens[-1] in params.eos_token_ids and not params.ignore_eos)
        if is_end and len(outputs) > params.min_tokens:
            return Finished(outputs, FinishReason.STOP)
        if len(outputs) == params.max_tokens or len(tokens) >= max_model_len:
            return Finished(outputs, FinishReason.LENGTH)


@dataclass(frozen=True)
class Finished:
    """The end of a request."""

    outputs: list[int]
    reason: FinishReason


@dataclass(eq=False)
class Request:
    """A request as the engine sees it. `tokens` are those on its device, also what no step has told the book yet."""

    request_id: str
    prompt: list[int]
    params: RequestParams
    expected: Finished
    row: Row
    tokens: list[int]
    num_computed: int
    num_told: int  # tokens that the book knows from admissions and submitted steps, if it did not end the request
    is_preempted: bool = False
    drops_in_flight: bool = False
    is_stopped: bool = False  # by an abort or a release
    delivered: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE
    num_aborts_to_come: int = 0  # ABORTs of rows that it was released from and admitted again


@dataclass
class LaunchedStep:
    """Sampled, and not yet submitted. `told`: how far the book knows a request once it has the step."""

    batch: Batch
    sampled: np.ndarray
    drafts: np.ndarray | None
    told: list[tuple[Request, Row, int]]


class LaggingEngine:
    """Launches steps up to `lag` ahead of what it submits."""

    def __init__(self, book: Book, choices: SeededChoices, lag: int) -> None:
        self.book, self.choices, self.lag = book, choices, lag
        self.config = book.config
        self.pace = SidecarPace(book)
        self.launched: deque[LaunchedStep] = deque()
        self.held: list[Request] = []
        self.requests: list[Request] = []

    # Requests

    def admit(self) -> None:
        """A new request, while there is a row."""
        if len(self.held) == self.config.max_num_reqs:
            return
        choices, config = self.choices, self.config
        longest = config.max_model_len if once_in(choices, 8) else config.max_model_len // 2
        prompt = [choices.integer(0, config.vocab_size - 1) for _ in range(choices.integer(1, longest))]
        params = RequestParams(
            max_tokens=pick(choices, (None, None, 1, 2, 5, 9)),
            min_tokens=pick(choices, (0, 0, 3)),
            eos_token_id=choices.integer(0, config.vocab_size - 1),
            stop_token_ids=(choices.integer(0, config.vocab_size - 1),),
            ignore_eos=once_in(choices, 3),
        )
        expected = run_synchronously(prompt, params, config.vocab_size, config.max_model_len)
        request_id = f"request-{len(self.requests)}"
        row = self.book.admit(request_id, prompt, params)
        request = Request(request_id, prompt, params, expected, row, list(prompt), 0, len(prompt))
        self.held.append(request)
        self.requests.append(request)

    def _restart(self, request: Request, row: Row, num_computed: int) -> None:
        """A new handle: what was launched under the old one, and not submitted, is lost and will be computed again."""
        request.row = row
        request.tokens = request.tokens[: request.num_told]
        request.num_computed = num_computed
        request.is_preempted = request.drops_in_flight = False

    def _some_computed(self, request: Request) -> int:
        """What is left to compute is at least one token of those that the book knows."""
        return self.choices.integer(0, min(request.num_told, self.config.max_model_len) - 1)

    def preempt(self, request: Request) -> None:
        """What is in flight is delivered, or dropped: what was to be delivered may be dropped after all."""
        request.drops_in_flight |= once_in(self.choices, 2)
        request.is_preempted = True
        self.book.preempt(request.row, drop_in_flight=request.drops_in_flight)

    def resume(self, request: Request) -> None:
        num_computed = self._some_computed(request) if once_in(self.choices, 2) else 0
        self._restart(request, self.book.resume(request.row, num_computed_tokens=num_computed), num_computed)

    def rewind(self, request: Request) -> None:
        num_computed = self._some_computed(request)
        self._restart(request, self.book.rewind(request.row, num_computed), num_computed)

    def abort(self, request: Request) -> None:
        request.is_stopped = True
        self.book.abort(request.row)

    def release(self, request: Request) -> None:
        request.is_stopped = True
        self.held.remove(request)
        self.book.release(request.row)

    def readmit(self, request: Request) -> None:
        """Releases the row, and gives the request another one with what it has put out so far."""
        self.pace.wake()
        self.book.wait_applied(self.book.submitted_step, TIMEOUT_S)
        if self.book.submitted_step == 0 or self.book.frame().generation[request.row.index] < request.row.generation:
            return  # the book shows nothing of it yet
        if self.book.frame().finish_reason[request.row.index]:
            return
        outputs = request.tokens[len(request.prompt) : request.num_told]
        assert self.book.output_token_ids(request.row).tolist() == outputs
        self.book.release(request.row)
        request.num_aborts_to_come += 1
        num_computed = self._some_computed(request) if once_in(self.choices, 2) else 0
        row = self.book.admit(
            request.request_id,
            request.prompt,
            request.params,
            output_token_ids=outputs,
            num_computed_tokens=num_computed,
        )
        self._restart(request, row, num_computed)

    # Steps

    def launch(self) -> None:
        """Samples for some of the running requests, in any order."""
        choices = self.choices
        running = [request for request in self.held if not (request.is_preempted or request.is_stopped)]
        taking_part = [request for request in running if not once_in(choices, 5)]
        for i in range(len(taking_part) - 1, 0, -1):
            j = choices.integer(0, i)
            taking_part[i], taking_part[j] = taking_part[j], taking_part[i]
        rows = [request.row for request in taking_part]
        scheduled, num_drafts, ids, told, is_default = [], [], [], [], once_in(choices, 2)
        for request in taking_part:
            left = len(request.tokens) - request.num_computed
            count = choices.integer(1, left) if once_in(choices, 2) and not is_default else left
            d = choices.integer(0, self.config.num_spec_tokens) if count == left and once_in(choices, 2) else 0
            sampled = self._forward(request, count, d)
            scheduled.append(count + d)
            num_drafts.append(d)
            ids.append(sampled)
            told.append((request, request.row, len(request.tokens)))
        batch = self.book.batch(
            rows, num_scheduled_tokens=None if is_default else scheduled, num_draft_tokens=num_drafts
        )
        self.launched.append(LaunchedStep(batch, self._padded(ids), self._proposals(len(rows)), told))

    def _forward(self, request: Request, count: int, d: int) -> list[int]:
        """Computes `count` tokens and verifies `d` drafts, of which any number is right."""
        request.num_computed += count
        if request.num_computed < len(request.tokens):
            return [GARBAGE] * self.choices.integer(0, 1)
        if once_in(self.choices, 12):  # nothing was sampled: the last token is computed again
            request.num_computed -= 1
            return []
        num_accepted = self.choices.integer(0, d)
        sampled = []
        for _ in range(num_accepted + 1):
            sampled.append(next_token(request.tokens, self.config.vocab_size))
            request.tokens.append(sampled[-1])
        request.num_computed += num_accepted
        return sampled

    def _padded(self, ids: list[list[int]]) -> np.ndarray:
        sampled = np.full((len(ids), 1 + self.config.num_spec_tokens), -1, np.int32)
        for i, row in enumerate(ids):
            sampled[i, : len(row)] = row
        return sampled

    def _proposals(self, n: int) -> np.ndarray | None:
        """Drafts that are shown to the book; what it does with them changes no output."""
        if not self.config.num_spec_tokens or once_in(self.choices, 2):
            return None
        width = self.choices.integer(1, self.config.num_spec_tokens)
        ids = [self.choices.integer(-1, self.config.vocab_size - 1) for _ in range(n * width)]
        return np.array(ids, np.int32).reshape(n, width)

    def submit(self) -> None:
        """The oldest launched step."""
        step = self.launched.popleft()
        if self.pace.is_full:
            self.pace.wake()
        if not self.pace.is_paused:
            self.book.wait_room(TIMEOUT_S)
        self.book.submit(step.batch, step.sampled, draft_token_ids=step.drafts)
        for request, row, num_tokens in step.told:
            if request.row == row and not request.drops_in_flight and not request.is_stopped:
                request.num_told = num_tokens

    # Outputs

    def poll(self) -> None:
        """Takes what was delivered. A request that ended gives its row back, sooner or later."""
        self.pace.wake()
        for outputs in self.book.poll_outputs():
            for request_id, token_ids, finish_reason, *_ in outputs:
                request = self.requests[int(request_id.removeprefix("request-"))]
                assert request.finish_reason is FinishReason.NONE, f"{request_id} goes on after its end"
                request.delivered += token_ids.tolist()
                if finish_reason is FinishReason.ABORT and request.num_aborts_to_come:
                    request.num_aborts_to_come -= 1
                else:
                    request.finish_reason = finish_reason
        for request in list(self.held):
            if request.finish_reason is not FinishReason.NONE and not once_in(self.choices, 4):
                self.release(request)

    def check_request(self, request: Request) -> None:
        """So far, a request has put out what it must."""
        outputs = request.expected.outputs
        assert request.delivered == outputs[: len(request.delivered)], request
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (request.delivered, request.finish_reason) == (outputs, request.expected.reason), request
        elif request.finish_reason is FinishReason.ABORT:
            assert request.is_stopped, request
        else:
            assert request.finish_reason is FinishReason.NONE, request
