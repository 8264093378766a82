"""The life of a row: states, events, and what an event does in a state. Read by the ledger and by the docs page.

A row is an incarnation by its generation: an event whose handle names another generation never gets here (it is counted
as stale). What happens to the ids of a step is decided row by row in `rules.py`; `STEP` below says which rule applies.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class State(IntEnum):
    """Where a row is in its life; a private column of the ledger."""

    FREE = 0
    RUNNING = 1
    PREEMPTED = 2  # ids in flight are still delivered
    DROPPING = 3  # preempted; ids in flight are dropped
    FINISHED = 4


class LifeEvent(StrEnum):
    """What can happen to a row."""

    ADMIT = "admit"
    STEP = "step"
    FINISH = "finish"  # a step met a stop, a length or an error
    ABORT = "abort"
    PREEMPT = "preempt"
    PREEMPT_DROP = "preempt, drop in flight"
    RESUME = "resume"
    REWIND = "rewind"
    RELEASE = "release"


class Effect(StrEnum):
    """What the ledger does to the row's columns besides changing the state."""

    NOTHING = "nothing"
    START = "write the prompt, generation + 1"
    APPLY = "rules of a step"
    APPLY_UNCOMPUTED = "rules of a step, num_computed_tokens left at 0"
    DROP_STALE = "drop the ids as stale"
    DROP_PREEMPTED = "drop the ids as preempted"
    DROP_FINISHED = "drop the ids as finished"
    END = "finish_reason, drafts dropped"
    UNCOMPUTE = "num_computed_tokens = 0, drafts dropped"
    RECOMPUTE = "num_computed_tokens as given, generation + 1"
    RENAME = "generation + 1"
    CLEAR = "zero columns and tables"
    END_AND_CLEAR = "abort, then zero columns and tables"


_S, _E, _F = State, LifeEvent, Effect

# A pair that is not here cannot come from a client that keeps the contract; the ledger counts it as a bad message.
TRANSITIONS: dict[tuple[State, LifeEvent], tuple[State, Effect]] = {
    (_S.FREE, _E.ADMIT): (_S.RUNNING, _F.START),
    (_S.FREE, _E.STEP): (_S.FREE, _F.DROP_STALE),
    (_S.RUNNING, _E.STEP): (_S.RUNNING, _F.APPLY),
    (_S.RUNNING, _E.FINISH): (_S.FINISHED, _F.END),
    (_S.RUNNING, _E.ABORT): (_S.FINISHED, _F.END),
    (_S.RUNNING, _E.PREEMPT): (_S.PREEMPTED, _F.UNCOMPUTE),
    (_S.RUNNING, _E.PREEMPT_DROP): (_S.DROPPING, _F.UNCOMPUTE),
    (_S.RUNNING, _E.REWIND): (_S.RUNNING, _F.RECOMPUTE),
    (_S.RUNNING, _E.RELEASE): (_S.FREE, _F.END_AND_CLEAR),
    (_S.PREEMPTED, _E.STEP): (_S.PREEMPTED, _F.APPLY_UNCOMPUTED),
    (_S.PREEMPTED, _E.FINISH): (_S.FINISHED, _F.END),
    (_S.PREEMPTED, _E.ABORT): (_S.FINISHED, _F.END),
    (_S.PREEMPTED, _E.PREEMPT): (_S.PREEMPTED, _F.NOTHING),
    (_S.PREEMPTED, _E.PREEMPT_DROP): (_S.DROPPING, _F.NOTHING),
    (_S.PREEMPTED, _E.RESUME): (_S.RUNNING, _F.RECOMPUTE),
    (_S.PREEMPTED, _E.RELEASE): (_S.FREE, _F.END_AND_CLEAR),
    (_S.DROPPING, _E.STEP): (_S.DROPPING, _F.DROP_PREEMPTED),
    (_S.DROPPING, _E.ABORT): (_S.FINISHED, _F.END),
    (_S.DROPPING, _E.PREEMPT): (_S.PREEMPTED, _F.NOTHING),
    (_S.DROPPING, _E.PREEMPT_DROP): (_S.DROPPING, _F.NOTHING),
    (_S.DROPPING, _E.RESUME): (_S.RUNNING, _F.RECOMPUTE),
    (_S.DROPPING, _E.RELEASE): (_S.FREE, _F.END_AND_CLEAR),
    (_S.FINISHED, _E.STEP): (_S.FINISHED, _F.DROP_FINISHED),
    (_S.FINISHED, _E.ABORT): (_S.FINISHED, _F.NOTHING),
    (_S.FINISHED, _E.PREEMPT): (_S.FINISHED, _F.NOTHING),
    (_S.FINISHED, _E.PREEMPT_DROP): (_S.FINISHED, _F.NOTHING),
    (_S.FINISHED, _E.RESUME): (_S.FINISHED, _F.RENAME),
    (_S.FINISHED, _E.REWIND): (_S.FINISHED, _F.RENAME),
    (_S.FINISHED, _E.RELEASE): (_S.FREE, _F.CLEAR),
}
