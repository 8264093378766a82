"""A completion server in a process of its own, as `asyncbook serve` starts it, and clients that talk HTTP to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from asyncbook import BookConfig, RequestParams
from tests.conftest import TIMEOUT_S, wait_until
from tests.process.kills import MARK, marked_processes

ROWS, MAX_MODEL_LEN = 4, 2048


@dataclass(frozen=True)
class Server:
    """`mark`: which every process of it has in its environment. `folder`: where its book's sockets are."""

    process: subprocess.Popen[str]
    url: str
    mark: str
    folder: Path

    def client(self, timeout_s: float = TIMEOUT_S) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=timeout_s)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=TIMEOUT_S)

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/health").json()
        return found

    def check_gone(self) -> None:
        """No process of it is left, and no file."""
        wait_until(lambda: not marked_processes(self.mark), "the server's processes end")
        assert [str(path) for path in self.folder.rglob("*")] == []


@contextmanager
def serving(folder: Path, model: str = "random", rows: int = ROWS) -> Iterator[Server]:
    """A server until the block ends; then Ctrl-C ends it, if nothing did before, and nothing may be left."""
    mark = uuid.uuid4().hex
    options = ["--port", "0", "--model", model, "--rows", str(rows), "--max-model-len", str(MAX_MODEL_LEN)]
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncbook", "serve", *options],
        env={**os.environ, MARK: mark, "XDG_RUNTIME_DIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        url, _, _ = process.stdout.readline().partition(" ")
        assert url.startswith("http://127.0.0.1:"), process.communicate(timeout=TIMEOUT_S)
        server = Server(process, url, mark, folder)
        yield server
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors
            assert "Traceback" not in errors
        server.check_gone()
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


async def events(client: httpx.AsyncClient, **fields: Any) -> AsyncIterator[Any]:
    """The events of a streamed completion, `"[DONE]"` among them."""
    async with client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                assert line.startswith("data: ")
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)


async def streamed(client: httpx.AsyncClient, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The text of a whole stream, and the choice of its last chunk."""
    *chunks, done = [event async for event in events(client, **fields)]
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert len({chunk["id"] for chunk in chunks}) == 1
    return "".join(choice["text"] for choice in choices), choices[-1]


async def completed(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """A completion in one piece."""
    response = await client.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def texts_of_the_demo(model_name: str, prompts: Sequence[str], max_tokens: int, num_rows: int) -> list[str]:
    """What the model says to each prompt: the demo's runner in this process, its books kept by the loop."""
    import tokenizers
    import torch

    from asyncbook.demo import weights
    from asyncbook.demo.engine import NUM_SPEC_TOKENS, PREFILL_CHUNK, Engine
    from asyncbook.demo.loop import LoopBook
    from asyncbook.demo.runner import Request, Runner

    model, tokenizer = weights.load(model_name, torch.device("cpu"))
    text_of_ids = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    config = BookConfig(
        max_num_reqs=num_rows,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=tokenizer.vocab_size,
        num_spec_tokens=NUM_SPEC_TOKENS,
    )
    params = RequestParams(max_tokens=max_tokens, eos_token_id=tokenizer.eos_token_id)
    requests = [Request(prompt, prompt, text_of_ids.encode(prompt).ids, params) for prompt in prompts]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    Runner(LoopBook(config), Engine(model, num_rows, MAX_MODEL_LEN, PREFILL_CHUNK), requests).run()
    torch.set_num_threads(num_threads)
    return [text_of_ids.decode(request.token_ids) for request in requests]
