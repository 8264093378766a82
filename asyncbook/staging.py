"""Ids on their way out of the runner: copied once, as int32, into memory that is ready to be sent or applied."""

from __future__ import annotations

import numpy as np

from asyncbook.ipc import staging


class NotAsTheyAre(Exception):
    """Ids that the kernels do not take as they are: of another shape, dtype or order, or read-only."""


def stage_ids(ids: np.ndarray, num_rows: int, max_width: int, target: np.ndarray) -> int:
    """Copies ids into `target`, row after row, and returns the width. Raises `NotAsTheyAre` for anything but a
    C-contiguous writable int32 or int64 array [num_rows] or [num_rows, 1 to max_width]."""
    try:
        width: int = staging.stage(ids, num_rows, max_width, target)
    except TypeError:
        raise NotAsTheyAre from None
    if width == staging.WRONG_SHAPE:
        raise NotAsTheyAre
    return width


class StagingArea:
    """Room for one step: `sampled` int32 [max_num_reqs * (1 + num_spec_tokens)], `drafts` without the 1."""

    def __init__(self, max_num_reqs: int, num_spec_tokens: int) -> None:
        self.num_spec_tokens = num_spec_tokens
        self.sampled = np.zeros(max_num_reqs * (1 + num_spec_tokens), np.int32)
        self.drafts = np.zeros(max_num_reqs * num_spec_tokens, np.int32)
        self.sampled_bytes = self.sampled.data.cast("B")
        self.drafts_bytes = self.drafts.data.cast("B") if num_spec_tokens else memoryview(b"")

    def put(self, num_rows: int, sampled: np.ndarray, drafts: np.ndarray | None) -> tuple[int, int]:
        """Width and draft width (0 without drafts) of what now lies in the area. Raises as `stage_ids`."""
        draft_width = 0 if drafts is None else stage_ids(drafts, num_rows, self.num_spec_tokens, self.drafts)
        return stage_ids(sampled, num_rows, 1 + self.num_spec_tokens, self.sampled), draft_width
