"""The rules of one row in one step, in the order of `docs/ledger.md`. Compiled into the kernels.

`work` is the ledger's int32 [len(Field), padded_rows] matrix: the public columns as in a frame, then the private ones.
`row` is an index, `d` the number of drafts, `v` of verified ids, `m` of kept ids. Counts are int64 in numba, so row *
max_model_len cannot wrap. Nothing here allocates.
"""

from __future__ import annotations

from asyncbook.ipc import layout
from asyncbook.ipc.jit import rule
from asyncbook.ipc.layout import Field
from asyncbook.worker.life import TRANSITIONS, Effect, LifeEvent, State

PROMPT = int(Field.NUM_PROMPT_TOKENS)
NO_SPEC = int(Field.NUM_TOKENS_NO_SPEC)
NUM_TOKENS = int(Field.NUM_TOKENS)
COMPUTED = int(Field.NUM_COMPUTED_TOKENS)
OUTPUTS = int(Field.NUM_OUTPUT_TOKENS)
ACCEPTED = int(Field.NUM_ACCEPTED_TOKENS)
LAST_TOKEN_ID = int(Field.LAST_TOKEN_ID)
STOP_REASON = int(Field.STOP_REASON)
GENERATION = int(Field.GENERATION)
FINISH_REASON = int(Field.FINISH_REASON)
STATE = int(Field.STATE)
REMEMBERED = int(Field.REMEMBERED_COMPUTED)
MAX_TOKENS = int(Field.MAX_TOKENS)
MIN_TOKENS = int(Field.MIN_TOKENS)
NUM_STOP_IDS = int(Field.NUM_STOP_IDS)
NUM_GIVEN_DRAFTS = int(Field.NUM_GIVEN_DRAFTS)
NUM_VERIFIED_DRAFTS = int(Field.NUM_VERIFIED_DRAFTS)
REQUEST_NO = int(Field.REQUEST_NO)
IS_TOUCHED = int(Field.IS_TOUCHED)
IS_PENDING = int(Field.IS_PENDING)
IS_DIRTY = int(Field.IS_DIRTY)

RUNNING, FINISHED = int(State.RUNNING), int(State.FINISHED)
STOP, LENGTH = int(layout.FinishReason.STOP), int(layout.FinishReason.LENGTH)
ERROR = int(layout.FinishReason.ERROR)

SUBMITTED_TOKENS, COMMITTED_TOKENS = int(layout.Counter.SUBMITTED_TOKENS), int(layout.Counter.COMMITTED_TOKENS)
DROPPED_STALE, DROPPED_FINISHED = int(layout.Counter.DROPPED_STALE), int(layout.Counter.DROPPED_FINISHED)
DROPPED_PREEMPTED = int(layout.Counter.DROPPED_PREEMPTED)
DROPPED_PARTIAL_PREFILL = int(layout.Counter.DROPPED_PARTIAL_PREFILL)
DROPPED_OVERSCHEDULED = int(layout.Counter.DROPPED_OVERSCHEDULED)
DROPPED_INVALID = int(layout.Counter.DROPPED_INVALID)
DROPPED_AFTER_FINISH = int(layout.Counter.DROPPED_AFTER_FINISH)
INVALID_DRAFT_TOKENS = int(layout.Counter.INVALID_DRAFT_TOKENS)
FINISHED_NONE = int(layout.Counter.FINISHED_STOP) - STOP  # plus a finish reason: the counter of that reason
DRAFTS, DRAFT_TOKENS = int(layout.Counter.DRAFTS), int(layout.Counter.DRAFT_TOKENS)
ACCEPTED_TOKENS, EMITTED_TOKENS = int(layout.Counter.ACCEPTED_TOKENS), int(layout.Counter.EMITTED_TOKENS)
ACCEPTED_PER_POS = int(layout.Counter.ACCEPTED_PER_POS)
ROW_DRAFTS, ROW_DRAFT_TOKENS = int(layout.RowCounter.DRAFTS), int(layout.RowCounter.DRAFT_TOKENS)
ROW_ACCEPTED_TOKENS = int(layout.RowCounter.ACCEPTED_TOKENS)
ROW_EMITTED_TOKENS = int(layout.RowCounter.EMITTED_TOKENS)
ROW_ACCEPTED_PER_POS = int(layout.RowCounter.ACCEPTED_PER_POS)

_DROP_EFFECTS = {
    Effect.DROP_STALE: DROPPED_STALE,
    Effect.DROP_FINISHED: DROPPED_FINISHED,
    Effect.DROP_PREEMPTED: DROPPED_PREEMPTED,
}
# By state: the counter of the ids that a step drops for a row in it, -1 where the rules apply.
DROP_COUNTERS = tuple(_DROP_EFFECTS.get(TRANSITIONS[state, LifeEvent.STEP][1], -1) for state in State)

TOUCHED, DRAFTED, PENDING = 0, 1, 2  # rows of `lists`, and of `lengths`
NUM_LISTS = 3
INT32_MIN, INT32_MAX = layout.INT32_MIN, layout.INT32_MAX
PADDING = -1
UNCHANGED, CHANGED, TAKES_DRAFTS = 0, 1, 2  # what a step did to a row
TAKEN = -1  # in the place of a counter of dropped ids


@rule
def add_to_list(work, lists, lengths, flag, which, row):
    """Puts a row on a list once; `flag` is the private column that says that it is there. The row has changed."""
    work[IS_DIRTY, row] = layout.NUM_CHECKPOINTS
    if work[flag, row] == 0:
        work[flag, row] = 1
        lists[which, lengths[which]] = row
        lengths[which] += 1


@rule
def count_verified(sampled_row):
    """v: ids before the first -1."""
    v = 0
    while v < sampled_row.shape[0] and sampled_row[v] != PADDING:
        v += 1
    return v


@rule
def drop_drafts(work, token_ids, is_token_ids, row):
    """Rule 6: nothing lies behind the committed ids any more."""
    start, end = work[NO_SPEC, row], work[NUM_TOKENS, row]
    for position in range(start, end):
        token_ids[row, position] = 0
        is_token_ids[row, position] = False
    work[NUM_TOKENS, row] = start
    return end > start


@rule
def finish(work, token_ids, is_token_ids, counters, row, finish_reason, stop_reason):
    """Ends the row's request. Its drafts go; columns otherwise stay as they are until the row is released."""
    drop_drafts(work, token_ids, is_token_ids, row)
    work[FINISH_REASON, row] = finish_reason
    work[STOP_REASON, row] = stop_reason
    work[STATE, row] = FINISHED
    counters[FINISHED_NONE + finish_reason] += 1


@rule
def is_stop_id(work, stop_ids, row, num_outputs_before, token_id):
    """Whether the id ends the request: a stop or end-of-sequence id with min_tokens outputs in front of it."""
    if num_outputs_before < work[MIN_TOKENS, row]:
        return False
    for index in range(work[NUM_STOP_IDS, row]):  # noqa: SIM110 (any() over a generator does not compile)
        if stop_ids[row, index] == token_id:
            return True
    return False


@rule
def append_id(work, token_ids, is_token_ids, stop_ids, max_model_len, row, token_id):
    """Appends one valid id and returns the finish reason that it brings, 0 for none. Rule 3."""
    position = work[NO_SPEC, row]
    if position < max_model_len:  # a prompt that fills the row delivers one id that is not written
        token_ids[row, position] = token_id
        is_token_ids[row, position] = True
        work[NO_SPEC, row] = position + 1
        work[NUM_TOKENS, row] = position + 1
    work[OUTPUTS, row] += 1
    work[LAST_TOKEN_ID, row] = token_id
    if is_stop_id(work, stop_ids, row, work[OUTPUTS, row] - 1, token_id):
        return STOP
    if work[OUTPUTS, row] >= work[MAX_TOKENS, row]:
        return LENGTH
    if work[NO_SPEC, row] >= max_model_len:
        return LENGTH
    return 0


@rule
def count_kept(work, stop_ids, sampled_row, v, row, vocab_size, max_model_len):
    """What rules 3 and 4 would keep of the verified ids if there were no stop strings, with nothing changed: (number of
    ids, whether the last one is a stop id)."""
    num_outputs, num_tokens = work[OUTPUTS, row], work[NO_SPEC, row]
    for index in range(v):
        token_id = sampled_row[index]
        if token_id < 0 or token_id >= vocab_size:
            return index, False
        if is_stop_id(work, stop_ids, row, num_outputs, token_id):
            return index + 1, True
        num_outputs += 1
        num_tokens += 1
        if num_outputs >= work[MAX_TOKENS, row] or num_tokens >= max_model_len:
            return index + 1, False
    return v, False


@rule
def take_ids(work, token_ids, is_token_ids, stop_ids, counters, sampled_row, v, row, stop_string_at, vocab_size,
             max_model_len):  # fmt: skip
    """Rules 3 and 4: appends the verified ids until one of them finishes the request. Returns m, the ids kept. A stop
    string is complete with the id at `stop_string_at`, -1 for none."""
    for index in range(v):
        token_id = sampled_row[index]
        if token_id < 0 or token_id >= vocab_size:
            reason = token_id if INT32_MIN <= token_id <= INT32_MAX else INT32_MIN
            finish(work, token_ids, is_token_ids, counters, row, ERROR, reason)
            counters[DROPPED_INVALID] += 1
            counters[DROPPED_AFTER_FINISH] += v - index - 1
            counters[COMMITTED_TOKENS] += index
            return index
        reason = append_id(work, token_ids, is_token_ids, stop_ids, max_model_len, row, token_id)
        stop_reason = token_id if reason == STOP else -1
        if index == stop_string_at:
            reason = STOP
        if reason != 0:
            finish(work, token_ids, is_token_ids, counters, row, reason, stop_reason)
            counters[DROPPED_AFTER_FINISH] += v - index - 1
            counters[COMMITTED_TOKENS] += index + 1
            return index + 1
    counters[COMMITTED_TOKENS] += v
    return v


@rule
def count_draft_round(work, counters, row_counters, row, d, v, m):
    """Rule 5: what verification accepted, in total and for the row."""
    work[ACCEPTED, row] = v - 1
    num_draft_tokens = d
    given = work[NUM_VERIFIED_DRAFTS, row]
    if given > 0:
        num_draft_tokens = min(d, given - 1)
    if num_draft_tokens == 0:
        return
    counters[DRAFTS] += 1
    counters[DRAFT_TOKENS] += num_draft_tokens
    counters[ACCEPTED_TOKENS] += v - 1
    counters[EMITTED_TOKENS] += m
    row_counters[row, ROW_DRAFTS] += 1
    row_counters[row, ROW_DRAFT_TOKENS] += num_draft_tokens
    row_counters[row, ROW_ACCEPTED_TOKENS] += v - 1
    row_counters[row, ROW_EMITTED_TOKENS] += m
    for position in range(v - 1):
        counters[ACCEPTED_PER_POS + position] += 1
        row_counters[row, ROW_ACCEPTED_PER_POS + position] += 1


@rule
def write_drafts(work, token_ids, is_token_ids, counters, lists, lengths, draft_row, row, vocab_size, max_model_len):
    """Rule 6: drafts for the row's next step, behind the committed ids, as many as there is room for."""
    given = 0
    while given < draft_row.shape[0] and 0 <= draft_row[given] < vocab_size:
        given += 1
    if given < draft_row.shape[0] and draft_row[given] != PADDING:
        counters[INVALID_DRAFT_TOKENS] += 1
    start = work[NO_SPEC, row]
    end = min(start + given, max_model_len)
    for position in range(start, end):
        token_ids[row, position] = draft_row[position - start]
        is_token_ids[row, position] = True
    work[NUM_TOKENS, row] = end
    work[NUM_GIVEN_DRAFTS, row] = given + 1
    lists[DRAFTED, lengths[DRAFTED]] = row
    lengths[DRAFTED] += 1


@rule
def fate_of_ids(work, row, generation, scheduled, d):
    """Rules 1 and 2: the counter under which the row's ids are dropped, TAKEN where they are not."""
    if work[GENERATION, row] != generation:
        return DROPPED_STALE
    state = work[STATE, row]
    if DROP_COUNTERS[state] >= 0:
        return DROP_COUNTERS[state]
    end = work[REMEMBERED, row] + scheduled
    if end < work[NO_SPEC, row]:
        return DROPPED_PARTIAL_PREFILL
    if state == RUNNING and end > work[NO_SPEC, row] + d:
        return DROPPED_OVERSCHEDULED
    return TAKEN


@rule
def num_scheduled(work, row, scheduled, d):
    """Tokens that the row was scheduled for; where the batch does not say, all not computed yet and the drafts."""
    return max(work[NO_SPEC, row] - work[REMEMBERED, row], 0) + d if scheduled < 0 else scheduled


@rule
def step_row(work, token_ids, is_token_ids, stop_ids, counters, row_counters, sampled_row, row, generation,
             scheduled, d, stop_string_at, vocab_size, max_model_len):  # fmt: skip
    """One row of a step. Returns UNCHANGED, CHANGED, or TAKES_DRAFTS: changed, and drafts may follow its ids."""
    v = count_verified(sampled_row)
    counters[SUBMITTED_TOKENS] += v
    scheduled = num_scheduled(work, row, scheduled, d)
    fate = fate_of_ids(work, row, generation, scheduled, d)
    if fate != TAKEN:
        counters[fate] += v
        if fate == DROPPED_PARTIAL_PREFILL:
            work[ACCEPTED, row] = 0
            work[REMEMBERED, row] += scheduled
            if work[STATE, row] == RUNNING:
                work[COMPUTED, row] = work[REMEMBERED, row]
            return CHANGED
        if fate == DROPPED_OVERSCHEDULED:
            work[ACCEPTED, row] = 0
            finish(work, token_ids, is_token_ids, counters, row, ERROR, -1)
            return CHANGED
        return UNCHANGED
    work[ACCEPTED, row] = 0
    is_running, computed = work[STATE, row] == RUNNING, work[REMEMBERED, row]
    m = take_ids(
        work, token_ids, is_token_ids, stop_ids, counters, sampled_row, v, row, stop_string_at, vocab_size,
        max_model_len,
    )  # fmt: skip
    # A preempted row may have been scheduled for any number: what is remembered must stay an int32.
    computed = min(max(computed + scheduled - (d + 1 - m), 0), INT32_MAX)
    work[REMEMBERED, row] = computed
    if is_running:
        work[COMPUTED, row] = computed
    if d > 0 and v > 0:
        count_draft_round(work, counters, row_counters, row, d, v, m)
    return TAKES_DRAFTS if work[STATE, row] == RUNNING else CHANGED
