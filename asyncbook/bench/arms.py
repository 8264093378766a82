"""The arms of the paced and overlapped benchmarks: the same steps, and who keeps the book.

An arm's `submit` is what the runner pays on its way to the next forward pass. Later it waits for the step, and `read`
takes what was delivered, and says when the step could be seen. What arms committed and delivered is compared with
the first arm's at the end of a run (`check_equal`); logprobs are compared with what came with the steps, between rounds
(`settle`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np

import asyncbook
from asyncbook import Book, Logprobs, StepOutputs
from asyncbook.bench.delivered import ArmsDiffer, Delivered, Delivery, without_begun
from asyncbook.bench.per_row_loop import PerRowLists, PerRowLoop
from asyncbook.bench.per_row_outputs import BatchedLogprobs, LogprobColumns, PerRowLogprobs, PerRowText
from asyncbook.bench.story import STOP
from asyncbook.bench.workloads import NUM_PROMPT_TOKENS, Steps
from asyncbook.output_logprobs import TokenLogprobs

LOOP, NUMPY, EMBEDDED, THREAD = "loop", "numpy (PR)", "embedded", "thread"
ZMQ, RING = "sidecar zmq", "sidecar ring"
TIMEOUT_S = 60.0

# Request, ids and finish reason of each output; their texts; their logprobs.
LoopStep = tuple[list[tuple[str, list[int], int]], list[str] | None, list[TokenLogprobs] | LogprobColumns | None]


@dataclass(frozen=True, slots=True)
class Seen:
    """A step that was read: when it was published, on `time.monotonic_ns()`, and how long its bookkeeper worked on it,
    in whatever thread."""

    published_ns: int
    apply_ns: int


class Arm(Protocol):
    """`step` counts from 0. `num_delivered` ids and `checksum`, their sum, are of all outputs so far."""

    num_delivered: int
    checksum: int
    works_elsewhere: bool  # in another thread or process than the runner's

    @property
    def num_applied(self) -> int:
        """How many steps a reader could see now."""

    @property
    def sidecar_pid(self) -> int | None: ...

    def submit(self, step: int) -> None:
        """Hands over what the step sampled."""

    def wait(self, step: int) -> None:
        """Until the step is applied. Steps are waited for and read one after the other."""

    def read(self, step: int) -> Seen:
        """Takes the outputs that are there."""

    def history(self, row: int) -> np.ndarray:
        """Ids that the row's request has put out."""

    def finish_reason(self, row: int) -> int: ...

    def settle(self) -> None:
        """Looks at what was read since the last time. It is no part of what is measured. Raises `ArmsDiffer` for
        logprobs that did not come with the steps."""

    def text(self, row: int) -> str:
        """What was delivered, or could be, of the row's text: all that can become no stop string any more."""

    def cumulative_logprob(self, row: int) -> float: ...


class LoopArm:
    """A loop over the rows, in the runner's thread. Logprobs are objects, or columns where the loop is batched."""

    sidecar_pid = None
    works_elsewhere = False

    def __init__(self, steps: Steps, kind: type[PerRowLoop]) -> None:
        num_rows, prompt, text, logprobs = steps.num_rows, steps.prompt, None, None
        if steps.story is not None:
            text = PerRowText(steps.story.tokenizer, prompt, num_rows, STOP, steps.min_tokens)
        if steps.workload.num_logprobs is not None:
            is_batched, width = issubclass(kind, PerRowLists), 1 + steps.workload.num_logprobs
            logprobs = BatchedLogprobs(num_rows, steps.max_model_len, width) if is_batched else PerRowLogprobs(num_rows)
        self._loop = kind(
            num_rows, steps.max_model_len, NUM_PROMPT_TOKENS, steps.stop_token_ids, steps.min_tokens, text, logprobs
        )
        self._text, self._logprobs = text, logprobs
        self._steps = steps
        self._unread: deque[tuple[Seen, LoopStep]] = deque()
        self._unsettled: list[LoopStep] = []
        self._delivered = Delivered(steps)
        self.num_applied = 0
        self.num_delivered = self.checksum = 0

    def submit(self, step: int) -> None:
        loop, steps = self._loop, self._steps
        start_ns = time.monotonic_ns()
        loop.submit(steps.sampled[step], steps.drafts_of(step), steps.logprobs_of(step))
        end_ns = time.monotonic_ns()
        self._unread.append((Seen(end_ns, end_ns - start_ns), (loop.outputs, loop.texts, loop.logprobs)))
        self.num_applied = step + 1

    def wait(self, step: int) -> None:
        pass

    def read(self, step: int) -> Seen:
        seen, delivered = self._unread.popleft()
        for _, ids, _ in delivered[0]:
            self.num_delivered += len(ids)
            self.checksum += sum(ids)
        if self._text is not None or self._logprobs is not None:
            self._unsettled.append(delivered)
        return seen

    def settle(self) -> None:
        for outputs, texts, logprobs in self._unsettled:
            rows = [int(request_id.removeprefix("request-")) for request_id, _, _ in outputs]
            self._delivered.add(Delivery(rows, [len(ids) for _, ids, _ in outputs], texts, logprobs))
        self._unsettled.clear()

    def history(self, row: int) -> np.ndarray:
        return self._loop.token_ids[row, NUM_PROMPT_TOKENS : self._loop.num_tokens_no_spec[row]]

    def finish_reason(self, row: int) -> int:
        return self._loop.finish_reasons[row]

    def text(self, row: int) -> str:
        if self._text is None:
            return ""
        text = self._delivered.text(row) + self._text.undelivered(row)
        return text if self.finish_reason(row) else without_begun(text, STOP)

    def cumulative_logprob(self, row: int) -> float:
        return 0.0 if self._logprobs is None else float(self._logprobs.cumulative[row])


class BookArm:
    """A book, embedded or with a sidecar."""

    def __init__(self, book: Book, steps: Steps) -> None:
        self.book = book
        self.works_elsewhere = book.sidecar_pid is not None
        self._steps = steps
        prompt, params = steps.prompt, steps.params()
        self._rows = [book.admit(f"request-{row}", prompt, params) for row in range(steps.num_rows)]
        num_spec_tokens = steps.workload.num_spec_tokens
        drafts = [num_spec_tokens] * steps.num_rows if num_spec_tokens else None
        # The whole prompt is computed by the first step, which verifies drafts as well: every step has the same batch.
        self._batch = book.batch(self._rows, num_draft_tokens=drafts)
        self._brings = steps.given is not None or steps.story is not None
        self._unsettled: list[StepOutputs] = []
        self._delivered = Delivered(steps)
        self._cumulative = np.zeros(steps.num_rows)
        self.num_delivered = self.checksum = 0

    @property
    def num_applied(self) -> int:
        return self.book.applied_step

    @property
    def sidecar_pid(self) -> int | None:
        return self.book.sidecar_pid

    def submit(self, step: int) -> None:
        steps = self._steps
        self.book.submit(
            self._batch, steps.sampled[step], logprobs=steps.logprobs_of(step), draft_token_ids=steps.drafts_of(step)
        )

    def wait(self, step: int) -> None:
        self.book.wait_applied(step + 1, TIMEOUT_S)

    def read(self, step: int) -> Seen:
        frame = self.book.frame(step + 1)
        self.count(self.book.poll_outputs())
        return Seen(frame.published_ns, frame.apply_ns)

    def count(self, delivered: Sequence[StepOutputs]) -> None:
        """Counts what was delivered."""
        for outputs in delivered:
            self.num_delivered += outputs.token_ids.size
            self.checksum += int(outputs.token_ids.sum(dtype=np.int64))
        if self._brings:
            self._unsettled += delivered

    def settle(self) -> None:
        for outputs in self._unsettled:
            rows = [int(request_id.removeprefix("request-")) for request_id in outputs.request_ids]
            counts, logprobs, found = np.diff(outputs.offsets).tolist(), None, outputs.logprobs
            k = self._steps.workload.num_logprobs
            if k is not None and found is not None and (found.num_logprobs == k).all():
                shape = (-1, 1 + k)
                logprobs = LogprobColumns(found.token_ids.reshape(shape), found.logprobs.reshape(shape), found.ranks)
                self._cumulative[rows] = found.cumulative
            self._delivered.add(Delivery(rows, counts, outputs.texts, logprobs))
        self._unsettled.clear()

    def text(self, row: int) -> str:
        return self._delivered.text(row)

    def cumulative_logprob(self, row: int) -> float:
        return float(self._cumulative[row])

    def history(self, row: int) -> np.ndarray:
        return self.book.output_token_ids(self._rows[row])

    def finish_reason(self, row: int) -> int:
        return int(self.book.frame().finish_reason[row])


class ThreadArm(BookArm):
    """What one would write first: an embedded book in a thread of the runner's process, fed through a queue. It copies
    what comes, for the sampler's arrays are overwritten while the thread has yet to look at them, and it shares the
    interpreter's lock with the runner."""

    def __init__(self, book: Book, steps: Steps) -> None:
        super().__init__(book, steps)
        self.works_elsewhere = True
        self._todo: SimpleQueue[tuple[int, np.ndarray, np.ndarray | None, Logprobs | None] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Seen, list[StepOutputs]] | BaseException] = SimpleQueue()
        self._waited: deque[tuple[Seen, list[StepOutputs]]] = deque()
        self._num_applied = 0
        self._thread = threading.Thread(target=self._work, name="bookkeeper", daemon=True)
        self._thread.start()

    @property
    def num_applied(self) -> int:
        return self._num_applied

    def submit(self, step: int) -> None:
        drafts, logprobs = self._steps.drafts_of(step), self._steps.logprobs_of(step)
        if logprobs is not None:
            logprobs = Logprobs(*(array.copy() for array in logprobs))
        self._todo.put((step, self._steps.sampled[step].copy(), None if drafts is None else drafts.copy(), logprobs))

    def _work(self) -> None:
        try:
            while (todo := self._todo.get()) is not None:
                step, sampled, drafts, logprobs = todo
                start_ns = time.monotonic_ns()
                self.book.submit(self._batch, sampled, logprobs=logprobs, draft_token_ids=drafts)
                published_ns = time.monotonic_ns()
                self._num_applied = step + 1
                self._done.put((Seen(published_ns, published_ns - start_ns), self.book.poll_outputs()))
        except BaseException as error:
            self._done.put(error)

    def wait(self, step: int) -> None:
        done = self._done.get(timeout=TIMEOUT_S)
        if isinstance(done, BaseException):
            raise done
        self._waited.append(done)

    def read(self, step: int) -> Seen:
        seen, outputs = self._waited.popleft()
        self.count(outputs)
        return seen

    def close(self) -> None:
        """Ends the thread."""
        self._todo.put(None)
        self._thread.join(TIMEOUT_S)


@contextmanager
def _open_loop(steps: Steps) -> Iterator[Arm]:
    yield LoopArm(steps, PerRowLoop)


@contextmanager
def _open_numpy(steps: Steps) -> Iterator[Arm]:
    yield LoopArm(steps, PerRowLists)


@contextmanager
def _open_embedded(steps: Steps) -> Iterator[Arm]:
    with asyncbook.open(steps.config()) as book:
        yield BookArm(book, steps)


@contextmanager
def _open_thread(steps: Steps) -> Iterator[Arm]:
    with asyncbook.open(steps.config()) as book:
        arm = ThreadArm(book, steps)
        try:
            yield arm
        finally:
            arm.close()


@contextmanager
def _open_zmq(steps: Steps) -> Iterator[Arm]:
    with asyncbook.spawn(steps.config(transport="zmq")) as book:
        yield BookArm(book, steps)


@contextmanager
def _open_ring(steps: Steps) -> Iterator[Arm]:
    with asyncbook.spawn(steps.config(transport="ring", idle_policy="cadence")) as book:
        yield BookArm(book, steps)


OpenArm = Callable[[Steps], AbstractContextManager[Arm]]
ARMS: dict[str, OpenArm] = {
    LOOP: _open_loop,
    NUMPY: _open_numpy,
    EMBEDDED: _open_embedded,
    THREAD: _open_thread,
    ZMQ: _open_zmq,
    RING: _open_ring,
}


def settle(name: str, arm: Arm) -> None:
    """Lets an arm look at what it has read. Raises `ArmsDiffer`."""
    try:
        arm.settle()
    except ArmsDiffer as error:
        raise ArmsDiffer(f"{name} {error}") from None


def check_equal(arms: dict[str, Arm], num_rows: int) -> None:
    """Raises `ArmsDiffer` where an arm committed or delivered something else than the first one."""
    (first, expected), *others = arms.items()
    for name, arm in others:
        found, wanted = (arm.num_delivered, arm.checksum), (expected.num_delivered, expected.checksum)
        if found != wanted:
            raise ArmsDiffer(f"{name} delivered {found[0]} ids (sum {found[1]}), {first} {wanted[0]} ({wanted[1]})")
        for row in range(num_rows):
            if not np.array_equal(arm.history(row), expected.history(row)):
                raise ArmsDiffer(f"{name} and {first} differ in the history of row {row}")
            if arm.finish_reason(row) != expected.finish_reason(row):
                raise ArmsDiffer(f"{name} and {first} differ in the finish reason of row {row}")
            if arm.text(row) != expected.text(row):
                raise ArmsDiffer(f"{name} and {first} differ in the text of row {row}")
            if arm.cumulative_logprob(row) != expected.cumulative_logprob(row):
                raise ArmsDiffer(f"{name} and {first} differ in the cumulative logprob of row {row}")
