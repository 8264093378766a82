"""OpenAI's completion objects: what may be asked, and what an answer looks like. No server and no engine in here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncbook import BookConfig, FinishReason, InvalidRequest, RequestOutput, RequestParams

DEFAULT_MAX_TOKENS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64
SHOWN_CHARACTERS = 60  # of what came, in a message
FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class BadRequest(Exception):
    """What was asked cannot be. The message names the field, what was expected and what came."""

    def __init__(self, message: str, field: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.status, self.code = field, status, code


@dataclass(frozen=True)
class CompletionRequest:
    """A body that makes sense by itself. Whether the prompt fits, only its ids tell: `check_prompt`."""

    prompt: str | list[int]
    params: RequestParams
    is_stream: bool
    has_usage: bool  # a stream's last chunk tells the usage


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_int(token_id, 0) for token_id in value)


def _is_stop(value: Any) -> bool:
    strings = [value] if isinstance(value, str) else value
    return (
        isinstance(strings, list)
        and len(strings) <= MAX_STOP_STRINGS
        and all(isinstance(string, str) and string for string in strings)
    )


# Each field, whether a value of it will do, and what was expected where it will not. Null is as good as not there.
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda value: isinstance(value, str), "the name of a model"),
    "prompt": (
        lambda value: bool(value) and (isinstance(value, str) or _is_ids(value)),
        "a string or a list of token ids, and not an empty one",
    ),
    "max_tokens": (lambda value: _is_int(value, 1), "an int of at least 1"),
    "min_tokens": (lambda value: _is_int(value, 0), "an int of at least 0"),
    "stop": (_is_stop, f"a string or a list of at most {MAX_STOP_STRINGS}, and no empty one"),
    "stop_token_ids": (
        lambda value: _is_ids(value) and len(value) <= MAX_STOP_TOKEN_IDS,
        f"a list of at most {MAX_STOP_TOKEN_IDS} token ids",
    ),
    "ignore_eos": (lambda value: type(value) is bool, "true or false"),
    "stream": (lambda value: type(value) is bool, "true or false"),
    "stream_options": (
        lambda value: (
            isinstance(value, dict) and all(k == "include_usage" and type(v) is bool for k, v in value.items())
        ),
        '{"include_usage": true or false}',
    ),
    "temperature": (lambda value: type(value) in (int, float) and value == 0, "0: this server is greedy"),
    "n": (lambda value: type(value) is int and value == 1, "1: this server is greedy"),
    "seed": (lambda value: type(value) is int, "an int, which changes nothing: this server is greedy"),
    "user": (lambda value: isinstance(value, str), "a string, which changes nothing"),
}


def read_request(body: bytes, model: str, eos_token_id: int) -> CompletionRequest:
    """What a body asks of a model. Raises `BadRequest`."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest(f"the body is {_shown(fields)}, expected an object")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, value in fields.items():
        if name not in FIELDS:
            raise BadRequest(f"{name} is no field of this server's, expected some of {', '.join(FIELDS)}", name)
        is_good, expected = FIELDS[name]
        if not is_good(value):
            raise BadRequest(f"{name} is {_shown(value)}, expected {expected}", name)
    if "prompt" not in fields:
        raise BadRequest(f"prompt is missing, expected {FIELDS['prompt'][1]}", "prompt")
    if fields.get("model", model) != model:
        message = f"model is {_shown(fields['model'])}, expected {model!r}, which is the only one here"
        raise BadRequest(message, "model", status=404, code="model_not_found")
    is_stream = fields.get("stream", False)
    if "stream_options" in fields and not is_stream:
        raise BadRequest("stream_options came without stream, expected both or neither", "stream_options")
    has_usage = bool(fields.get("stream_options", {}).get("include_usage"))
    return CompletionRequest(fields["prompt"], _params(fields, eos_token_id), is_stream, has_usage)


def _params(fields: dict[str, Any], eos_token_id: int) -> RequestParams:
    stop = fields.get("stop", [])
    params = RequestParams(
        max_tokens=fields.get("max_tokens", DEFAULT_MAX_TOKENS),
        min_tokens=fields.get("min_tokens", 0),
        eos_token_id=eos_token_id,
        stop_token_ids=fields.get("stop_token_ids", []),
        stop=[stop] if isinstance(stop, str) else stop,
        ignore_eos=fields.get("ignore_eos", False),
    )
    try:
        params.check(has_tokenizer=True)
    except InvalidRequest as error:  # as the book would say it
        raise BadRequest(str(error)) from None
    return params


def check_prompt(prompt_token_ids: list[int], params: RequestParams, config: BookConfig) -> None:
    """Raises `BadRequest` for a prompt that does not fit the engine's book."""
    if not prompt_token_ids:
        raise BadRequest("prompt has no token, expected at least one", "prompt")
    for i, token_id in enumerate(prompt_token_ids):
        if token_id >= config.vocab_size:
            raise BadRequest(f"prompt[{i}] is {token_id}, expected 0 to {config.vocab_size - 1}", "prompt")
    num_prompt_tokens, most = len(prompt_token_ids), config.max_model_len
    if num_prompt_tokens + (params.max_tokens or 0) > most:
        raise BadRequest(
            f"max_tokens is {params.max_tokens} and prompt has {num_prompt_tokens} tokens, expected at most {most} "
            f"together",
            "max_tokens" if num_prompt_tokens < most else "prompt",
            code="context_length_exceeded",
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


class Answer:
    """The answer to one request, as a stream's chunks or whole."""

    def __init__(self, request_id: str, model: str, num_prompt_tokens: int) -> None:
        self._about = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._num_prompt_tokens, self._num_tokens = num_prompt_tokens, 0
        self._texts: list[str] = []
        self._last: RequestOutput | None = None

    def add(self, piece: RequestOutput) -> None:
        """The next piece."""
        self._num_tokens += len(piece.token_ids)
        self._texts.append(piece.text or "")
        self._last = piece

    def chunk(self) -> dict[str, Any] | None:
        """The piece added last; None where it brings no text yet (half a character, or what may become a stop string)
        and is not the end."""
        assert self._last is not None
        if not self._texts[-1] and not self._last.is_finished:
            return None
        return {**self._about, "choices": [self._choice(self._texts[-1])]}

    def usage_chunk(self) -> dict[str, Any]:
        """The usage, for the end of a stream."""
        return {**self._about, "choices": [], "usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        """All pieces in one."""
        return {**self._about, "choices": [self._choice("".join(self._texts))], "usage": self._usage()}

    def _choice(self, text: str) -> dict[str, Any]:
        last = self._last
        assert last is not None
        finish_reason = FINISH_REASONS[last.finish_reason] if last.is_finished else None
        stop_reason = last.stop_reason  # a stop id or string, which is more than OpenAI tells
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason}

    def _usage(self) -> dict[str, int]:
        prompt, completion = self._num_prompt_tokens, self._num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error_body(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
