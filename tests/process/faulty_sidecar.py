"""A sidecar that kills itself at a named point: a test build, of which the release knows nothing.

Started in the place of `asyncbook.worker` (see `faults.py`). Each process takes the first line off the file that
ASYNCBOOK_FAULTS names: `<point> <n>`, and dies at the n-th time that it gets there. Without a line it lives.

A point is `before X` or `after X`, where X is a function of `FUNCTIONS` or the release-store of a word of the layout;
and `torn checkpoint`.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncbook.ipc import broadcast, layout

if "ASYNCBOOK_TEST_LOG_BYTES" in os.environ:  # the runner has patched its own
    layout.MIN_OUTPUTS_LOG_BYTES, layout.OVERFLOW_LOG_BYTES = map(int, os.environ["ASYNCBOOK_TEST_LOG_BYTES"].split())

from asyncbook.ipc.channel import SidecarChannel
from asyncbook.ipc.layout import Word
from asyncbook.worker import __main__ as sidecar

# name: (module, owner in it or "", attribute)
FUNCTIONS = {
    "serve": ("worker.serve", "", "_serve"),
    "take over": ("worker.checkpoint", "Checkpoints", "take_over"),
    "run": ("worker.duty", "DutyCycle", "run"),
    "restore": ("worker.ledger", "Ledger", "_restore"),
    "admit": ("worker.ledger", "Ledger", "_admit"),
    "abort": ("worker.ledger", "Ledger", "_abort"),
    "preempt": ("worker.ledger", "Ledger", "_preempt"),
    "recompute": ("worker.ledger", "Ledger", "_recompute"),
    "release": ("worker.ledger", "Ledger", "_release"),
    "apply step": ("worker.kernels", "", "apply_step"),
    "write checkpoint": ("worker.kernels", "", "write_checkpoint"),
    "take pending": ("worker.kernels", "", "take_pending"),
    "clear row": ("worker.kernels", "", "clear_row"),
    "write departed": ("worker.delivery", "LogDelivery", "_write_departed"),
    "wake for step": ("worker.duty", "DutyCycle", "_wake_for_step"),
    "wake for outputs": ("worker.duty", "DutyCycle", "_wake_for_outputs"),
    "wait": ("ipc.channel", "SidecarChannel", "wait_command"),
    "write record": ("ipc.broadcast", "BroadcastWriter", "write_record"),
    "write names": ("ipc.broadcast", "BroadcastWriter", "write_names"),
    "subscribe": ("worker.subscribers", "Subscribers", "_subscribe"),
}
WORDS = tuple(word.name for word in Word)
TORN = "torn checkpoint"


# In the life of a process, or where there is a subscriber now and then.
ONCE = ("serve", "take over", "run", "restore", "BROADCAST_START", "BROADCAST_START_NUMBER", "BROADCAST_EPOCH")
# Before the book is closed; and the store that comes once, where subscribers do not wait for a runner that never reads.
NEVER = ("after serve", "after run", "before CUT_OFF_STEP", "after CUT_OFF_STEP")


def points() -> list[str]:
    """All of them."""
    sides = [f"{side} {name}" for name in (*FUNCTIONS, *WORDS) for side in ("before", "after")]
    return [point for point in sides if point not in NEVER] + [TORN]


class Fault:
    """Counts how often a point was reached."""

    def __init__(self, point: str, n: int, deaths: Path) -> None:
        self.point = point
        self.side, _, self.name = point.partition(" ")
        self._left = 1 if self.name in ONCE else n
        self._deaths = deaths

    def is_fatal(self) -> bool:
        """Counts once more; whether it is the n-th time."""
        self._left -= 1
        return self._left == 0

    def kill(self) -> None:
        """Dies, and leaves its name."""
        with self._deaths.open("a") as deaths:
            deaths.write(f"{self.point}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def die(self) -> None:
        """At the n-th time."""
        if self.is_fatal():
            self.kill()

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the point before or after it."""

        def faulty(*args: Any, **kwargs: Any) -> Any:
            if self.side == "before":
                self.die()
            result = function(*args, **kwargs)
            if self.side == "after":
                self.die()
            return result

        return faulty


def take_fault() -> Fault | None:
    """The first line of the plan."""
    plan = Path(os.environ["ASYNCBOOK_FAULTS"])
    lines = plan.read_text().splitlines()
    if not lines:
        return None
    plan.write_text("\n".join(lines[1:]))
    point, _, n = lines[0].rpartition(" ")
    return Fault(point, int(n), plan.with_suffix(".deaths")) if point else None


def install(fault: Fault) -> None:
    """Patches what the point is in."""
    if f"{fault.side} {fault.name}" == TORN:
        from asyncbook.worker import kernels

        write = kernels.write_checkpoint

        def tear(work: Any, counters: Any, row_counters: Any, *targets: Any) -> None:
            write(work, counters, row_counters, *targets)
            if fault.is_fatal():
                for target in targets:
                    target.reshape(-1)[1::2] = -7
                fault.kill()

        kernels.write_checkpoint = tear
    elif fault.name in WORDS:
        install_at_word(fault, Word[fault.name])
    else:
        module, owner, attribute = FUNCTIONS[fault.name]
        place = importlib.import_module(f"asyncbook.{module}")
        place = getattr(place, owner) if owner else place
        setattr(place, attribute, fault.wrapped(getattr(place, attribute)))


def install_at_word(fault: Fault, word: Word) -> None:
    """At the release-store of one word."""
    from asyncbook.ipc.publish import OwnWord

    addresses: set[int] = set()
    init, store = OwnWord.__init__, OwnWord.store_release
    faulty_store = fault.wrapped(store)

    def remember(self: OwnWord, words: Any, index: int) -> None:
        init(self, words, index)
        if index == word:
            addresses.add(self._address)

    def store_release(self: OwnWord, value: int) -> None:
        (faulty_store if self._address in addresses else store)(self, value)

    OwnWord.__init__ = remember  # type: ignore[method-assign]
    OwnWord.store_release = store_release  # type: ignore[method-assign]


def main() -> int:
    """As `asyncbook.worker`."""
    broadcast.WARM_BYTES = 0  # the log begins anew whenever it may
    faulthandler.register(signal.SIGUSR1)  # where a sidecar hangs that should not: into its log
    fault = take_fault()
    if fault is not None:
        import asyncbook.worker.duty  # noqa: F401  (and with it all that is patched)

        assert SidecarChannel
        install(fault)
    return sidecar.main()


if __name__ == "__main__":
    sys.exit(main())
