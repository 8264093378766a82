"""The completion server, by real HTTP: what it answers, clients that go, and deaths of its processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

for needed in ("torch", "tokenizers", "gguf", "click", "starlette", "uvicorn", "httpx"):
    pytest.importorskip(needed)

import httpx  # noqa: E402
from click.testing import CliRunner  # noqa: E402

import asyncbook  # noqa: E402
from asyncbook import FinishReason  # noqa: E402
from asyncbook.demo import CannotRun  # noqa: E402
from asyncbook.demo.engine_link import EngineLink, Setting  # noqa: E402
from asyncbook.demo.serve_command import serve_command  # noqa: E402
from tests.conftest import TIMEOUT_S, wait_until  # noqa: E402
from tests.process.leftovers import nothing_left_behind  # noqa: E402
from tests.process.servers import ROWS, Server, completed, events, serving, streamed, texts_of_the_demo  # noqa: E402

pytestmark = pytest.mark.timeout(60)

MAX_TOKENS = 40
PROMPTS = [f"{'some text, and more of it, ' * (1 + number % 4)}{number}" for number in range(2 * ROWS)]
ENDLESS: dict[str, Any] = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a server's book has its sockets: a short path."""
    with tempfile.TemporaryDirectory(prefix="ab") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def kept() -> Iterator[Callable[[], Server]]:
    """Gives a server that tests share: the one that is there, or another where a test has ended that."""
    with ExitStack() as stack:
        servers: list[Server] = []

        def give() -> Server:
            if not servers or servers[-1].process.poll() is not None:
                path = stack.enter_context(tempfile.TemporaryDirectory(prefix="ab"))
                servers.append(stack.enter_context(serving(Path(path))))
            return servers[-1]

        yield give


@pytest.fixture
def server(kept: Callable[[], Server]) -> Server:
    """One with nothing to do."""
    return kept()


@pytest.fixture(scope="module")
def greedy_texts() -> list[str]:
    """What the model says to each prompt, without any server or book."""
    return texts_of_the_demo("random", PROMPTS, MAX_TOKENS, num_rows=ROWS)


# Answers


async def test_a_stream_is_the_models_greedy_text(server: Server, greedy_texts: list[str]) -> None:
    async with server.client() as client:
        text, last = await streamed(client, prompt=PROMPTS[0], max_tokens=MAX_TOKENS)
        assert text == greedy_texts[0]
        assert last["finish_reason"] == "length"
        ids = [*PROMPTS[0].encode()]
        answer = await completed(client, prompt=ids, max_tokens=MAX_TOKENS, model="random")
    assert answer["choices"][0]["text"] == text, "in one piece, and from ids, it is the same"
    assert answer["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": MAX_TOKENS,
        "total_tokens": len(ids) + MAX_TOKENS,
    }


async def test_a_stream_may_end_with_its_usage(server: Server) -> None:
    fields = {"prompt": "ab", "max_tokens": 3, "ignore_eos": True, "stream_options": {"include_usage": True}}
    async with server.client() as client:
        *chunks, usage, done = [event async for event in events(client, **fields)]
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


async def test_more_streams_than_rows_at_once(server: Server, greedy_texts: list[str]) -> None:
    arrivals: list[int] = []

    async def read(client: httpx.AsyncClient, number: int) -> str:
        text = ""
        async for event in events(client, prompt=PROMPTS[number], max_tokens=MAX_TOKENS):
            if event != "[DONE]":
                arrivals.append(number)
                text += event["choices"][0]["text"]
        return text

    async with server.client() as client:
        texts = await asyncio.gather(*(read(client, number) for number in range(len(PROMPTS))))
    assert texts == greedy_texts
    changes = sum(a != b for a, b in itertools.pairwise(arrivals))
    assert changes >= 2 * len(PROMPTS), "they grow side by side, not one after the other"


async def test_a_stop_string_ends_the_text_before_it(server: Server, greedy_texts: list[str]) -> None:
    number, found = next(
        (number, match)
        for number, text in enumerate(greedy_texts)
        if (match := re.search("(?<=.)[!-~]{2}", text, re.S))
    )
    text, stop = greedy_texts[number], found.group()
    fields = {"prompt": PROMPTS[number], "max_tokens": MAX_TOKENS, "stop": ["never said", stop]}
    async with server.client() as client:
        got, last = await streamed(client, **fields)
        answer = await completed(client, **fields)
    assert got == answer["choices"][0]["text"] == text[: text.index(stop)]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
    assert answer["usage"]["completion_tokens"] < MAX_TOKENS


def test_what_is_there(server: Server) -> None:
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["random"]
    health = server.health()
    assert (health["status"], health["model"], health["requests"]) == ("ok", "random", 0)
    with asyncbook.attach(health["book"]) as book:
        assert book.runner_pid == health["engine_pid"]
        assert book.config.max_num_reqs == ROWS


@pytest.mark.parametrize(
    ("body", "status", "field", "fragment"),
    [
        ({"prompt": "a", "max_tokens": "many"}, 400, "max_tokens", "is 'many', expected an int of at least 1"),
        ({"prompt": [1, 260]}, 400, "prompt", "prompt[1] is 260, expected 0 to 259"),
        ({"prompt": "a", "max_tokens": 5000}, 400, "max_tokens", "at most 2048 together"),
        ({"prompt": "a", "best_of": 2}, 400, "best_of", "no field"),
        ({"prompt": "a", "stream": True, "temperature": 1}, 400, "temperature", "greedy"),
        ({"prompt": "a", "model": "other"}, 404, "model", "expected 'random'"),
        ({"prompt": "a" * (1 << 20)}, 413, None, "more than 1048576 bytes"),
        ([1], 400, None, "expected an object"),
    ],
)
def test_bad_requests(server: Server, body: Any, status: int, field: str | None, fragment: str) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (status, field, "invalid_request_error")
    assert fragment in error["message"]


def test_routes_that_are_not_there(server: Server) -> None:
    for path, status in (("/v1/chat/completions", 404), ("/v1/completions", 405)):
        response = server.get(path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]


# Clients that go


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_goes_takes_its_request_along(server: Server, is_stream: bool) -> None:
    address = server.health()["book"]
    with asyncbook.attach(address) as book:
        async with asyncbook.subscribe(address) as outputs, asyncio.timeout(TIMEOUT_S):
            task = asyncio.ensure_future(_begin(server, is_stream))
            delivered = outputs.outputs()
            first = await anext(delivered)  # it runs
            assert book.stats().num_rows_held == 1
            request_id = await task
            assert request_id in (first.request_ids[0], None)
            num_tokens, finish_reason = len(first.token_ids), FinishReason.NONE
            while finish_reason is FinishReason.NONE:
                (delta,) = await anext(delivered)
                num_tokens += len(delta.token_ids)
                finish_reason = delta.finish_reason
        assert finish_reason is FinishReason.ABORT
        assert num_tokens < ENDLESS["max_tokens"]
        wait_until(lambda: book.stats().num_rows_held == 0, "the row is released")
    wait_until(lambda: server.health()["requests"] == 0, "the server forgets the request")


async def _begin(server: Server, is_stream: bool) -> str | None:
    """A client that reads the first piece of an endless answer, or waits for all of it for a moment; then it goes."""
    if not is_stream:
        async with server.client(timeout_s=0.3) as client:
            with pytest.raises(httpx.ReadTimeout):
                await completed(client, **ENDLESS)
        return None
    async with server.client() as client:
        stream = events(client, **ENDLESS)
        event = await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
    return str(event["id"])


async def test_a_client_that_goes_while_its_request_waits_for_a_row(server: Server) -> None:
    async with server.client() as client:
        streams = [events(client, **ENDLESS) for _ in range(ROWS)]
        for stream in streams:
            await anext(stream)
        waiting = [asyncio.ensure_future(streamed(client, prompt="b", max_tokens=3)) for _ in range(2)]
        await asyncio.to_thread(wait_until, lambda: server.health()["requests"] == ROWS + 2, "two requests wait")
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(waiting[1], TIMEOUT_S)
    wait_until(lambda: server.health()["requests"] == 0, "the server forgets them all")
    with asyncbook.attach(server.health()["book"]) as book:
        wait_until(lambda: book.stats().num_rows_held == 0, "every row is released")


# Deaths


async def test_a_sidecar_that_dies_is_not_noticed(server: Server, greedy_texts: list[str]) -> None:
    with asyncbook.attach(server.health()["book"]) as book:
        async with server.client() as client:
            text = ""
            async for event in events(client, prompt=PROMPTS[1], max_tokens=MAX_TOKENS):
                if not text:
                    assert book.sidecar_pid is not None
                    os.kill(book.sidecar_pid, signal.SIGKILL)
                text += "" if event == "[DONE]" else event["choices"][0]["text"]
        assert book.num_restarts == 1
    assert text == greedy_texts[1]


async def test_an_engine_that_dies_ends_every_stream(folder: Path) -> None:
    with serving(folder) as server:
        async with server.client() as client:
            streams = [events(client, **ENDLESS) for _ in range(ROWS + 1)]  # one more than there are rows
            for stream in streams[:ROWS]:
                await anext(stream)
            last = asyncio.ensure_future(anext(streams[ROWS]))
            whole = asyncio.ensure_future(client.post("/v1/completions", json=ENDLESS))
            await asyncio.to_thread(wait_until, lambda: server.health()["requests"] == ROWS + 2, "all are open")
            os.kill(server.health()["engine_pid"], signal.SIGKILL)
            async with asyncio.timeout(TIMEOUT_S):
                ends = [[event async for event in stream][-1] for stream in streams[:ROWS]] + [await last]
                response = await whole
            assert response.status_code == 503
            for end in (*ends, response.json()):
                assert "was killed by SIGKILL" in end["error"]["message"]
                assert end["error"]["type"] == "server_error"
            for response in (server.get("/health"), await client.post("/v1/completions", json=ENDLESS)):
                assert response.status_code == 503
            health = server.health()
            assert (health["status"], health["requests"]) == ("dead", 0)
            assert "was killed by SIGKILL" in health["reason"]


def test_a_server_that_is_killed_leaves_nothing(server: Server) -> None:
    server.process.kill()
    server.process.wait(TIMEOUT_S)
    server.check_gone()


# Starting


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(serve_command, ["--port", str(port)])
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in result.output


def test_an_engine_that_does_not_start(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with nothing_left_behind(folder), pytest.raises(CannotRun, match="has ended with status 1 before it was ready"):
        EngineLink.start(Setting("random", 1, 64))
