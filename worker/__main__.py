"""The sidecar process: `python -m asyncbook.worker SEGMENT_FD LIFETIME_FD`. Started by `asyncbook.spawn`, not by hand.

The descriptor of the segment and the reading end of the lifetime pipe are inherited. The pipe brings the set-up and is
then never written again: its end-of-file says that the runner is gone, however it went.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from pathlib import Path

from asyncbook.ipc import errors, wire
from asyncbook.ipc.channel import SidecarChannel
from asyncbook.ipc.layout import LAYOUT_VERSION
from asyncbook.ipc.segment import Segment


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


def _serve(segment: Segment, setup: wire.Setup, channel: SidecarChannel, lifetime: int) -> None:
    # Imported here, so that a refusal does not wait for numba.
    from asyncbook.ipc import jit
    from asyncbook.worker.duty import DutyCycle
    from asyncbook.worker.idle import POLICIES

    text_rows = None
    if setup.tokenizer is not None:
        from asyncbook.worker.text import TextRows
    channel.watch(lifetime)
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
        # The runner went without a word: what it would have removed is left to its sidecar.
        shutil.rmtree(setup.directory, ignore_errors=True)


def main() -> int:
    """Exit status: 0 after `Stop` or the runner's end, 1 after an error, which is told to the runner first."""
    # The runner leads: Ctrl-C reaches the whole group, and the sidecar ends when the runner says so or is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    segment_descriptor, lifetime = int(sys.argv[1]), int(sys.argv[2])
    setup = read_setup(lifetime)
    if setup is None:
        return 0
    # Where both share a core, a sidecar that wakes must not take it from the runner in the middle of `submit`.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if setup.sidecar_cpu is not None:
        os.sched_setaffinity(0, {setup.sidecar_cpu})
    channel = SidecarChannel(Path(setup.directory))
    try:
        with _open_segment(segment_descriptor, setup) as segment:
            _serve(segment, setup, channel, lifetime)
    except errors.LayoutMismatch as error:
        channel.send_event(wire.Refused(setup.token, type(error).__name__, str(error)))
        return 1
    except Exception as error:
        logging.getLogger("asyncbook.worker").exception("the sidecar ends")
        channel.send_event(wire.Fault(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
