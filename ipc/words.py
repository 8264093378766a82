"""The names of what lies in the shared segment: words, columns, counters, and where each stands among its like.

`layout.py` says where the regions are that hold them, and hands all of these names on.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

LINE_BYTES = 64
WORDS_PER_LINE = LINE_BYTES // 8


class FinishReason(IntEnum):
    """Why a request ended; the values of the column `finish_reason`."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class Owner(IntEnum):
    """int64 words of the OWNER page, in order. Written by the runner before the sidecar starts, never after."""

    MAGIC = 0
    LAYOUT_VERSION = 1
    MAX_NUM_REQS = 2
    MAX_MODEL_LEN = 3
    NUM_SPEC_TOKENS = 4
    MAX_IN_FLIGHT = 5
    MAX_LOGPROBS = 6
    TOTAL_BYTES = 7
    OWNER_PID = 8
    BOOK_NO = 9  # drawn at random: tells the book from whatever else a descriptor's number may stand for later


class Word(IntEnum):
    """Words of the BOOKKEEPER part: index of the int64 that stands alone on its cache line."""

    PUBLISHED_STEP = 0 * WORDS_PER_LINE  # release-stored last: all of the step's frame and table is visible before it
    APPLIED_SEQ = 1 * WORDS_PER_LINE  # sequence number of the last applied message
    FLUSHED_STEP = 2 * WORDS_PER_LINE  # outputs of this step are in the log, or wait in their rows for room in it
    IS_SLEEPING = 3 * WORDS_PER_LINE  # 1: the bookkeeper waits on its socket, and a step in the ring needs a doorbell
    OUTPUTS_WRITTEN = 4 * WORDS_PER_LINE  # lines of the outputs log that were ever written
    OVERFLOW_WRITTEN = 5 * WORDS_PER_LINE  # the same of the overflow log
    WAITS_FOR_ROOM = 6 * WORDS_PER_LINE  # 1: outputs wait for the reader, who rings the doorbell when it has read
    CHECKPOINT = 7 * WORDS_PER_LINE  # release-stored last: how many checkpoints were written; the newest is whole
    CHECKPOINT_SEQ = 8 * WORDS_PER_LINE  # sequence number of the newest checkpoint, stored right after
    BROADCAST_RESERVED = 9 * WORDS_PER_LINE  # lines of the broadcast log that were ever begun: older ones are gone
    BROADCAST_WRITTEN = 10 * WORDS_PER_LINE  # lines of it that are whole
    BROADCAST_EPOCH = 11 * WORDS_PER_LINE  # odd: everything delivered is broadcast, without a gap since it became that
    BROADCAST_START = 12 * WORDS_PER_LINE  # lines of the broadcast log that were written before its first line was
    BROADCAST_START_NUMBER = 13 * WORDS_PER_LINE  # of the last delivery among those; stored before it
    CUT_OFF_STEP = 14 * WORDS_PER_LINE  # from this step on nothing is kept for the runner, who never read; 0: all is


class RunnerWord(IntEnum):
    """Words of the RUNNER part."""

    WAKE_AT_STEP = 0 * WORDS_PER_LINE  # send a wake-up once this step is published; NO_WAKE: nobody sleeps
    WAKE_AT_OUTPUTS = 1 * WORDS_PER_LINE  # the same for the delivery of this number
    OUTPUTS_READ = 2 * WORDS_PER_LINE  # lines of the outputs log that the reader is done with
    OVERFLOW_READ = 3 * WORDS_PER_LINE  # the same of the overflow log
    NUM_RESTARTS = 4 * WORDS_PER_LINE  # how often another sidecar took the book over
    SIDECAR_PID = 5 * WORDS_PER_LINE  # 0 in an embedded book


NO_WAKE = 2**62


class SlotWord(IntEnum):
    """int64 words in the header of a sample ring's slot: two cache lines."""

    DESCRIBED = 0  # release-stored by the runner: the step that the words behind it are of
    MESSAGE_SEQ = 1
    BATCH_SLOT = 2
    WIDTH = 3  # ids a row
    DRAFT_WIDTH = 4  # drafts a row; 0: none were given
    LOGPROBS_WIDTH = 5  # logprobs an id, as far as its row wants them; 0: none were given
    ARRIVED = (
        WORDS_PER_LINE  # the step whose ids and drafts are in the slot; written by whoever brought them, after them
    )


class Stamp(IntEnum):
    """int64 fields of a frame slot's stamp (one line a slot)."""

    STEP = 0
    APPLIED_SEQ = 1
    APPLY_START_NS = 2  # CLOCK_MONOTONIC, the same clock in both processes
    APPLY_END_NS = 3


class Column(IntEnum):
    """Rows of a frame's int32 block. `generation` is uint32 in the same bytes."""

    NUM_PROMPT_TOKENS = 0
    NUM_TOKENS_NO_SPEC = 1
    NUM_TOKENS = 2
    NUM_COMPUTED_TOKENS = 3
    NUM_OUTPUT_TOKENS = 4
    NUM_ACCEPTED_TOKENS = 5
    LAST_TOKEN_ID = 6
    STOP_REASON = 7
    GENERATION = 8


NUM_INT32_COLUMNS = len(Column)
FINISH_REASON_COLUMN = "finish_reason"
COLUMN_DTYPES: dict[str, np.dtype] = {
    **{column.name.lower(): np.dtype(np.int32) for column in Column},
    Column.GENERATION.name.lower(): np.dtype(np.uint32),
    FINISH_REASON_COLUMN: np.dtype(np.uint8),
}


class Field(IntEnum):
    """Rows of the ledger's columns `work`, and of a checkpoint. The first are a frame's int32 columns; a private column
    starts at 0 with the row."""

    NUM_PROMPT_TOKENS = Column.NUM_PROMPT_TOKENS
    NUM_TOKENS_NO_SPEC = Column.NUM_TOKENS_NO_SPEC
    NUM_TOKENS = Column.NUM_TOKENS
    NUM_COMPUTED_TOKENS = Column.NUM_COMPUTED_TOKENS
    NUM_OUTPUT_TOKENS = Column.NUM_OUTPUT_TOKENS
    NUM_ACCEPTED_TOKENS = Column.NUM_ACCEPTED_TOKENS
    LAST_TOKEN_ID = Column.LAST_TOKEN_ID
    STOP_REASON = Column.STOP_REASON
    GENERATION = Column.GENERATION
    FINISH_REASON = len(Column)  # uint8 in a frame
    STATE = len(Column) + 1
    REMEMBERED_COMPUTED = len(Column) + 2  # what num_computed_tokens would be without the preemption
    MAX_TOKENS = len(Column) + 3
    MIN_TOKENS = len(Column) + 4
    NUM_STOP_IDS = len(Column) + 5
    NUM_DELIVERED = len(Column) + 6  # outputs that the reader has
    NUM_GIVEN_DRAFTS = len(Column) + 7  # given by the last step: 1 + their number; 0: none were given
    NUM_VERIFIED_DRAFTS = len(Column) + 8  # the same while the next step is applied
    REQUEST_NO = len(Column) + 9  # the request in the row, as deliveries name it
    TEXT_DELIVERED = len(Column) + 10  # bytes of the outputs' text that the reader has
    IS_TOUCHED = len(Column) + 11  # on the list of rows that changed since the last frame
    IS_PENDING = len(Column) + 12  # on the list of rows with something to deliver
    IS_DIRTY = len(Column) + 13  # how many of the next checkpoints must take the row anew
    LOGPROBS_WIDTH = len(Column) + 14  # logprobs kept an output: the sampled id's and the top k; 0: none
    NUM_WITH_LOGPROBS = len(Column) + 15  # outputs whose logprobs are in the table, or that came before the row


class CheckpointWord(IntEnum):
    """int64 words in the header of a checkpoint: one line."""

    SEQ = 0  # of the last message that is in it
    STEP = 1  # of the last step that is in it; its frame is whole
    OUTPUTS_WRITTEN = 2  # lines of the outputs log that were written by then
    OVERFLOW_WRITTEN = 3  # the same of the overflow log
    OUTPUTS_NUMBER = 4  # of the last delivery
    BROADCAST_WRITTEN = 5  # lines of the broadcast log that were written by then


NUM_CHECKPOINTS = 2  # number n lies in slot n % NUM_CHECKPOINTS; the first is number 1
MAX_MESSAGES_BETWEEN_CHECKPOINTS = 512  # without a step among them; a step has a checkpoint of its own


class DropWord(IntEnum):
    """int64 words of a note that what a request had to deliver was dropped."""

    REQUEST_NO = 0
    CHECKPOINT = 1  # stored last: the number of the checkpoint that will know of it; the note holds until then


class RecordWord(IntEnum):
    """int64 words in the header of a record of the outputs logs: one line, in front of the columns."""

    NUMBER = 0  # deliveries count from 1, over both logs
    NUM_LINES = 1  # of the record, the header among them
    STEP = 2  # the last step that is in it
    NUM_REQUESTS = 3  # PADDING: there is nothing, the next record starts at the log's beginning
    BLOCK_SIZE = 4  # int32 values behind the header, as in `ipc/columns.py`
    LOGPROBS_SIZE = 5  # int32 values behind those, as in `ipc/logprobs.py`; 0: no request of it wants logprobs
    TEXT_SIZE = 6  # int32 values of text behind those; 0 in a book without a tokenizer


PADDING_RECORD = -1
NAMES_RECORD = -2  # in the broadcast log: which requests were admitted. BLOCK_SIZE counts bytes then
MIN_OUTPUTS_LOG_BYTES = 1 << 20
OVERFLOW_LOG_BYTES = 1 << 26
BROADCAST_LOG_BYTES = 1 << 26
MAX_SUBSCRIBERS = 64


class SubscriberWord(IntEnum):
    """int64 words of a subscriber's entry: its process. 0: a free entry."""

    PID = 0
    START_TIME = 1  # as in `ipc/runtime_dir.py`


class Counter(IntEnum):
    """int64 counters of the BOOKKEEPER part, written by the ledger, in order. `DROPPED_*` count tokens by reason."""

    REPLAYED_MESSAGES = 0
    STALE_MESSAGES = 1
    BAD_MESSAGES = 2
    ADMITTED = 3
    RELEASED = 4
    SUBMITTED_TOKENS = 5
    COMMITTED_TOKENS = 6
    DROPPED_STALE = 7
    DROPPED_FINISHED = 8
    DROPPED_PREEMPTED = 9
    DROPPED_PARTIAL_PREFILL = 10
    DROPPED_OVERSCHEDULED = 11
    DROPPED_INVALID = 12
    DROPPED_AFTER_FINISH = 13
    INVALID_DRAFT_TOKENS = 14
    FINISHED_STOP = 15
    FINISHED_LENGTH = 16
    FINISHED_ABORT = 17
    FINISHED_ERROR = 18
    DRAFTS = 19
    DRAFT_TOKENS = 20
    ACCEPTED_TOKENS = 21
    EMITTED_TOKENS = 22
    OUTPUTS_DROPPED_REQUESTS = 23  # requests whose undelivered outputs did not fit the declared bound
    NAN_LOGPROBS = 24  # outputs with a NaN among the logprobs kept for them
    MISSING_LOGPROBS = 25  # outputs that came without logprobs which their request wants, in whole or in part
    ACCEPTED_PER_POS = 26  # first of num_spec_tokens counters, one a position


class RowCounter(IntEnum):
    """int64 counters of the request in a row, in order."""

    DRAFTS = 0
    DRAFT_TOKENS = 1
    ACCEPTED_TOKENS = 2
    EMITTED_TOKENS = 3
    ACCEPTED_PER_POS = 4  # first of num_spec_tokens counters, one a position


class Histogram(IntEnum):
    """Histograms of the BOOKKEEPER part: times in nanoseconds, log buckets, one row each."""

    APPLY = 0
    WAIT_FOR_TOKENS = 1  # from the first look at a submitted step in the ring until its ids were there
    QUEUE = 2  # from the call of `submit` to the start of apply
    LAG = 3  # no time: how many steps were in flight when a step's apply began, itself among them


class RunnerHistogram(IntEnum):
    """The same of the RUNNER part."""

    SUBMIT = 0
    READ = 1  # from publishing a step to the first look at its frame


class SubmissionWord(IntEnum):
    """int64 words in which the runner says what it submits. For statistics alone: nothing is ordered by them."""

    STEP = 0  # submitted last
    FIRST_NS = 1  # when, by CLOCK_MONOTONIC: one word for each slot of the sample ring


# A bucket is the position of the leading bit and the three bits below it: at most 1/8 too wide, 0 ns to 36 minutes.
HISTOGRAM_SUB_BITS = 3
NUM_HISTOGRAM_BUCKETS = 41 * (1 << HISTOGRAM_SUB_BITS)
