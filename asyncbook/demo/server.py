"""An ASGI app that completes text as OpenAI's API does it: `/v1/completions`, `/v1/models`, `/health`.

The model runs in another process (`engine_process`). What it samples comes from the sidecar of that process, by
`asyncbook.subscribe` in `engine_link`; text and stops are made there.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import msgspec
import tokenizers
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from asyncbook import RequestOutput
from asyncbook.demo.completions import Answer, BadRequest, check_prompt, error_body, read_request
from asyncbook.demo.engine_link import EngineDied, EngineError, EngineLink

MAX_BODY_BYTES = 1 << 20
REQUESTS_A_ROW = 32  # that may wait for it; more are turned away
CLIENT_WENT = 499  # nobody reads it

T = TypeVar("T")


class JSONResponse(Response):
    """Encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class EventStream(Response):
    """Server-sent events, as they come. A client that goes ends them."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Does the work, or drops it and returns None when the client goes first. The request's body has been read."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for data in request.stream():
        body += data
        if len(body) > MAX_BODY_BYTES:
            raise BadRequest(f"the body has more than {MAX_BODY_BYTES} bytes, the most there may be", status=413)
    return bytes(body)


class CompletionServer:
    """The app's routes, over one engine."""

    def __init__(self, engine: EngineLink) -> None:
        self._engine = engine
        self._model = engine.setting.model
        assert engine.config.tokenizer is not None
        self._tokenizer = tokenizers.Tokenizer.from_file(str(engine.config.tokenizer))
        self._created = int(time.time())

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Watches the engine meanwhile, and ends it."""
        watch = asyncio.ensure_future(self._engine.watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            self._engine.close()

    # Routes

    async def completions(self, request: Request) -> Response:
        """POST: the answer to a prompt, whole or as a stream."""
        asked = read_request(await _read_body(request), self._model, self._engine.eos_token_id)
        if self._engine.failure is not None:
            raise EngineDied(self._engine.failure)
        prompt = asked.prompt
        prompt_token_ids = self._tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        check_prompt(prompt_token_ids, asked.params, self._engine.config)
        most = REQUESTS_A_ROW * self._engine.setting.num_rows
        if self._engine.num_open >= most:
            raise BadRequest(f"{self._engine.num_open} requests wait, at most {most} may; come again", status=429)
        request_id = f"cmpl-{uuid.uuid4().hex}"
        answer = Answer(request_id, self._model, len(prompt_token_ids))
        pieces = self._engine.complete(request_id, prompt_token_ids, asked.params)
        if asked.is_stream:
            return EventStream(_events(answer, pieces, asked.has_usage))
        whole = await unless_gone(request.receive, _whole(answer, pieces))
        return Response(status_code=CLIENT_WENT) if whole is None else JSONResponse(whole)

    async def models(self, request: Request) -> Response:
        """GET: the one model there is."""
        model = {"id": self._model, "object": "model", "created": self._created, "owned_by": "asyncbook"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        """GET: whether there is an engine, and where its book is, for `asyncbook.attach` and `subscribe`."""
        engine = self._engine
        about = {"model": self._model, "engine_pid": engine.pid, "book": engine.address, "requests": engine.num_open}
        if engine.failure is not None:
            return JSONResponse({"status": "dead", "reason": engine.failure, **about}, 503)
        return JSONResponse({"status": "ok", **about})


# Answers


async def _whole(answer: Answer, pieces: AsyncGenerator[RequestOutput, None]) -> dict[str, Any]:
    async with aclosing(pieces):
        async for piece in pieces:
            answer.add(piece)
    return answer.whole()


async def _events(
    answer: Answer, pieces: AsyncGenerator[RequestOutput, None], has_usage: bool
) -> AsyncGenerator[bytes, None]:
    """A stream. One that ends without [DONE] has told an error."""
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                answer.add(piece)
                if (chunk := answer.chunk()) is not None:
                    yield _event(msgspec.json.encode(chunk))
    except EngineError as error:
        yield _event(msgspec.json.encode(error_body(str(error), "server_error")))
        return
    if has_usage:
        yield _event(msgspec.json.encode(answer.usage_chunk()))
    yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


# Errors


async def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    body = error_body(str(error), "invalid_request_error", error.field, error.code)
    return JSONResponse(body, error.status)


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(error_body(message, "invalid_request_error"), error.status_code, error.headers)


async def _no_answer(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    return JSONResponse(error_body(str(error), "server_error"), error.status)


def make_app(engine: EngineLink) -> Starlette:
    """The app of an engine that has started; ends the engine when it ends."""
    server = CompletionServer(engine)
    return Starlette(
        routes=[
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/health", server.health),
        ],
        exception_handlers={
            BadRequest: _bad_request,
            HTTPException: _no_such_route,
            EngineError: _no_answer,
        },
        lifespan=server.lifespan,
    )
