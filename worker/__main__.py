"""The sidecar process: `python -m asyncbook.worker SEGMENT_FD LIFETIME_FD RUNNER_PID DIRECTORY`, started by
`asyncbook.spawn`, not by hand.

The descriptor of the segment and the reading end of the lifetime pipe are inherited. The pipe brings the set-up and is
then never written again: its end-of-file says that the runner is gone, however it went.
"""

from __future__ import annotations

import signal
import sys

from asyncbook.worker.runner_watch import RunnerWatch

# The runner leads: Ctrl-C reaches the whole group, and so do a process manager's SIGTERM and a closed terminal. The
# sidecar ends when the runner says so or is gone. The runner blocked these while it started this process.
RUNNER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Exit status: 0 after `Stop` or the runner's end, 1 after an error, which is told to the runner first."""
    for number in RUNNER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RUNNER_SIGNALS)
    segment_descriptor, lifetime, runner_pid = map(int, sys.argv[1:4])
    directory = sys.argv[4]
    watch = RunnerWatch(lifetime, runner_pid, directory)
    # Imported only now: most of a start is imports, and the runner may end in the middle of them.
    from asyncbook.worker.serve import serve

    return serve(segment_descriptor, lifetime, directory, watch)


if __name__ == "__main__":
    sys.exit(main())
