"""What a book says: how far it is, frames, committed tokens, statistics. All of it is read from shared memory."""

from __future__ import annotations

import weakref
from time import monotonic_ns

import numpy as np

from asyncbook.config import BookConfig
from asyncbook.copies import FrameCopies
from asyncbook.frame import Frame, FrameViews
from asyncbook.ipc.errors import FrameExpired, NotApplied
from asyncbook.ipc.histogram import bucket_of
from asyncbook.ipc.layout import Counter, RowCounter, RunnerHistogram, Word
from asyncbook.ipc.layout import Histogram as HistogramRow
from asyncbook.ipc.publish import Word as SharedWord
from asyncbook.ipc.segment import Segment
from asyncbook.rows import HeldRow, Row, RowRegistry
from asyncbook.stats import Histogram, SpecDecodeStats, Stats, StepHistogram, make_stats, spec_decode_stats


class CommittedState:
    """The part of a book that reads what was committed."""

    _copies: FrameCopies

    def __init__(self, config: BookConfig, segment: Segment) -> None:
        self.config = config
        self._layout = segment.layout
        self._segment = segment
        weakref.finalize(self, segment.close)  # also of a book that nobody closes
        memory = segment.readable()
        words = self._layout.words.view(memory)
        self._frames = FrameViews(self._layout, memory)
        self._token_ids = self._layout.token_ids.view(memory)[:, : config.max_model_len]
        self._is_token_ids = self._layout.is_token_ids.view(memory)[:, : config.max_model_len]
        self._counters = self._layout.counters.view(memory)
        self._row_counters = self._layout.row_counters.view(memory)
        self._histograms = self._layout.histograms.view(memory)
        self._runner_part = segment.runner_part()
        self._runner_histograms = self._layout.runner_histograms.view(self._runner_part, self._layout.runner_offset)
        self._read_histogram = self._runner_histograms[RunnerHistogram.READ].data
        self._published_step = SharedWord(words, Word.PUBLISHED_STEP)
        self._rows = RowRegistry(config.max_num_reqs)
        self._submitted_step = 0
        self._known_applied_step = 0
        self._read_step = 0  # the last one whose frame was looked at
        self._seq = 0  # of the last message

    @property
    def applied_step(self) -> int:
        """The last step that is applied and published, 0 before the first."""
        self._known_applied_step = self._published_step.load_acquire()
        return self._known_applied_step

    @property
    def submitted_step(self) -> int:
        """The last step that was submitted, 0 before the first."""
        return self._submitted_step

    def frame(self, step: int | None = None) -> Frame:
        """Every column as of `step`, by default the last applied one. Raises `NotApplied`, `FrameExpired`."""
        applied_step = self.applied_step
        if step is None:
            step = applied_step
        elif step > applied_step:
            raise NotApplied(f"step {step} is not applied, the last applied one is step {applied_step}")
        self._check_frame(step)
        frame = Frame(step, self._frames, self._copies, self._check_frame)
        if step > self._read_step:
            self._read_step = step
            self._read_histogram[bucket_of(monotonic_ns() - frame.published_ns)] += 1
        return frame

    def _check_frame(self, step: int) -> None:
        if step < 0 or self._submitted_step - step >= self._frames.num_frames:
            raise FrameExpired(
                f"the frame of step {step} is gone: step {self._submitted_step} was submitted since, "
                f"a frame holds for {self._frames.num_frames - 1} later steps"
            )

    def _committed(self, row: Row) -> tuple[HeldRow, int]:
        """Number of committed tokens in the last applied frame."""
        held = self._rows.held(row)
        frame = self.frame()
        if not held.admit_generation <= int(frame.generation[row.index]):
            raise NotApplied(
                f"row {row.index} was given to request {held.request_id!r} after step {frame.step}, "
                f"the last applied one"
            )
        return held, int(frame.num_tokens_no_spec[row.index])

    def token_ids(self, row: Row) -> np.ndarray:
        """int32: committed tokens, prompt included; read-only, no copy. Raises `StaleRow`, `NotApplied`."""
        _, num_tokens_no_spec = self._committed(row)
        return self._token_ids[row.index, :num_tokens_no_spec]

    def output_token_ids(self, row: Row) -> np.ndarray:
        """int32: committed outputs; read-only, no copy. Raises `StaleRow`, `NotApplied`."""
        held, num_tokens_no_spec = self._committed(row)
        return self._token_ids[row.index, held.num_prompt_tokens : num_tokens_no_spec]

    def stats(self) -> Stats:
        """Counters as of now; those of a step that is applied are in. Changes nothing: any thread may call it."""
        applied_step = self._published_step.load_acquire()
        return make_stats(
            self._counters.copy(),
            submitted_steps=self._submitted_step,
            applied_steps=applied_step,
            num_rows_held=self._rows.num_held,
            num_rows_free=self.config.max_num_reqs - self._rows.num_held,
            messages=self._seq,
            num_restarts=self.num_restarts,
            submit_us=Histogram(self._runner_histograms[RunnerHistogram.SUBMIT].copy()),
            queue_us=Histogram(self._histograms[HistogramRow.QUEUE].copy()),
            apply_us=Histogram(self._histograms[HistogramRow.APPLY].copy()),
            wait_for_tokens_us=Histogram(self._histograms[HistogramRow.WAIT_FOR_TOKENS].copy()),
            read_us=Histogram(self._runner_histograms[RunnerHistogram.READ].copy()),
            lag_steps=StepHistogram(self._histograms[HistogramRow.LAG].copy()),
        )

    @property
    def num_restarts(self) -> int:
        """How often another sidecar took the book over."""
        return 0

    def spec_decode_stats(self, row: Row | None = None) -> SpecDecodeStats:
        """What verification accepted so far, in total or for the request in a row; all applied steps are in."""
        _ = self.applied_step  # what was written before it was published is visible below
        if row is None:
            return spec_decode_stats(self._counters, Counter, self.config.num_spec_tokens)
        self._committed(row)
        return spec_decode_stats(self._row_counters[row.index], RowCounter, self.config.num_spec_tokens)
