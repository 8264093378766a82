"""The sample ring: what each step sampled, in shared memory, one slot for each step in flight.

One producer, one consumer, no index to share: step s lies in slot s % num_ring_slots, and the runner submits it only
when step s - num_ring_slots is applied, so a slot is never overwritten before it was read. Two words publish a step.
`DESCRIBED` says that the runner submitted it; `ARRIVED` that its ids are there, which is later where a device brings
them. Both are the step's number, so the reader knows what it waits for and needs no reset.
"""

from __future__ import annotations

import numpy as np

from asyncbook.ipc.layout import Layout, SlotWord, Word
from asyncbook.ipc.publish import Word as SharedWord

_MESSAGE_SEQ, _LOGPROBS_WIDTH = int(SlotWord.MESSAGE_SEQ), int(SlotWord.LOGPROBS_WIDTH)


class SampleRingWriter:
    """The runner's side. `runner_part` is writable memory of the RUNNER part, `words` the bookkeeper's, read-only."""

    def __init__(self, layout: Layout, runner_part: memoryview, words: np.ndarray) -> None:
        # The runner's kernels, which the reader's process has no use for.
        from asyncbook.ipc import staging

        self._fill_slot, self._describe_slot = staging.fill_slot, staging.describe_slot
        self._max_width = 1 + layout.num_spec_tokens
        base = layout.runner_offset
        headers = list(layout.ring_headers.view(runner_part, base))
        self.token_ids = token_ids = list(layout.ring_token_ids.view(runner_part, base))
        self.draft_token_ids = list(layout.ring_draft_token_ids.view(runner_part, base))
        self.logprobs = list(layout.ring_logprobs.view(runner_part, base))
        # The arrays keep their memory alive for the addresses beside them.
        self._slots = [(ids, header, header.ctypes.data) for ids, header in zip(token_ids, headers, strict=True)]
        self._words = words
        self._is_sleeping_address = words[Word.IS_SLEEPING :].ctypes.data

    def fill(
        self, ids: np.ndarray, num_rows: int, step: int, seq: int, batch_slot: int, draft_width: int,
        logprobs_width: int,
    ) -> int:  # fmt: skip
        """Publishes a step whose drafts and logprobs are already in `draft_token_ids` and `logprobs` of its slot.

        `ids` int32 or int64, C-contiguous and writable, [num_rows] or [num_rows, width]; another type is a TypeError.
        Returns the width, 0 for a wrong shape with nothing published, -1 where the bookkeeper sleeps and needs a
        doorbell.
        """
        target, header, address = self._slots[step % len(self._slots)]
        return self._fill_slot(  # type: ignore[no-any-return]
            ids, num_rows, self._max_width, target, header, address, self._is_sleeping_address, step, seq, batch_slot,
            draft_width, logprobs_width,
        )  # fmt: skip

    def describe(self, step: int, seq: int, batch_slot: int, width: int, draft_width: int) -> bool:
        """Publishes a step whose ids a device brings: it stores ARRIVED after them. Whether a doorbell is needed.

        Ids and drafts that the CPU has are in `token_ids` and `draft_token_ids` of the slot already.
        """
        _, header, address = self._slots[step % len(self._slots)]
        described: int = self._describe_slot(
            header, address, self._is_sleeping_address, step, seq, batch_slot, width, draft_width
        )
        return described < 0


class SampleRingReader:
    """The bookkeeper's side."""

    def __init__(self, layout: Layout, memory: memoryview) -> None:
        headers = layout.ring_headers.view(memory)
        self._headers = list(headers)
        self._token_ids = list(layout.ring_token_ids.view(memory))
        self._draft_token_ids = list(layout.ring_draft_token_ids.view(memory))
        self._logprobs = list(layout.ring_logprobs.view(memory))
        self._described = [SharedWord(header, SlotWord.DESCRIBED) for header in headers]
        self._arrived = [SharedWord(header, SlotWord.ARRIVED) for header in headers]
        self._num_slots = layout.num_ring_slots

    def is_submitted(self, step: int) -> bool:
        """Whether the runner has submitted the step; its ids may still be on their way."""
        return self._described[step % self._num_slots].load_acquire() == step

    def has_arrived(self, step: int) -> bool:
        """Whether the ids of a submitted step are in its slot."""
        return self._arrived[step % self._num_slots].load_acquire() == step

    def message_seq(self, step: int) -> int:
        """Where a submitted step stands in the order of messages."""
        return int(self._headers[step % self._num_slots][_MESSAGE_SEQ])

    def read(self, step: int) -> tuple[int, int, np.ndarray, int, np.ndarray, int, np.ndarray, int]:
        """(seq, batch slot, ids, width, drafts, draft width, logprobs, their width) of an arrived step. The arrays are
        the slot's own memory, row after row, good until the step is published as applied."""
        slot = step % self._num_slots
        words = self._headers[slot][_MESSAGE_SEQ : _LOGPROBS_WIDTH + 1].tolist()
        seq, batch_slot, width, draft_width, logprobs_width = words
        drafts, logprobs = self._draft_token_ids[slot], self._logprobs[slot]
        return seq, batch_slot, self._token_ids[slot], width, drafts, draft_width, logprobs, logprobs_width
