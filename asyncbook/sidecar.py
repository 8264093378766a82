"""A book kept by a process of its own. The runner sends a message and goes on; it reads results from shared memory."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncbook.batch import Batch, check_ids
from asyncbook.config import BookConfig
from asyncbook.ipc import wire
from asyncbook.ipc.channel import MAX_QUEUED_COMMANDS, RunnerChannel
from asyncbook.ipc.errors import InFlightFull, InvalidRequest
from asyncbook.ipc.layout import NO_WAKE, RunnerWord, Word
from asyncbook.ipc.outputs_log import OutputsLogReader
from asyncbook.ipc.publish import OwnWord, fence
from asyncbook.ipc.publish import Word as SharedWord
from asyncbook.ipc.ring import SampleRingWriter
from asyncbook.ipc.segment import Segment
from asyncbook.journal import MAX_MESSAGES
from asyncbook.linked import LinkedBook
from asyncbook.logprobs import LogprobsArea
from asyncbook.outputs import StepOutputs
from asyncbook.place import Place
from asyncbook.process import SidecarProcess
from asyncbook.staging import NotAsTheyAre, StagingArea, stage_ids

if TYPE_CHECKING:
    from asyncbook.device.link import DeviceLink

FLUSH_TIMEOUT_S = 0.1  # between publishing a step and handing over its outputs; a live sidecar needs microseconds


class SidecarBook(LinkedBook):
    """Made by `asyncbook.spawn`; ready when that returns."""

    _has_ring = True

    def __init__(
        self, config: BookConfig, segment: Segment, place: Place, channel: RunnerChannel, process: SidecarProcess
    ) -> None:
        super().__init__(config, segment, place, channel, process)
        runner_part, memory = self._runner_part, segment.readable()
        runner_words = self._layout.runner_words.view(runner_part, self._layout.runner_offset)
        words = self._layout.words.view(memory)
        self._wake_at_outputs = OwnWord(runner_words, RunnerWord.WAKE_AT_OUTPUTS)
        self._wake_at_outputs.store_release(NO_WAKE)
        self._flushed_step = SharedWord(words, Word.FLUSHED_STEP)
        self._waits_for_room = SharedWord(words, Word.WAITS_FOR_ROOM)
        self._outputs_log = OutputsLogReader(self._layout, memory, runner_part)
        self._area = StagingArea(config.max_num_reqs, config.num_spec_tokens)
        self._ring = SampleRingWriter(self._layout, runner_part, words)
        self._sends_by_ring = config.transport == "ring"
        own = [np.zeros(self._layout.ring_logprobs.shape[1], np.int32)]  # where steps are sent as messages
        # By ring slot, else the one.
        self._logprobs_areas = [LogprobsArea(slot) for slot in (self._ring.logprobs if self._sends_by_ring else own)]

    # Sending

    def _send(self, message: wire.AnyCommand) -> None:
        data = wire.encode(message)
        if not self._backlog.has_room(len(data)):
            self._check_alive()
            self._refused_bytes = len(data)
            raise InFlightFull(
                f"message {message.seq} of {len(data)} bytes does not fit: the sidecar has not applied the ones before "
                f"it, of {self._backlog.max_bytes} bytes at most"
            )
        self._deliver(message.seq, data)
        self._backlog.add(message.seq, len(data))
        self._journal.add(message, data)

    def _deliver(self, seq: int, data: bytes) -> None:
        """To the sidecar; where there is none at the moment, the next one gets it from the journal."""
        if self._supervisor.is_down:
            self._check_alive()
        if not self._supervisor.is_down and self._channel.send_command(data):
            return
        if not self._supervisor.is_down and seq - self._applied_seq.load_acquire() < MAX_QUEUED_COMMANDS:
            self._supervisor.wait_noticed()  # the queue has room: the sidecar is about to end
        self._check_alive()
        if not self._supervisor.is_down and self._channel.send_command(data):
            return  # to the next one
        if not self._supervisor.is_down or len(self._journal) >= MAX_MESSAGES:
            self._refused_bytes = len(data)
            raise InFlightFull(f"message {seq} does not fit: the sidecar has not taken the ones before it")

    def _send_by_zmq(
        self, step: int, batch: Batch, n: int, sampled: np.ndarray, drafts: np.ndarray | None, logprobs: Any
    ) -> None:
        area = self._area
        width, draft_width = area.put(n, sampled, drafts)
        logprobs_width, logprobs_bytes = 0, wire.NO_BYTES
        if logprobs is not None:
            entries = self._logprobs_areas[0]
            logprobs_width, size = entries.put(logprobs, batch, width, self._max_logprobs_width)
            logprobs_bytes = wire.as_bytes(entries.entries[:size])
        slot = self._known_slot(batch)
        seq = self._next_seq()
        sampled_bytes, drafts_bytes = area.sampled_bytes[: 4 * n * width], area.drafts_bytes[: 4 * n * draft_width]
        message = wire.Step(
            seq, step, slot, width, sampled_bytes, draft_width, drafts_bytes, logprobs_width, logprobs_bytes
        )  # fmt: skip
        data = wire.encode(message)
        self._deliver(seq, data)
        self._seq = seq
        self._journal.add_step(seq, data, batch)

    def _send_step(
        self, step: int, batch: Batch, n: int, sampled: np.ndarray, drafts: np.ndarray | None, logprobs: Any
    ) -> None:
        # A forward pass has emptied the caches: each function that is called here costs a microsecond.
        if not self._sends_by_ring:
            self._send_by_zmq(step, batch, n, sampled, drafts, logprobs)
            return
        if self._supervisor.is_down:
            self._check_alive()
        draft_width = logprobs_width = 0
        if drafts is not None:
            self._next_seq()  # raises where nothing may be written
            target = self._ring.draft_token_ids[step % self._num_ring_slots]
            draft_width = stage_ids(drafts, n, self.config.num_spec_tokens, target)
        if logprobs is not None:
            sampled = check_ids("sampled_token_ids", sampled, n, self._max_width)  # they say how many ids a row has
            area = self._logprobs_areas[step % len(self._logprobs_areas)]
            num_ids = sampled.shape[1] if sampled.ndim == 2 else 1
            logprobs_width, _ = area.put(logprobs, batch, num_ids, self._max_logprobs_width)
        if not self._slots.is_known(batch):  # nothing is sent for ids that will be refused
            check_ids("sampled_token_ids", sampled, n, self._max_width)
            self._known_slot(batch)
        seq = self._next_seq()
        try:
            filled = self._ring.fill(sampled, n, step, seq, batch.slot, draft_width, logprobs_width)
        except TypeError:
            raise NotAsTheyAre from None
        if filled == 0:
            raise NotAsTheyAre
        self._seq = seq
        self._journal.add_step(seq, None, batch)
        if filled < 0:
            self._channel.ring_doorbell()

    def _send_from_device(self, link: DeviceLink, step: int, batch: Batch, n: int, sampled: Any, drafts: Any) -> None:
        # Whatever the transport is: the sample ring is where a device can write.
        if self._supervisor.is_down:
            self._check_alive()
        ring, most = self._ring, self.config.num_spec_tokens
        widths, brought = [0, 0], [None, None]
        targets = ring.token_ids, ring.draft_token_ids
        for index, (name, ids) in enumerate((("sampled_token_ids", sampled), ("draft_token_ids", drafts))):
            if self._device.holds(ids):
                widths[index], brought[index] = ids.shape[1] if ids.dim() == 2 else 1, ids
            elif ids is not None:
                array = check_ids(name, ids, n, most + 1 - index)
                widths[index] = stage_ids(array, n, most + 1 - index, targets[index][step % len(targets[index])])
        slot = self._known_slot(batch)
        seq = self._next_seq()
        # ARRIVED may be stored before DESCRIBED or after it: the sidecar looks for one, then for the other.
        link.bring(step, *brought)
        self._seq = seq
        self._journal.add_step(seq, None, batch)
        if ring.describe(step, seq, slot, *widths):
            self._channel.ring_doorbell()

    # Outputs

    def _await_flushed(self) -> None:
        if self._is_closed:
            return
        step, deadline = self.applied_step, time.monotonic() + FLUSH_TIMEOUT_S
        while self._flushed_step.load_acquire() < step and time.monotonic() < deadline:
            if self._supervisor.is_down:
                return
            os.sched_yield()

    def _take_outputs(self) -> StepOutputs | None:
        if self._is_closed:
            return None
        self._check_ours()
        if not self.config.runner_reads_outputs:
            raise InvalidRequest("this book was made with runner_reads_outputs=False: its outputs are for subscribers")
        record = self._outputs_log.take()
        if record is None:
            return None
        # How far was read is stored, then who waits for it is looked for; see `DutyCycle._flush` for the other half.
        fence()
        if self._waits_for_room.load_acquire():
            self._channel.ring_doorbell()
        return self._names.step_outputs(record.step, record.columns)

    async def _await_outputs(self) -> None:
        # The descriptor tells of new events only once all that came before are received.
        self._drain_events()
        self._wake_at_outputs.store_release(self._outputs_log.number + 1)
        fence()
        if not self._outputs_log.has_next():
            self._check_alive()
            await self._news()

    def _wake_readers(self) -> None:
        self._waiters.wake_all()

    @property
    def _keeps_outputs(self) -> bool:
        return self.config.runner_reads_outputs and not self._outputs_log.cut_off_step
