"""Another process's book, read-only: for monitors, and for ranks that need to know what was committed."""

from __future__ import annotations

import asyncio
import os
import select
import time

import numpy as np

from asyncbook.closing import Closing
from asyncbook.committed import CommittedState
from asyncbook.copies import FrameCopies
from asyncbook.ipc import address as book_address
from asyncbook.ipc.errors import BookClosed, FrameExpired, NotApplied, RunnerDied, SidecarTimeout, StaleRow
from asyncbook.ipc.layout import Counter, RunnerWord, SubmissionWord, Word
from asyncbook.ipc.publish import Word as SharedWord
from asyncbook.ipc.publish import fence
from asyncbook.place import config_at
from asyncbook.rows import Row

LOOK_MS = 1  # between two looks at how far the book is: nobody wakes a process that only reads


class AttachedBook(CommittedState, Closing):
    """Made by `asyncbook.attach`. Costs the book's own process nothing, and cannot change anything in it.

    The book goes on while it is read here, so what is read has to be checked afterwards: `frame.check()`, or a `with`
    block over the frame, raises `FrameExpired` where it may have been overwritten; tokens come as copies that were
    whole. Ends with `close`; arrays and frames taken before stay readable.
    """

    def __init__(self, address: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(address)
        self._address = book_address.read(address)
        segment = book_address.open_segment(self._address)
        super().__init__(config_at(self._address), segment)
        memory = segment.readable()
        words, runner_words = self._layout.words.view(memory), self._layout.runner_words.view(memory)
        self._applied_seq = SharedWord(words, Word.APPLIED_SEQ)
        self._num_restarts = SharedWord(runner_words, RunnerWord.NUM_RESTARTS)
        self._sidecar_pid = SharedWord(runner_words, RunnerWord.SIDECAR_PID)
        self._submissions = self._layout.submissions.view(memory)
        self._released_generations = self._layout.released_generations.view(memory)
        self._copies = FrameCopies(self._frames)
        self._runner = os.pidfd_open(self._address.pid)

    # How far the book is

    @property
    def address(self) -> str:
        """Where the book was found."""
        return self._folder

    @property
    def runner_pid(self) -> int:
        """The process whose book this is."""
        return self._address.pid

    @property
    def sidecar_pid(self) -> int | None:
        """The process that keeps it, None where it is the runner itself."""
        return self._sidecar_pid.load_acquire() or None

    @property
    def submitted_step(self) -> int:
        """The last step that the runner has submitted, or is about to."""
        return max(int(self._submissions[SubmissionWord.STEP]), self.applied_step)

    @property
    def num_restarts(self) -> int:
        return self._num_restarts.load_acquire()

    def check_open(self) -> None:
        """Raises `BookClosed` or `RunnerDied` where the book has ended; what it said last can still be read."""
        if not self._address.owner_lives:
            raise RunnerDied(f"process {self.runner_pid}, whose book this is, has ended")
        if not os.path.exists(self._folder):
            raise BookClosed(f"process {self.runner_pid} has closed the book")

    def wait_applied(self, step: int, timeout_s: float | None = None) -> None:
        """Until `step` is applied, which is looked at every millisecond. Raises `SidecarTimeout`, and `BookClosed` or
        `RunnerDied` where it never will be."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._runner, select.POLLIN)
        while not self._is_applied(step, deadline):
            poll.poll(LOOK_MS)

    async def applied(self, step: int) -> None:
        """`wait_applied` for an event loop."""
        while not self._is_applied(step, None):
            await asyncio.sleep(LOOK_MS / 1000)

    def _is_applied(self, step: int, deadline: float | None) -> bool:
        if self.applied_step >= step:
            return True
        self.check_open()
        if deadline is not None and time.monotonic() >= deadline:
            raise SidecarTimeout(f"step {step} is not applied in time, step {self.applied_step} is the last one")
        return False

    # What it says

    def _check_frame(self, step: int) -> None:
        # The frame of step s is written over with that of s + num_frames, which is begun once the one before is
        # published. What was read was loaded before this fence, and the number of the published one is after it.
        fence()
        applied_step = self.applied_step
        if step < 0 or applied_step - step >= self._frames.num_frames - 1:
            raise FrameExpired(
                f"the frame of step {step} is gone: step {applied_step} was applied since, "
                f"a frame holds for {self._frames.num_frames - 2} later ones"
            )

    def rows(self) -> list[Row]:
        """Handles of all rows that a request holds, as of the last applied step."""
        generation, num_prompt_tokens, _, _ = self._now()
        return [Row(index, int(generation[index])) for index in np.flatnonzero(num_prompt_tokens).tolist()]

    def _now(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Copies of `generation`, `num_prompt_tokens` and `num_tokens_no_spec` of the last applied step, and its
        number."""
        while True:
            try:
                with self.frame() as frame:
                    columns = frame.generation.copy(), frame.num_prompt_tokens.copy(), frame.num_tokens_no_spec.copy()
                return *columns, frame.step
            except FrameExpired:  # the book is quicker than this process: what it says now is as good
                continue

    def _committed(self, row: Row) -> tuple[int, int]:
        index, generation = row
        if not 0 <= index < self.config.max_num_reqs:
            raise StaleRow(f"{row!r} names no row, expected an index below {self.config.max_num_reqs}")
        generations, num_prompt_tokens, num_tokens_no_spec, step = self._now()
        now, lengths = int(generations[index]), (int(num_prompt_tokens[index]), int(num_tokens_no_spec[index]))
        if now < generation:
            raise NotApplied(f"row {index} has no generation {generation} yet at step {step}, the last one")
        if now > generation or lengths[0] == 0 or self._is_released(row):
            raise StaleRow(f"row {index} was released, renamed or given away since generation {generation}")
        return lengths

    def _is_released(self, row: Row) -> bool:
        """A row's tokens go after this was stored; see `Ledger._release`. To be asked once they are copied."""
        fence()
        return int(self._released_generations[row.index]) >= row.generation

    def _whole(self, row: Row, tokens: np.ndarray) -> np.ndarray:
        copied = tokens.copy()
        if self._is_released(row):
            raise StaleRow(f"row {row.index} was released in generation {row.generation}")
        copied.flags.writeable = False
        return copied

    def token_ids(self, row: Row) -> np.ndarray:
        """int32: committed tokens, prompt included; a copy. Raises `StaleRow`, `NotApplied`."""
        return self._whole(row, super().token_ids(row))

    def output_token_ids(self, row: Row) -> np.ndarray:
        """int32: committed outputs; a copy. Raises `StaleRow`, `NotApplied`."""
        return self._whole(row, super().output_token_ids(row))

    @property
    def _num_rows_held(self) -> int:
        return int(self._counters[Counter.ADMITTED] - self._counters[Counter.RELEASED])

    @property
    def _num_messages(self) -> int:
        return self._applied_seq.load_acquire()

    # Ends

    def close(self) -> None:
        """Lets go of the book. Idempotent."""
        self._segment.close()
        if self._runner >= 0:
            os.close(self._runner)
            self._runner = -1
