"""The completion server's app over an engine that is none: what cannot be brought about with a real one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

for needed in ("tokenizers", "starlette", "httpx"):
    pytest.importorskip(needed)

import httpx  # noqa: E402

from asyncbook import BookConfig, RequestOutput  # noqa: E402
from asyncbook.demo.engine_link import EngineError, EngineLink, Setting  # noqa: E402
from asyncbook.demo.server import REQUESTS_A_ROW, make_app  # noqa: E402
from asyncbook.demo.tokenizer import ByteTokenizer  # noqa: E402


class NoEngine:
    """Ends every request with an error."""

    setting, eos_token_id, failure, num_open = Setting("tiny", 1, 64), 256, None, 0

    def __init__(self, tokenizer: Path) -> None:
        self.config = BookConfig(max_num_reqs=1, max_model_len=64, vocab_size=260, tokenizer=tokenizer)

    async def complete(self, *_: Any) -> AsyncGenerator[RequestOutput, None]:
        raise EngineError("the engine ended the request with ERROR")
        yield


@pytest.fixture
def engine(tmp_path: Path) -> NoEngine:
    """Its tokenizer is one of bytes."""
    path = tmp_path / "tokenizer.json"
    path.write_text(ByteTokenizer().to_json())
    return NoEngine(path)


async def post(engine: NoEngine, **fields: Any) -> httpx.Response:
    app = make_app(cast(EngineLink, engine))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return await client.post("/v1/completions", json={"prompt": "a", **fields})


async def test_more_requests_than_may_wait(engine: NoEngine) -> None:
    engine.num_open = REQUESTS_A_ROW
    response = await post(engine)
    assert response.status_code == 429
    assert f"{REQUESTS_A_ROW} requests wait, at most {REQUESTS_A_ROW} may" in response.json()["error"]["message"]


async def test_a_request_that_the_engine_ended(engine: NoEngine) -> None:
    response = await post(engine)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    response = await post(engine, stream=True)
    assert response.status_code == 200
    assert "ended the request with ERROR" in response.text
    assert "[DONE]" not in response.text
