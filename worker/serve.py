"""What the sidecar process does: reads its set-up, opens memory and sockets, says that it is ready, serves."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from asyncbook.ipc import errors, wire
from asyncbook.ipc.channel import SidecarChannel
from asyncbook.ipc.layout import LAYOUT_VERSION
from asyncbook.ipc.segment import Segment
from asyncbook.worker.runner_watch import RunnerWatch

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
        runner_reads_outputs=setup.runner_reads_outputs,
        subscribers_token=setup.subscribers_token,
    )
    channel.send_event(wire.Ready(setup.token, os.getpid(), LAYOUT_VERSION, wire.schema_hash()))
    watch.is_serving = True
    if not duty.run():
        watch.end()


def serve(segment_descriptor: int, lifetime: int, directory: str, watch: RunnerWatch) -> int:
    """Exit status: 0 after `Stop` or the runner's end, 1 after an error, which is told to the runner first."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.raiseExceptions = False  # a log on a full disk is no reason to write more
    setup = read_setup(lifetime)
    if setup is None:
        watch.end()
        return 0
    # Where both share a core, a sidecar that wakes must not take it from the runner in the middle of `submit`.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if setup.sidecar_cpu is not None:
        os.sched_setaffinity(0, {setup.sidecar_cpu})
    subscribers = Path(setup.subscribers) if setup.subscribers else None
    channel = SidecarChannel(Path(directory), setup.max_command_bytes, subscribers)
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
