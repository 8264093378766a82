"""The engine's process as the server has it: requests go in through a socket pair, outputs come by `subscribe`."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass

import asyncbook
from asyncbook import BookConfig, FinishReason, PeerError, RequestOutput, RequestParams, RunnerDied
from asyncbook.demo import CannotRun
from asyncbook.demo.engine_messages import (
    Abort,
    AnyRequest,
    Complete,
    Failed,
    Ready,
    encode,
    receive_reply,
    socket_pair,
)
from asyncbook.subscription import Subscription

START_TIMEOUT_S = 120.0
STATUS_TIMEOUT_S = 1.0
END_TIMEOUT_S = 10.0  # for the step in hand and the sidecar


class EngineError(Exception):
    """The engine ended a request in a way that is no answer. `status`: as HTTP calls it."""

    status = 500


class EngineDied(EngineError):
    """There is no engine any more; the message says what became of it."""

    status = 503


@dataclass(frozen=True)
class Setting:
    """What an engine is started with."""

    model: str
    num_rows: int
    max_model_len: int


class EngineLink:
    """Made by `start`. Everything but that and `close` belongs into one event loop."""

    def __init__(self, setting: Setting, process: subprocess.Popen[bytes], engine: socket.socket, ready: Ready) -> None:
        self.setting = setting
        self.eos_token_id = ready.eos_token_id
        self._process, self._engine = process, engine
        self._unsent: deque[bytes] = deque()
        self._subscription: Subscription = asyncbook.subscribe(ready.address)
        self._failure: str | None = None
        self.num_open = 0  # requests whose answer is not complete yet

    @classmethod
    def start(cls, setting: Setting) -> EngineLink:
        """Starts a process and waits until it has loaded. Raises `CannotRun`, and leaves nothing behind then."""
        with ExitStack() as undo:
            ours, theirs = socket_pair()
            undo.callback(ours.close)
            with theirs:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "asyncbook.demo.engine_process", str(theirs.fileno())),
                        *(setting.model, str(setting.num_rows), str(setting.max_model_len)),
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            undo.callback(process.wait)
            undo.callback(process.kill)
            ours.settimeout(START_TIMEOUT_S)
            try:
                reply = receive_reply(ours)
            except TimeoutError:
                raise CannotRun(f"the engine's process was not ready within {START_TIMEOUT_S:.0f} s") from None
            if isinstance(reply, Failed):
                raise CannotRun(reply.reason)
            if reply is None:
                raise CannotRun(f"the engine's process {_ended(process.wait())} before it was ready")
            ours.setblocking(False)
            link = cls(setting, process, ours, reply)
            undo.pop_all()
        return link

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def config(self) -> BookConfig:
        """Of the engine's book."""
        return self._subscription.config

    @property
    def address(self) -> str:
        """Of the engine's book."""
        return self._subscription.address

    @property
    def failure(self) -> str | None:
        """What became of the engine, None while it is there."""
        if self._failure is None and self._process.poll() is not None:
            self._fail()
        return self._failure

    def _fail(self, error: PeerError | None = None) -> EngineDied:
        """The first reason stays: what came later followed from it."""
        if self._failure is None:
            if isinstance(error, RunnerDied):  # its threads end one by one, its status comes with the last
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(STATUS_TIMEOUT_S)
            status = self._process.poll()
            if status is not None:
                self._failure = f"the engine, process {self.pid}, {_ended(status)}"
            else:
                self._failure = f"the engine's outputs ended: {error or 'it has closed its book'}"
        return EngineDied(self._failure)

    async def complete(
        self, request_id: str, prompt_token_ids: Sequence[int], params: RequestParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer, piece by piece as it comes. Whoever closes this before its end takes the request along. Raises
        `EngineError`."""
        if self.failure is not None:
            raise EngineDied(self.failure)
        has_ended = False
        # The stream comes first: it gets what is delivered from now on.
        async with aclosing(self._subscription.stream(request_id)) as pieces:
            self.num_open += 1
            self._post(Complete(request_id, list(prompt_token_ids), params))
            try:
                async for piece in pieces:
                    has_ended = piece.is_finished
                    if piece.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                        raise EngineError(f"the engine ended the request with {piece.finish_reason.name}")
                    yield piece
            except PeerError as error:
                raise self._fail(error) from error
            finally:
                self.num_open -= 1
                if not has_ended:
                    self._post(Abort(request_id))
        if not has_ended:
            raise self._fail()

    def _post(self, message: AnyRequest) -> None:
        """Sends it, or keeps it for as long as the engine has no room: a step takes its time."""
        self._unsent.append(encode(message))
        if len(self._unsent) == 1:
            self._send()

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                self._engine.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            loop.add_writer(self._engine, self._send)
            return
        except OSError:  # the engine is gone, which the subscription tells everybody; or this link is closed
            self._unsent.clear()
        if self._engine.fileno() >= 0:
            loop.remove_writer(self._engine)

    async def watch(self) -> None:
        """Until the engine ends. Takes the outputs that no stream wants any more: the ends of aborted requests."""
        try:
            async for _ in self._subscription.outputs():
                pass
        except PeerError as error:
            self._fail(error)
        else:
            self._fail()

    def close(self) -> None:
        """Ends the engine, and waits for that. Idempotent."""
        self._subscription.close()
        self._engine.close()  # which the engine sees
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _ended(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"has ended with status {status}"
