"""A book kept by a process of its own. The runner sends a message and goes on; it reads results from shared memory."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncbook.batch import Batch, check_ids
from asyncbook.book import Book
from asyncbook.config import BookConfig
from asyncbook.ipc import jit, wire
from asyncbook.ipc.channel import RunnerChannel
from asyncbook.ipc.columns import OutputColumns
from asyncbook.ipc.errors import BadMessage, InFlightFull, SidecarDied, SidecarTimeout
from asyncbook.ipc.layout import NO_WAKE, RunnerWord, Word
from asyncbook.ipc.publish import OwnWord, fence
from asyncbook.ipc.publish import Word as SharedWord
from asyncbook.ipc.ring import SampleRingWriter
from asyncbook.ipc.segment import Segment
from asyncbook.outputs import StepOutputs
from asyncbook.process import SidecarProcess
from asyncbook.staging import NotAsTheyAre, StagingArea, stage_ids
from asyncbook.waiting import DescriptorWaiters

if TYPE_CHECKING:
    from asyncbook.device.link import DeviceLink

SPIN_NS = 20_000  # a wait looks for this long before it sleeps: most steps are applied by then
FLUSH_TIMEOUT_S = 0.1  # between publishing a step and handing over its outputs; a live sidecar needs microseconds


def _end(process: SidecarProcess, channel: RunnerChannel) -> None:
    if process.is_ours():  # a forked child has copies of all this, and must leave it to its parent
        process.stop()
        channel.close()


class SidecarBook(Book):
    """Made by `asyncbook.spawn`; ready when that returns."""

    _has_ring = True

    def __init__(self, config: BookConfig, segment: Segment, channel: RunnerChannel, process: SidecarProcess) -> None:
        super().__init__(config, segment)
        runner_part = segment.runner_part()
        runner_words = self._layout.runner_words.view(runner_part, self._layout.runner_offset)
        self._wake_at_step = OwnWord(runner_words, RunnerWord.WAKE_AT_STEP)
        self._wake_at_step.store_release(NO_WAKE)
        words = self._layout.words.view(self._segment.readable())
        self._flushed_step = SharedWord(words, Word.FLUSHED_STEP)
        self._outputs_sent = SharedWord(words, Word.OUTPUTS_SENT)
        self._area = StagingArea(config.max_num_reqs, config.num_spec_tokens)
        self._ring = SampleRingWriter(self._layout, runner_part, words)
        self._sends_by_ring = config.transport == "ring"
        self._channel = channel
        self._process = process
        jit.compile_all()
        process.shake_hands(config.start_timeout_s)
        # Runs at `close`, when the book is collected, or when the interpreter ends, whichever comes first.
        self._finalizer = weakref.finalize(self, _end, self._process, self._channel)
        self._num_outputs_received = 0
        self._awaited_steps: list[int] = []
        self._waiters = DescriptorWaiters()
        self._fault = ""

    # Sending

    def _send(self, message: wire.AnyCommand) -> None:
        if not self._channel.send_command(wire.encode(message)):
            self._check_alive()
            raise InFlightFull(f"message {message.seq} does not fit: the sidecar has not taken the ones before it")

    def _send_step(self, step: int, batch: Batch, n: int, sampled: np.ndarray, drafts: np.ndarray | None) -> None:
        if self._sends_by_ring:
            self._fill_ring(self._ring, step, batch, n, sampled, drafts)
            return
        area = self._area
        width, draft_width = area.put(n, sampled, drafts)
        slot = self._known_slot(batch)
        self._post(
            wire.Step(
                self._next_seq(),
                step,
                slot,
                width,
                area.sampled_bytes[: 4 * n * width],
                draft_width,
                area.drafts_bytes[: 4 * n * draft_width],
            )
        )

    def _fill_ring(
        self, ring: SampleRingWriter, step: int, batch: Batch, n: int, sampled: np.ndarray, drafts: np.ndarray | None
    ) -> None:
        draft_width = 0
        if drafts is not None:
            target = ring.draft_token_ids[step % len(ring.draft_token_ids)]
            draft_width = stage_ids(drafts, n, self.config.num_spec_tokens, target)
        if not self._slots.is_known(batch):  # nothing is sent for ids that will be refused
            check_ids("sampled_token_ids", sampled, n, 1 + self.config.num_spec_tokens)
        slot = self._known_slot(batch)
        seq = self._next_seq()
        try:
            filled = ring.fill(sampled, n, step, seq, slot, draft_width)
        except TypeError:
            raise NotAsTheyAre from None
        if filled == 0:
            raise NotAsTheyAre
        self._seq = seq
        if filled < 0:
            self._channel.ring_doorbell()

    def _send_from_device(self, link: DeviceLink, step: int, batch: Batch, n: int, sampled: Any, drafts: Any) -> None:
        # Whatever the transport is: the sample ring is where a device can write.
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
        if ring.describe(step, seq, slot, *widths):
            self._channel.ring_doorbell()

    # Waiting

    def _check_alive(self) -> None:
        super()._check_alive()
        if self._ended_by is None and not self._process.is_alive():
            self._drain_events()
            fault = f" ({self._fault})" if self._fault else ""
            self._ended_by = SidecarDied(
                f"the sidecar (pid {self._process.pid}) died{fault}: {self._process.describe_end()}; step "
                f"{self.applied_step} is applied, step {self._submitted_step} was submitted"
            )
        if self._ended_by is not None:
            raise self._ended_by

    def _drain_events(self) -> None:
        """Wake-ups only say "look again"; a fault is kept for the error that follows when the process ends."""
        while (data := self._channel.receive_event()) is not None:
            try:
                event = wire.decode_event(data)
            except BadMessage:
                continue
            if isinstance(event, wire.Fault):
                self._fault = event.reason

    def _ask_to_be_woken(self) -> None:
        """Tells the sidecar the next step that somebody waits for. Both sides put a fence between their store and their
        look, so either the sidecar sees this, or the caller's look after it sees the step."""
        self._wake_at_step.store_release(min(self._awaited_steps, default=NO_WAKE))
        fence()

    def wait_applied(self, step: int, timeout_s: float | None = None) -> None:
        self._check_submitted(step)
        if self._known_applied_step >= step or self.applied_step >= step:
            return
        spin_until_ns = time.monotonic_ns() + SPIN_NS
        while time.monotonic_ns() < spin_until_ns:
            if self.applied_step >= step:
                return
            os.sched_yield()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._awaited_steps.append(step)
        self._ask_to_be_woken()
        try:
            while self.applied_step < step:
                self._check_alive()
                self._channel.wait_event(self._milliseconds_left(step, deadline), self._process.pidfd)
                self._drain_events()
        finally:
            self._awaited_steps.remove(step)
            self._ask_to_be_woken()

    def _milliseconds_left(self, step: int, deadline: float | None) -> int | None:
        if deadline is None:
            return None
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise SidecarTimeout(
                f"step {step} is not applied in time, the last applied one is step {self.applied_step}"
            )
        return int(left_s * 1000) + 1

    async def applied(self, step: int) -> None:
        self._check_submitted(step)
        if self.applied_step >= step:
            return
        self._awaited_steps.append(step)
        try:
            while True:
                self._ask_to_be_woken()
                # The descriptor tells of new events only once all that came before are received.
                self._drain_events()
                if self.applied_step >= step:
                    return
                self._check_alive()
                await self._waiters.readable(self._channel.events_descriptor, self._process.pidfd)
        finally:
            self._awaited_steps.remove(step)
            if not self._is_closed:
                self._ask_to_be_woken()

    # Outputs

    def poll_outputs(self) -> list[StepOutputs]:
        if self._is_closed:
            return []
        self._wait_flushed(self.applied_step)
        outputs = []
        # Handed over to the socket before they were counted: they are here, or on their way.
        while self._num_outputs_received < self._outputs_sent.load_acquire():
            step_outputs = self._receive_outputs()
            if step_outputs is not None:
                outputs.append(step_outputs)
            elif not self._channel.wait_outputs(int(FLUSH_TIMEOUT_S * 1000)):
                self._check_alive()
                break
        return outputs

    def _wait_flushed(self, step: int) -> None:
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while self._flushed_step.load_acquire() < step and time.monotonic() < deadline:
            if not self._process.is_alive():
                return
            os.sched_yield()

    def _receive_outputs(self) -> StepOutputs | None:
        data = self._channel.receive_outputs()
        if data is None:
            return None
        outputs = wire.decode_outputs(data)
        self._num_outputs_received = outputs.seq
        columns = OutputColumns.from_bytes(outputs.num_requests, outputs.block)
        return self._names.step_outputs(outputs.step, columns)

    async def outputs(self) -> AsyncIterator[StepOutputs]:
        while not self._is_closed:
            # Receives until there is none, without which the descriptor would not tell of the next.
            step_outputs = self._receive_outputs()
            if step_outputs is not None:
                yield step_outputs
                continue
            self._check_alive()
            await self._waiters.readable(self._channel.outputs_descriptor, self._process.pidfd)

    # The process

    @property
    def sidecar_pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        if self._is_closed:
            return
        if self._process.is_ours() and self._process.is_alive():
            self._stop_sidecar()
        self._is_closed = True
        self._waiters.wake_all()
        self._finalizer()
        self._device.close()
        self._segment.close()

    def _stop_sidecar(self) -> None:
        """Lets it apply what was sent before, and waits for its end while its lifetime pipe is still open."""
        seq = self._seq + 1
        if self._channel.send_command(wire.encode(wire.Stop(seq))):
            self._process.wait_ended()
