"""What may be admitted. Everything that can be known to be wrong before a message is sent is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncbook.config import BookConfig, RequestParams, is_int
from asyncbook.ipc.errors import InvalidRequest, InvalidToken, PromptTooLong
from asyncbook.ipc.wire import MAX_REQUEST_ID_BYTES


@dataclass(frozen=True, slots=True)
class Request:
    """Ids as C-contiguous int32, the mask as bool."""

    prompt_token_ids: np.ndarray
    output_token_ids: np.ndarray
    is_token_ids: np.ndarray | None


def _token_ids(request_id: str, name: str, ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"request {request_id!r}: {name} is no list of ids: {error}") from None
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iuO":
        raise InvalidRequest(f"request {request_id!r}: {name} is {array.dtype} {list(array.shape)}, expected ids [n]")
    try:
        bad = np.flatnonzero((array < 0) | (array >= vocab_size))
    except TypeError:
        raise InvalidRequest(f"request {request_id!r}: {name} holds something that is not an id") from None
    if bad.size:
        i = int(bad[0])
        raise InvalidToken(f"request {request_id!r}: {name}[{i}] is {array[i]}, expected 0 to {vocab_size - 1}")
    return np.ascontiguousarray(array, np.int32)


def check_request(
    config: BookConfig,
    request_id: str,
    prompt_token_ids: Sequence[int] | np.ndarray,
    params: RequestParams,
    output_token_ids: Sequence[int] | np.ndarray,
    num_computed_tokens: int,
    prompt_is_token_ids: Sequence[bool] | np.ndarray | None,
) -> Request:
    """Raises `InvalidRequest`, `InvalidToken` or `PromptTooLong`."""
    if not isinstance(request_id, str):
        raise InvalidRequest(f"request_id is {request_id!r}, expected a string")
    try:
        num_bytes = len(request_id.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"request_id is {request_id!r}, which is no text: {error}") from None
    if num_bytes > MAX_REQUEST_ID_BYTES:
        raise InvalidRequest(f"request_id {request_id[:20]!r}... has {num_bytes} bytes, at most {MAX_REQUEST_ID_BYTES}")
    if not isinstance(params, RequestParams):
        raise InvalidRequest(f"request {request_id!r}: params is {params!r}, expected RequestParams")
    params.check(has_tokenizer=config.tokenizer is not None)
    _check_logprobs(request_id, params.logprobs, config.max_logprobs)
    prompt = _token_ids(request_id, "prompt_token_ids", prompt_token_ids, config.vocab_size)
    outputs = _token_ids(request_id, "output_token_ids", output_token_ids, config.vocab_size)
    num_tokens = prompt.size + outputs.size
    if prompt.size == 0:
        raise InvalidRequest(f"request {request_id!r}: the prompt is empty, expected at least one token")
    if num_tokens > config.max_model_len:
        raise PromptTooLong(
            f"request {request_id!r}: {prompt.size} prompt and {outputs.size} earlier output tokens, "
            f"expected at most max_model_len = {config.max_model_len}"
        )
    if params.max_tokens is not None and outputs.size >= params.max_tokens:
        raise InvalidRequest(
            f"request {request_id!r}: {outputs.size} earlier outputs, "
            f"expected fewer than max_tokens = {params.max_tokens}"
        )
    _check_num_computed(request_id, num_computed_tokens, num_tokens)
    return Request(prompt, outputs, _mask(request_id, prompt_is_token_ids, prompt.size))


def _check_logprobs(request_id: str, logprobs: int | None, max_logprobs: int | None) -> None:
    if logprobs is None:
        return
    if max_logprobs is None:
        raise InvalidRequest(
            f"request {request_id!r}: logprobs is {logprobs}, but the book was made without max_logprobs"
        )
    if logprobs > max_logprobs:
        raise InvalidRequest(
            f"request {request_id!r}: logprobs is {logprobs}, expected at most max_logprobs = {max_logprobs}"
        )


def _check_num_computed(request_id: str, num_computed_tokens: Any, num_tokens: int) -> None:
    if not is_int(num_computed_tokens) or not 0 <= num_computed_tokens <= num_tokens:
        raise InvalidRequest(
            f"request {request_id!r}: num_computed_tokens is {num_computed_tokens!r}, expected 0 to {num_tokens}"
        )


def _mask(request_id: str, mask: Sequence[bool] | np.ndarray | None, num_prompt_tokens: int) -> np.ndarray | None:
    if mask is None:
        return None
    try:
        array = np.asarray(mask)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"request {request_id!r}: prompt_is_token_ids is no list of bools: {error}") from None
    if array.shape != (num_prompt_tokens,) or array.dtype != np.bool_:
        raise InvalidRequest(
            f"request {request_id!r}: prompt_is_token_ids is {array.dtype} {list(array.shape)}, "
            f"expected bool [{num_prompt_tokens}]"
        )
    return np.ascontiguousarray(array)
