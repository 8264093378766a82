"""How the sidecar waits for the ids of a step that the runner has submitted and a device has not brought yet.

Nothing announces them: a device can store a word and no more. A forward pass may take anything from half a millisecond
to seconds, so naps grow with the wait: they make it longer by a sixteenth, and by `MAX_NAP_S` at most.
"""

from __future__ import annotations

from time import monotonic_ns

import numpy as np

from asyncbook.ipc.histogram import bucket_of

NAP_SHARE = 16
MAX_NAP_S = 0.000_2


class Arrivals:
    """One step at a time: the next in order. `histogram` int64 [NUM_HISTOGRAM_BUCKETS] gets the wait of each."""

    def __init__(self, histogram: np.ndarray) -> None:
        self._histogram = histogram
        self._since_ns = 0
        self.is_waiting = False

    def missing(self) -> None:
        """The step is submitted, its ids are not there."""
        if not self.is_waiting:
            self.is_waiting = True
            self._since_ns = monotonic_ns()

    def arrived(self) -> None:
        """Its ids are there."""
        if self.is_waiting:
            self.is_waiting = False
            self._histogram[bucket_of(monotonic_ns() - self._since_ns)] += 1
        else:
            self._histogram[0] += 1

    def nap_s(self) -> float:
        """How long to sleep before the next look."""
        return min((monotonic_ns() - self._since_ns) / (NAP_SHARE * 1e9), MAX_NAP_S)
