"""Every byte of the shared segment, declared once.

    offset 0   +-------------------------------------------------------------+
               | OWNER       what book this is; written once, before anybody | page 0
               +-------------------------------------------------------------+
               | BOOKKEEPER  hot words, one a cache line                     | page 1   written by the bookkeeper
               | stamps      one line a frame slot                           |
               | counters, histograms, counters of each row                  |
               | outputs     a ring of records, see `ipc/outputs_log.py`     |
               | checkpoints two, in turn: all that the ledger knows beside  |
               |             the table, for the process that takes it over   |
               +-------------------------------------------------------------+
               | RUNNER      hot words, one a cache line                     |          written by the runner
               | submissions, histograms                                     |
               | sample ring: headers, ids int32, drafts int32, logprobs; a  |          (ids by its device, too)
               |             slot for each step in flight                    |
               +-------------------------------------------------------------+
               | frames      num_frames slots; in each, one after the other, |          written by the bookkeeper
               |             the columns: int32 x 8, uint32, uint8           |
               +-------------------------------------------------------------+
               | token_ids      int32 [max_num_reqs, max_model_len]          |          sparse; bookkeeper
               | is_token_ids   bool  [max_num_reqs, max_model_len]          |          sparse; bookkeeper
               | logprobs       an entry an output, see `ipc/logprobs.py`     |          sparse; bookkeeper
               | overflow       outputs that had to go before they were read |          sparse; bookkeeper
               | broadcast      outputs once more, for other processes       |          sparse; bookkeeper
               +-------------------------------------------------------------+

Every part starts on a page, so that each can be mapped with the rights its reader needs and pinned by itself. Every
column and every table row starts on a cache line. A word is an int64 alone on its line. Little-endian throughout.
"""

from __future__ import annotations

import hashlib
import math
import sys
from dataclasses import dataclass

import numpy as np

from asyncbook.ipc.words import (
    BROADCAST_LOG_BYTES,
    COLUMN_DTYPES,
    FINISH_REASON_COLUMN,
    HISTOGRAM_SUB_BITS,
    LINE_BYTES,
    MAX_MESSAGES_BETWEEN_CHECKPOINTS,
    MAX_SUBSCRIBERS,
    MIN_OUTPUTS_LOG_BYTES,
    NAMES_RECORD,
    NO_WAKE,
    NUM_CHECKPOINTS,
    NUM_HISTOGRAM_BUCKETS,
    NUM_INT32_COLUMNS,
    OVERFLOW_LOG_BYTES,
    PADDING_RECORD,
    WORDS_PER_LINE,
    CheckpointWord,
    Column,
    Counter,
    DropWord,
    Field,
    FinishReason,
    Histogram,
    Owner,
    RecordWord,
    RowCounter,
    RunnerHistogram,
    RunnerWord,
    SlotWord,
    Stamp,
    SubmissionWord,
    SubscriberWord,
    Word,
)

assert sys.byteorder == "little", "the layout is little-endian; no big-endian machine has been tried"

LAYOUT_VERSION = 4
MAGIC = 0x4B4F4F42434E5341  # "ASNCBOOK" as bytes
PAGE_BYTES = 4096
MAX_ROWS = 1 << 20
MAX_POSITIONS = 1 << 28
MAX_IN_FLIGHT = 64
MAX_SPEC_TOKENS = 256
MAX_LOGPROBS = 1024
NO_LOGPROBS = -1  # max_logprobs of a book without logprobs

INT32_MIN = -(2**31)
INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1

__all__ = [
    "BROADCAST_LOG_BYTES",
    "COLUMN_DTYPES",
    "FINISH_REASON_COLUMN",
    "HISTOGRAM_SUB_BITS",
    "INT32_MAX",
    "INT32_MIN",
    "LAYOUT_VERSION",
    "LINE_BYTES",
    "MAGIC",
    "MAX_IN_FLIGHT",
    "MAX_LOGPROBS",
    "MAX_MESSAGES_BETWEEN_CHECKPOINTS",
    "MAX_POSITIONS",
    "MAX_ROWS",
    "MAX_SPEC_TOKENS",
    "MAX_SUBSCRIBERS",
    "MIN_OUTPUTS_LOG_BYTES",
    "NAMES_RECORD",
    "NO_LOGPROBS",
    "NO_WAKE",
    "NUM_CHECKPOINTS",
    "NUM_HISTOGRAM_BUCKETS",
    "NUM_INT32_COLUMNS",
    "OVERFLOW_LOG_BYTES",
    "PADDING_RECORD",
    "PAGE_BYTES",
    "UINT32_MAX",
    "WORDS_PER_LINE",
    "CheckpointWord",
    "Column",
    "Counter",
    "DropWord",
    "Field",
    "FinishReason",
    "Histogram",
    "Layout",
    "Owner",
    "RecordWord",
    "Region",
    "RowCounter",
    "RunnerHistogram",
    "RunnerWord",
    "SlotWord",
    "Stamp",
    "SubmissionWord",
    "SubscriberWord",
    "Word",
    "layout_hash",
]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Region:
    """A named C-contiguous array in the segment: where it starts, its shape and its dtype."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def view(self, buffer: memoryview | bytearray, base: int = 0) -> np.ndarray:
        """The array over `buffer`, which starts at segment offset `base`. Writable where the buffer is."""
        return np.ndarray(self.shape, self.dtype, buffer, self.offset - base)

    @property
    def end(self) -> int:
        """Offset of the first byte behind the region."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def _region(name: str, offset: int, shape: tuple[int, ...], dtype: type) -> Region:
    return Region(name, offset, shape, np.dtype(dtype))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is, for one size of book. Equal dimensions give equal layouts in every process."""

    max_num_reqs: int
    max_model_len: int
    num_spec_tokens: int
    max_in_flight: int
    max_logprobs: int = NO_LOGPROBS

    def __post_init__(self) -> None:
        assert 1 <= self.max_num_reqs <= MAX_ROWS
        assert 1 <= self.max_model_len <= MAX_POSITIONS
        assert 0 <= self.num_spec_tokens <= MAX_SPEC_TOKENS
        assert 1 <= self.max_in_flight <= MAX_IN_FLIGHT
        assert NO_LOGPROBS <= self.max_logprobs <= MAX_LOGPROBS

    @property
    def num_frames(self) -> int:
        """Slots of the frame ring: one being written, max_in_flight submitted behind it, one held by the reader."""
        return self.max_in_flight + 2

    @property
    def num_counters(self) -> int:
        return Counter.ACCEPTED_PER_POS + self.num_spec_tokens

    @property
    def has_logprobs(self) -> bool:
        """Whether requests may ask for logprobs."""
        return self.max_logprobs != NO_LOGPROBS

    @property
    def entry_size(self) -> int:
        """int32 values of the largest entry of logprobs (`ipc/logprobs.py`); 0 in a book without."""
        return 1 + 2 * (1 + self.max_logprobs) if self.has_logprobs else 0

    @property
    def padded_rows(self) -> int:
        """Values in a column, padding included, so that each column starts on a cache line."""
        return _round_up(self.max_num_reqs, LINE_BYTES)

    # OWNER page
    @property
    def owner(self) -> Region:
        return _region("owner", 0, (PAGE_BYTES // 8,), np.int64)

    # BOOKKEEPER part
    @property
    def bookkeeper_offset(self) -> int:
        return PAGE_BYTES

    @property
    def words(self) -> Region:
        return _region("words", self.bookkeeper_offset, (len(Word) * WORDS_PER_LINE,), np.int64)

    @property
    def stamps(self) -> Region:
        return _region("stamps", self.words.end, (self.num_frames, WORDS_PER_LINE), np.int64)

    @property
    def counters(self) -> Region:
        return _region("counters", self.stamps.end, (_round_up(self.num_counters, WORDS_PER_LINE),), np.int64)

    @property
    def histograms(self) -> Region:
        return _region("histograms", self.counters.end, (len(Histogram), NUM_HISTOGRAM_BUCKETS), np.int64)

    @property
    def row_counters(self) -> Region:
        """int64 [max_num_reqs, len(RowCounter) - 1 + num_spec_tokens]: acceptance of the request in each row."""
        shape = (self.max_num_reqs, RowCounter.ACCEPTED_PER_POS + self.num_spec_tokens)
        return _region("row_counters", self.histograms.end, shape, np.int64)

    @property
    def max_record_lines(self) -> int:
        """Lines of a record with every row's ids of one step, and their logprobs."""
        num_values = 1 + self.max_num_reqs * (4 + 1 + self.num_spec_tokens)
        if self.has_logprobs:
            num_values += 1 + self.max_num_reqs * (4 + (1 + self.num_spec_tokens) * self.entry_size)
        return 1 + -(-4 * num_values // LINE_BYTES)

    @property
    def outputs_log(self) -> Region:
        """int64 [lines, WORDS_PER_LINE]: room for several full steps, small enough to stay in a cache."""
        lines = max(MIN_OUTPUTS_LOG_BYTES // LINE_BYTES, 4 * self.max_record_lines)
        offset = _round_up(self.row_counters.end, LINE_BYTES)
        return _region("outputs_log", offset, (lines, WORDS_PER_LINE), np.int64)

    def _checkpoint_offset(self, slot: int) -> int:
        """Where a checkpoint starts: the first one behind the outputs log, each other behind the one before."""
        if slot == 0:
            return self.outputs_log.end
        return _round_up(self.checkpoint_row_counters(slot - 1).end, LINE_BYTES)

    def checkpoint_header(self, slot: int) -> Region:
        """int64 words of `CheckpointWord`."""
        return _region(f"checkpoint_header[{slot}]", self._checkpoint_offset(slot), (WORDS_PER_LINE,), np.int64)

    def checkpoint_counters(self, slot: int) -> Region:
        """A copy of `counters`."""
        offset = self.checkpoint_header(slot).end
        return _region(f"checkpoint_counters[{slot}]", offset, self.counters.shape, np.int64)

    def checkpoint_work(self, slot: int) -> Region:
        """int32 [len(Field), padded_rows]: a copy of the ledger's columns."""
        offset = self.checkpoint_counters(slot).end
        return _region(f"checkpoint_work[{slot}]", offset, (len(Field), self.padded_rows), np.int32)

    def checkpoint_row_counters(self, slot: int) -> Region:
        """A copy of `row_counters`."""
        offset = self.checkpoint_work(slot).end
        return _region(f"checkpoint_row_counters[{slot}]", offset, self.row_counters.shape, np.int64)

    @property
    def drops(self) -> Region:
        """int64 [notes, words of `DropWord`]: what was dropped since the newest checkpoint; a message drops one."""
        shape = (MAX_MESSAGES_BETWEEN_CHECKPOINTS, len(DropWord))
        return _region("drops", self._checkpoint_offset(NUM_CHECKPOINTS), shape, np.int64)

    @property
    def subscribers(self) -> Region:
        """int64 [MAX_SUBSCRIBERS, words of `SubscriberWord`]: who the outputs are broadcast for."""
        return _region("subscribers", self.drops.end, (MAX_SUBSCRIBERS, len(SubscriberWord)), np.int64)

    @property
    def released_generations(self) -> Region:
        """uint32 [padded_rows]: the row's generation when it was released last, stored before its tokens go."""
        return _region("released_generations", self.subscribers.end, (self.padded_rows,), np.uint32)

    # RUNNER part
    @property
    def runner_offset(self) -> int:
        return _round_up(self.released_generations.end, PAGE_BYTES)

    @property
    def runner_words(self) -> Region:
        return _region("runner_words", self.runner_offset, (len(RunnerWord) * WORDS_PER_LINE,), np.int64)

    @property
    def num_ring_slots(self) -> int:
        """Slots of the sample ring: step s + max_in_flight is not submitted before step s is applied."""
        return self.max_in_flight

    @property
    def submissions(self) -> Region:
        """int64 words of `SubmissionWord`."""
        num_words = _round_up(SubmissionWord.FIRST_NS + self.num_ring_slots, WORDS_PER_LINE)
        return _region("submissions", self.runner_words.end, (num_words,), np.int64)

    @property
    def runner_histograms(self) -> Region:
        return _region(
            "runner_histograms", self.submissions.end, (len(RunnerHistogram), NUM_HISTOGRAM_BUCKETS), np.int64
        )

    @property
    def ring_headers(self) -> Region:
        """int64 [num_ring_slots, words of `SlotWord`]."""
        shape = (self.num_ring_slots, 2 * WORDS_PER_LINE)
        return _region("ring_headers", self.runner_histograms.end, shape, np.int64)

    @property
    def ring_token_ids(self) -> Region:
        """int32 [num_ring_slots, ids]: [n, width] from the start of the slot."""
        num_ids = _round_up(self.max_num_reqs * (1 + self.num_spec_tokens), LINE_BYTES // 4)
        return _region("ring_token_ids", self.ring_headers.end, (self.num_ring_slots, num_ids), np.int32)

    @property
    def ring_draft_token_ids(self) -> Region:
        """int32 [num_ring_slots, ids]: [n, draft width] from the start of the slot."""
        num_ids = _round_up(self.max_num_reqs * self.num_spec_tokens, LINE_BYTES // 4)
        return _region("ring_draft_token_ids", self.ring_token_ids.end, (self.num_ring_slots, num_ids), np.int32)

    @property
    def ring_logprobs(self) -> Region:
        """int32 [num_ring_slots, values]: the entries of the step's ids from the start of the slot, see
        `ipc/logprobs.py`."""
        size = _round_up(self.max_num_reqs * (1 + self.num_spec_tokens) * self.entry_size, LINE_BYTES // 4)
        return _region("ring_logprobs", self.ring_draft_token_ids.end, (self.num_ring_slots, size), np.int32)

    @property
    def runner_end(self) -> int:
        return _round_up(self.ring_logprobs.end, PAGE_BYTES)

    # Frames
    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame: all of its columns, one block, whole cache lines."""
        return self.padded_rows * (4 * NUM_INT32_COLUMNS + 1)

    @property
    def frames_offset(self) -> int:
        return self.runner_end

    def frame_int32(self, slot: int) -> Region:
        """int32 [NUM_INT32_COLUMNS, padded_rows] of a slot, rows in the order of `Column`."""
        offset = self.frames_offset + slot * self.frame_bytes
        return _region(f"frame_int32[{slot}]", offset, (NUM_INT32_COLUMNS, self.padded_rows), np.int32)

    def frame_uint8(self, slot: int) -> Region:
        """uint8 [padded_rows] of a slot: the column `finish_reason`."""
        return _region(f"frame_uint8[{slot}]", self.frame_int32(slot).end, (self.padded_rows,), np.uint8)

    # Table
    @property
    def table_offset(self) -> int:
        return _round_up(self.frames_offset + self.num_frames * self.frame_bytes, PAGE_BYTES)

    @property
    def token_ids(self) -> Region:
        """int32 [max_num_reqs, max_model_len and padding]: rows are whole cache lines."""
        padded_len = _round_up(self.max_model_len, LINE_BYTES // 4)
        return _region("token_ids", self.table_offset, (self.max_num_reqs, padded_len), np.int32)

    @property
    def is_token_ids(self) -> Region:
        """bool [max_num_reqs, max_model_len and padding]."""
        offset = _round_up(self.token_ids.end, PAGE_BYTES)
        padded_len = _round_up(self.max_model_len, LINE_BYTES)
        return _region("is_token_ids", offset, (self.max_num_reqs, padded_len), np.bool_)

    @property
    def logprobs(self) -> Region:
        """int32 [max_num_reqs, values and padding]: in each row an entry for each of its outputs, one after the other,
        of the size that the row's request asks for (`ipc/logprobs.py`); no values in a book without logprobs."""
        size = _round_up(self.max_model_len * self.entry_size, LINE_BYTES // 4)
        return _region("logprobs", _round_up(self.is_token_ids.end, PAGE_BYTES), (self.max_num_reqs, size), np.int32)

    @property
    def overflow_log(self) -> Region:
        """int64 [lines, WORDS_PER_LINE]: what cannot wait in a row because the row is given away. Sparse."""
        offset = _round_up(self.logprobs.end, PAGE_BYTES)
        return _region("overflow_log", offset, (OVERFLOW_LOG_BYTES // LINE_BYTES, WORDS_PER_LINE), np.int64)

    @property
    def broadcast_log(self) -> Region:
        """int64 [lines, WORDS_PER_LINE]: what was delivered last, for subscribers; room for several full steps. Sparse:
        it costs nothing while there are none."""
        lines = max(BROADCAST_LOG_BYTES // LINE_BYTES, 4 * self.max_record_lines)
        offset = _round_up(self.overflow_log.end, PAGE_BYTES)
        return _region("broadcast_log", offset, (lines, WORDS_PER_LINE), np.int64)

    @property
    def total_bytes(self) -> int:
        return _round_up(self.broadcast_log.end, PAGE_BYTES)


def layout_hash() -> str:
    """16 hex digits that change when a name, an index, an offset, a shape or a dtype above changes."""
    sample = Layout(max_num_reqs=7, max_model_len=33, num_spec_tokens=3, max_in_flight=2, max_logprobs=5)
    regions = [value for value in (getattr(sample, name) for name in dir(sample)) if isinstance(value, Region)]
    checkpoint = [sample.checkpoint_header(1), sample.checkpoint_counters(1), sample.checkpoint_work(1)]
    parts = [repr([sample.frame_int32(1), sample.frame_uint8(1), *checkpoint, *regions])]
    for words in (
        Owner, Word, RunnerWord, SlotWord, Stamp, Column, Field, CheckpointWord, DropWord, RecordWord, Counter,
        RowCounter, Histogram, RunnerHistogram, SubmissionWord, SubscriberWord, FinishReason,
    ):  # fmt: skip
        parts.append(repr([(word.name, word.value) for word in words]))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


# What the drawing promises.
_SMALL = Layout(max_num_reqs=3, max_model_len=5, num_spec_tokens=2, max_in_flight=1, max_logprobs=2)
assert len(Owner) * 8 <= PAGE_BYTES
assert all(word % WORDS_PER_LINE == 0 for word in (*Word, *RunnerWord, SlotWord.ARRIVED))
assert max(SlotWord) < 2 * WORDS_PER_LINE
assert len(Stamp) <= WORDS_PER_LINE
assert NUM_HISTOGRAM_BUCKETS % WORDS_PER_LINE == 0
assert _SMALL.frame_bytes % LINE_BYTES == 0
assert _SMALL.runner_offset % PAGE_BYTES == 0 == _SMALL.frames_offset % PAGE_BYTES
assert _SMALL.table_offset % PAGE_BYTES == 0 == _SMALL.is_token_ids.offset % PAGE_BYTES
assert _SMALL.logprobs.offset % PAGE_BYTES == 0
assert [column.value for column in Column] == list(range(NUM_INT32_COLUMNS))
assert [counter.value for counter in Counter] == list(range(len(Counter)))
assert [field.value for field in Field] == list(range(len(Field)))
assert max(len(CheckpointWord), len(RecordWord)) <= WORDS_PER_LINE
assert _SMALL.outputs_log.offset % LINE_BYTES == 0 == _SMALL.overflow_log.offset % PAGE_BYTES
assert all(_SMALL.checkpoint_work(slot).offset % LINE_BYTES == 0 for slot in range(NUM_CHECKPOINTS))
