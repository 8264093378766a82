"""What is asked: our own prompts, or a file of others."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec

from asyncbook import RequestParams
from asyncbook.demo import CannotRun
from asyncbook.demo.runner import Request
from asyncbook.demo.tokenizer import Tokenizer

REQUESTS_A_ROW = 3


class Prompt(msgspec.Struct):
    """A line of a prompts file. `max_tokens` None: as many as the demo's option says."""

    prompt: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


def read_prompts(path: Path | None, num_rows: int) -> list[Prompt]:
    """The prompts of a JSONL file. Raises `CannotRun` where a line is not a `Prompt`.

    Without a path our own, repeated until there are `REQUESTS_A_ROW` times as many as rows, so that rows are reused.
    """
    source = path or files("asyncbook.demo") / "prompts.jsonl"
    try:
        prompts = msgspec.json.Decoder(Prompt).decode_lines(source.read_bytes())
    except msgspec.DecodeError as error:
        raise CannotRun(f'{source}: {error}; a line is {{"prompt": text, optional "max_tokens": int}}') from error
    if not prompts:
        raise CannotRun(f"{source} holds no prompt")
    if path is None:
        prompts = [prompts[i % len(prompts)] for i in range(max(len(prompts), REQUESTS_A_ROW * num_rows))]
    return prompts


def make_requests(prompts: Sequence[Prompt], tokenizer: Tokenizer, max_tokens: int) -> list[Request]:
    """New requests, `max_tokens` where a prompt sets none."""
    requests = []
    for number, prompt in enumerate(prompts):
        params = RequestParams(max_tokens=prompt.max_tokens or max_tokens, eos_token_id=tokenizer.eos_token_id)
        requests.append(Request(f"request-{number}", prompt.prompt, tokenizer.encode_chat(prompt.prompt), params))
    return requests
