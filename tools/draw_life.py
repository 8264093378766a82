"""Draws the life of a row into `docs/life.md` from the table that the ledger reads: `python -m tools.draw_life`."""

from __future__ import annotations

from pathlib import Path

from asyncbook.worker.life import TRANSITIONS, LifeEvent, State

PAGE = Path(__file__).resolve().parent.parent / "docs" / "life.md"

HEAD = """\
# The life of a row

Drawn from `worker/life.py` by `python -m tools.draw_life`; a test compares. A pair that is not in the table cannot come
from a caller: the client refuses it first. An event whose handle is of another generation is stale: it is counted, and
changes nothing. [ledger.md](ledger.md) says what the effects do.

"""


def _table() -> list[str]:
    lines = ["| state \\ event | " + " | ".join(event.value for event in LifeEvent) + " |"]
    lines.append("|---" * (len(LifeEvent) + 1) + "|")
    for state in State:
        cells = []
        for event in LifeEvent:
            if (state, event) not in TRANSITIONS:
                cells.append("")
                continue
            after, effect = TRANSITIONS[state, event]
            cells.append(effect.value if after is state else f"**{after.name}**: {effect.value}")
        lines.append(f"| {state.name} | " + " | ".join(cells) + " |")
    return lines


def _diagram() -> list[str]:
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> FREE"]
    for (before, event), (after, _) in TRANSITIONS.items():
        if before is not after:
            lines.append(f"    {before.name} --> {after.name}: {event.value}")
    return [*lines, "```"]


def draw() -> str:
    """The page."""
    return HEAD + "\n".join([*_table(), "", *_diagram()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(draw())
