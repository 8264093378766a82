"""The sidecar process: `python -m asyncbook.worker SEGMENT_FD LIFETIME_FD`. Started by `asyncbook.spawn`, not by hand.

The descriptor of the segment and the reading end of the lifetime pipe are inherited. The pipe brings the set-up and is
then never written again: its end-of-file says that the runner is gone, however it went. A process that the runner
forked may hold the other end open for longer, so the runner itself is watched as well.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import sys
import threading
from pathlib import Path

from asyncbook.ipc import errors, wire
from asyncbook.ipc.channel import SidecarChannel
from asyncbook.ipc.layout import LAYOUT_VERSION
from asyncbook.ipc.segment import Segment

GRACE_S = 0.2  # for the duty cycle to end by itself
MAX_REASON_CHARS = 4000


def read_setup(descriptor: int) -> wire.Setup | None:
    """The set-up from the pipe, None where the runner went away first."""
    data = b""
    expected = wire.SETUP_LENGTH.size
    while len(data) < expected:
        chunk = os.read(descriptor, expected - len(data))
        if not chunk:
            return None
        data += chunk
        if len(data) == wire.SETUP_LENGTH.size:
            expected = wire.SETUP_LENGTH.size + wire.SETUP_LENGTH.unpack(data)[0]
    return wire.decode_setup(data[wire.SETUP_LENGTH.size :])


def _open_segment(descriptor: int, setup: wire.Setup) -> Segment:
    if setup.schema_hash != wire.schema_hash():
        raise errors.LayoutMismatch(f"the runner speaks schema {setup.schema_hash}, expected {wire.schema_hash()}")
    return Segment.inherit(descriptor)


class RunnerWatch:
    """A thread that waits for the runner's end, and ends this process if the duty cycle does not do so by itself: it
    may be starting still, or wait for room to send. `descriptors` are readable when the runner is gone."""

    def __init__(self, lifetime: int, runner_pid: int, directory: str) -> None:
        self._directory = directory
        runner = os.pidfd_open(os.getppid())
        self.descriptors = (lifetime, runner)
        if os.getppid() != runner_pid:  # it was gone before it could be watched
            self.end()
        threading.Thread(target=self._watch, name="runner-watch", daemon=True).start()

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in self.descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll()
        threading.Event().wait(GRACE_S)
        self.end()

    def end(self) -> None:
        """Ends the process. What the runner would have removed is left to its sidecar."""
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(0)


def _serve(segment: Segment, setup: wire.Setup, channel: SidecarChannel, watch: RunnerWatch) -> None:
    # Imported here, so that a refusal does not wait for numba.
    from asyncbook.ipc import jit
    from asyncbook.worker.duty import DutyCycle
    from asyncbook.worker.idle import POLICIES

    text_rows = None
    if setup.tokenizer is not None:
        from asyncbook.worker.text import TextRows
    for descriptor in watch.descriptors:
        channel.watch(descriptor)
    if not jit.is_cached():
        channel.send_event(wire.Compiling(jit.cache_path()))
    idle_policy = POLICIES[setup.idle_policy](setup.spin_us)
    jit.compile_all()
    if setup.tokenizer is not None:
        text_rows = TextRows(setup.tokenizer, segment.layout.max_num_reqs)
    duty = DutyCycle(
        segment.layout,
        segment.writable(),
        setup.vocab_size,
        channel,
        idle_policy,
        is_restart=setup.is_restart,
        text_rows=text_rows,
    )
    channel.send_event(wire.Ready(setup.token, os.getpid(), LAYOUT_VERSION, wire.schema_hash()))
    if not duty.run():
        watch.end()


def main() -> int:
    """Exit status: 0 after `Stop` or the runner's end, 1 after an error, which is told to the runner first."""
    # The runner leads: Ctrl-C reaches the whole group, and so does the SIGTERM of a process manager. The sidecar ends
    # when the runner says so or is gone. The runner blocked these while it started this process.
    for number in wire.RUNNER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wire.RUNNER_SIGNALS)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.raiseExceptions = False  # a log on a full disk is no reason to write more
    segment_descriptor, lifetime = int(sys.argv[1]), int(sys.argv[2])
    setup = read_setup(lifetime)
    if setup is None:
        return 0
    watch = RunnerWatch(lifetime, setup.runner_pid, setup.directory)
    # Where both share a core, a sidecar that wakes must not take it from the runner in the middle of `submit`.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if setup.sidecar_cpu is not None:
        os.sched_setaffinity(0, {setup.sidecar_cpu})
    channel = SidecarChannel(Path(setup.directory), setup.max_command_bytes)
    try:
        with _open_segment(segment_descriptor, setup) as segment:
            _serve(segment, setup, channel, watch)
    except errors.LayoutMismatch as error:
        channel.send_event(wire.Refused(setup.token, type(error).__name__, str(error)))
        return 1
    except Exception as error:
        logging.getLogger("asyncbook.worker").exception("the sidecar ends")
        channel.send_event(wire.Fault(f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]))
        return 1
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
