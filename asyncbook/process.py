"""The sidecar as a process: started, watched, ended. Always a fresh interpreter, never a fork of the runner."""

from __future__ import annotations

import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from asyncbook.config import BookConfig
from asyncbook.ipc import errors, wire
from asyncbook.ipc.channel import RunnerChannel
from asyncbook.ipc.layout import LAYOUT_VERSION

logger = logging.getLogger("asyncbook")

SIDECAR_MODULE = "asyncbook.worker"
LOG_NAME = "sidecar.log"
LOG_TAIL_LINES = 10
COMPILE_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 5.0


class SidecarProcess:
    """One sidecar, started but not waited for: `shake_hands` does that. `pidfd` is readable once it has ended."""

    def __init__(
        self, config: BookConfig, segment_descriptor: int, channel: RunnerChannel, *, is_restart: bool = False
    ) -> None:
        self._channel = channel
        self._token = secrets.token_bytes(16)
        self._log_path = channel.directory / LOG_NAME
        self._owner_pid = os.getpid()
        # The reading end goes to the sidecar; the writing end closes with this process, however it ends.
        lifetime_read, self._lifetime = os.pipe()
        try:
            self._popen = self._start(segment_descriptor, lifetime_read)
        except OSError as error:
            os.close(self._lifetime)
            raise errors.HandshakeFailed(f"cannot start the sidecar with {sys.executable!r}: {error}") from error
        finally:
            os.close(lifetime_read)
        self.pid = self._popen.pid
        self.pidfd = -1
        try:
            self.pidfd = os.pidfd_open(self.pid)
            self._hand_over_setup(config, channel.directory, is_restart)
        except BaseException:
            self.kill()
            raise

    def _start(self, segment_descriptor: int, lifetime_read: int) -> subprocess.Popen[bytes]:
        descriptors = (segment_descriptor, lifetime_read)
        # -P: the runner's working directory is no place to import from. One BLAS thread: the sidecar needs none.
        command = [sys.executable, "-P", "-m", SIDECAR_MODULE, *map(str, descriptors)]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with self._log_path.open("wb") as log:
            # The sidecar inherits the mask, and lifts it once it ignores these: until then they would end it. Meant for
            # the runner, they reach it a moment later.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, wire.RUNNER_SIGNALS)
            try:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=descriptors,
                    env=environment,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _hand_over_setup(self, config: BookConfig, directory: Path, is_restart: bool) -> None:
        setup = wire.encode(
            wire.Setup(
                self._token,
                str(directory),
                config.vocab_size,
                config.tokenizer_path,
                config.spin_us,
                config.idle_policy,
                config.sidecar_cpu,
                os.getpid(),
                wire.max_command_bytes(config.layout),
                is_restart,
                wire.schema_hash(),
            )
        )
        try:
            os.write(self._lifetime, wire.SETUP_LENGTH.pack(len(setup)) + setup)
        except BrokenPipeError:
            if not is_restart:  # else its end is noticed like any other, and counted
                raise self._died_while_starting() from None

    def shake_hands(self, timeout_s: float) -> None:
        """Until the sidecar is ready. Raises `HandshakeFailed` or `LayoutMismatch`, with the sidecar ended."""
        try:
            self._wait_ready(timeout_s)
        except BaseException:
            self.kill()
            raise

    def _wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            data = self._channel.receive_event()
            if data is None:
                left_s = deadline - time.monotonic()
                if not self.is_alive():
                    raise self._died_while_starting()
                if left_s <= 0:
                    raise errors.HandshakeFailed(f"the sidecar was not ready within {timeout_s} s: {self.log_tail()}")
                self._channel.wait_event(int(left_s * 1000) + 1, self.pidfd)
                continue
            event = self._decode(data)
            if isinstance(event, wire.Fault):
                raise errors.HandshakeFailed(f"the sidecar could not start: {event.reason}")
            if isinstance(event, wire.Compiling):
                deadline = max(deadline, time.monotonic() + COMPILE_TIMEOUT_S)
            if self._is_ready(event):
                if not self._channel.wait_command_room(int(timeout_s * 1000)):
                    raise errors.HandshakeFailed("the sidecar is ready but takes no commands")
                return

    def has_become_ready(self) -> bool:
        """Whether a sidecar that nobody waits for has said that it is ready. Raises where it refuses; one that cannot
        start will end, which is noticed elsewhere. Receives all that came: a channel's descriptor tells of nothing more
        before that."""
        is_ready = False
        while (data := self._channel.receive_event()) is not None:
            is_ready |= self._is_ready(self._decode(data))
        return is_ready

    def _is_ready(self, event: wire.AnyEvent) -> bool:
        if isinstance(event, wire.Compiling):
            logger.warning("compiling kernels, once per machine (cached in %s)", event.cache_path)
        if not isinstance(event, wire.Ready):
            return False
        self._check_ready(event)
        return True

    def _decode(self, data: bytes) -> wire.AnyEvent:
        try:
            event = wire.decode_event(data)
        except errors.BadMessage as error:
            raise errors.HandshakeFailed(f"the sidecar's handshake does not decode: {error}") from error
        if isinstance(event, wire.Refused | wire.Ready) and event.token != self._token:
            raise errors.HandshakeFailed("a process without the handshake token answered in the sidecar's place")
        if isinstance(event, wire.Refused):
            kind = errors.LayoutMismatch if event.kind == errors.LayoutMismatch.__name__ else errors.HandshakeFailed
            raise kind(event.reason)
        return event

    def _check_ready(self, ready: wire.Ready) -> None:
        if ready.layout_version != LAYOUT_VERSION:
            raise errors.LayoutMismatch(f"the sidecar has layout {ready.layout_version}, expected {LAYOUT_VERSION}")
        if ready.schema_hash != wire.schema_hash():
            raise errors.LayoutMismatch(f"the sidecar speaks schema {ready.schema_hash}, expected {wire.schema_hash()}")

    def _died_while_starting(self) -> errors.HandshakeFailed:
        # What it had to say may have come in just before it ended.
        data = self._channel.receive_event()
        event = None if data is None else self._decode(data)
        if isinstance(event, wire.Fault):
            return errors.HandshakeFailed(f"the sidecar could not start: {event.reason}")
        return errors.HandshakeFailed(f"the sidecar ended while starting: {self.describe_end()}")

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def describe_end(self) -> str:
        """Exit status or signal, and the last lines of its log."""
        status = self._popen.wait()
        if status < 0:
            try:
                name = signal.Signals(-status).name
            except ValueError:
                name = f"signal {-status}"
            return f"killed by {name}; {self.log_tail()}"
        return f"exit status {status}; {self.log_tail()}"

    def log_tail(self) -> str:
        """The last lines that the sidecar logged."""
        try:
            lines = self._log_path.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return "its log ends with: " + " | ".join(lines[-LOG_TAIL_LINES:]) if lines else "its log is empty"

    def is_ours(self) -> bool:
        """False in a forked child of the process that started it."""
        return self._owner_pid == os.getpid()

    def wait_ended(self) -> bool:
        """Whether it has ended, after at most `STOP_TIMEOUT_S`."""
        if self.pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(STOP_TIMEOUT_S * 1000))

    def stop(self) -> None:
        """Waits for it to end after `Stop`, or after the end of its lifetime pipe; kills it if it does not."""
        self._close_descriptors(lifetime_only=True)
        if not self.wait_ended():
            logger.warning("the sidecar (pid %d) did not end within %s s and is killed", self.pid, STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Ends it at once, if it has not ended. Idempotent."""
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()
        self._close_descriptors(lifetime_only=False)

    def _close_descriptors(self, *, lifetime_only: bool) -> None:
        if self._lifetime >= 0:
            os.close(self._lifetime)
            self._lifetime = -1
        if not lifetime_only and self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
