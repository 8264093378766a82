"""The completion server on the real model, which takes a while to load: its texts are the demo's."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

for needed in ("torch", "tokenizers", "gguf", "click", "starlette", "uvicorn", "httpx"):
    pytest.importorskip(needed)

from asyncbook.demo import CannotRun, weights  # noqa: E402
from asyncbook.demo.prompts import read_prompts  # noqa: E402
from tests.process.servers import ROWS, completed, serving, streamed, texts_of_the_demo  # noqa: E402

pytestmark = [pytest.mark.stress, pytest.mark.timeout(7200)]


async def test_texts_of_the_real_model() -> None:
    try:
        weights.smollm2_path()
    except CannotRun as error:
        pytest.skip(str(error))
    prompts = [prompt.prompt for prompt in read_prompts(None, ROWS)][: 2 * ROWS]
    with tempfile.TemporaryDirectory(prefix="ab") as folder, serving(Path(folder), "smollm2") as server:
        async with server.client(timeout_s=300) as client:
            streams = await asyncio.gather(*(streamed(client, prompt=prompt, max_tokens=24) for prompt in prompts))
            fields = {"prompt": "The capital of France is", "max_tokens": 8, "stop": "\n"}
            answer = await completed(client, **fields)
    assert [text for text, _ in streams] == texts_of_the_demo("smollm2", prompts, 24, num_rows=ROWS)
    assert (answer["choices"][0]["text"], answer["choices"][0]["stop_reason"]) == (" Paris.", "\n")
