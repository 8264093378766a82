"""What may be asked of the completion server, what it answers, and what it says of mistakes. No server runs."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from asyncbook import BookConfig, FinishReason, RequestOutput, RequestParams
from asyncbook.demo.completions import Answer, BadRequest, CompletionRequest, check_prompt, read_request
from asyncbook.demo.engine_messages import (
    MAX_BYTES,
    MAX_MODEL_LEN,
    Abort,
    Complete,
    encode,
    receive_request,
    socket_pair,
)

CONFIG = BookConfig(max_num_reqs=4, max_model_len=32, vocab_size=100)


def read(**fields: Any) -> CompletionRequest:
    return read_request(msgspec.json.encode({"prompt": "a", **fields}), "tiny", eos_token_id=7)


def test_what_nobody_says_has_a_default() -> None:
    asked = read()
    assert (asked.prompt, asked.is_stream, asked.has_usage) == ("a", False, False)
    assert asked.params == RequestParams(max_tokens=16, eos_token_id=7, stop=[], stop_token_ids=[])
    assert read(max_tokens=None, stop=None, stream=None, model=None) == asked, "null is as good as not there"


def test_every_field_arrives() -> None:
    asked = read(
        prompt=[1, 2],
        model="tiny",
        max_tokens=5,
        min_tokens=2,
        stop=["x", "yz"],
        stop_token_ids=[3],
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.0,
        seed=1,
        n=1,
        user="u",
    )
    assert (asked.prompt, asked.is_stream, asked.has_usage) == ([1, 2], True, True)
    assert asked.params == RequestParams(
        max_tokens=5, min_tokens=2, eos_token_id=7, stop_token_ids=[3], stop=["x", "yz"], ignore_eos=True
    )
    assert read(stop="x").params.stop == ["x"]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("prompt", "", "a string or a list of token ids"),
        ("prompt", [], "a string or a list of token ids"),
        ("prompt", [1, -1], "a string or a list of token ids"),
        ("prompt", [1, True], "a string or a list of token ids"),
        ("prompt", ["one", "two"], "a string or a list of token ids"),
        ("max_tokens", 0, "an int of at least 1"),
        ("max_tokens", "5", "an int of at least 1"),
        ("max_tokens", 1.5, "an int of at least 1"),
        ("max_tokens", True, "an int of at least 1"),
        ("min_tokens", -1, "an int of at least 0"),
        ("stop", [""], "no empty one"),
        ("stop", 5, "a string or a list"),
        ("stop", ["x"] * 17, "at most 16"),
        ("stop_token_ids", [-1], "token ids"),
        ("stop_token_ids", [1 << 40], "ids from 0 to 2147483647"),
        ("stop_token_ids", [1] * 65, "at most 64"),
        ("ignore_eos", 1, "true or false"),
        ("stream", "yes", "true or false"),
        ("stream_options", {"include_usage": 1}, "include_usage"),
        ("stream_options", {"include_usage": True}, "without stream"),
        ("temperature", 0.7, "greedy"),
        ("n", 2, "greedy"),
        ("seed", "x", "an int"),
        ("logprobs", 3, "prompt, max_tokens"),
    ],
)
def test_a_mistake_is_named(field: str, value: Any, expected: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**{field: value})
    assert caught.value.status == 400
    message = str(caught.value)
    assert message.startswith(field)
    assert expected in message
    assert caught.value.field in (field, None)


def test_what_came_is_shown_in_short() -> None:
    with pytest.raises(BadRequest, match=r"^max_tokens is 'x{59}\.\.\., expected") as caught:
        read(max_tokens="x" * 10_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"a"', b"\xff", b'{"prompt": "\\ud800"}', b"[" * 100_000])
def test_a_body_that_is_no_object(body: bytes) -> None:
    with pytest.raises(BadRequest, match="the body is") as caught:
        read_request(body, "tiny", 7)
    assert caught.value.status == 400


def test_a_prompt_must_be_there_and_the_model_the_one_here() -> None:
    with pytest.raises(BadRequest, match="prompt is missing"):
        read_request(b"{}", "tiny", 7)
    with pytest.raises(BadRequest, match="model is 'huge', expected 'tiny'") as caught:
        read(model="huge")
    assert (caught.value.status, caught.value.field, caught.value.code) == (404, "model", "model_not_found")


def test_a_prompt_must_fit() -> None:
    params = RequestParams(max_tokens=16)
    check_prompt([99] * 16, params, CONFIG)
    for ids, field, fragment in (
        ([], "prompt", "no token"),
        ([1, 100], "prompt", r"prompt\[1\] is 100, expected 0 to 99"),
        ([1] * 17, "max_tokens", "max_tokens is 16 and prompt has 17 tokens, expected at most 32"),
        ([1] * 32, "prompt", "prompt has 32 tokens"),
    ):
        with pytest.raises(BadRequest, match=fragment) as caught:
            check_prompt(ids, params, CONFIG)
        assert caught.value.field == field


def piece(text: str, ids: list[int], reason: FinishReason = FinishReason.NONE, stop: Any = None) -> RequestOutput:
    return RequestOutput("r", 1, np.array(ids, np.int32), text, reason, stop)


def test_chunks_are_the_whole_answer_in_pieces() -> None:
    answer = Answer("r", "tiny", num_prompt_tokens=3)
    chunks = []
    for each in (
        piece("ab", [1, 2]),
        piece("", [3]),
        piece("c", [4]),
        piece("", [5], FinishReason.STOP, "\n"),
    ):
        answer.add(each)
        chunks.append(answer.chunk())
    assert chunks[1] is None, "nothing to show yet"
    shown = [chunk for chunk in chunks if chunk is not None]
    assert [chunk["choices"][0]["text"] for chunk in shown] == ["ab", "c", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in shown] == [None, None, "stop"]
    whole = answer.whole()
    assert whole["choices"] == [
        {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop", "stop_reason": "\n"}
    ]
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert (answer.usage_chunk()["choices"], answer.usage_chunk()["usage"]) == ([], whole["usage"])
    for body in (*shown, whole):
        assert (body["id"], body["object"], body["model"]) == ("r", "text_completion", "tiny")


def test_an_end_by_length() -> None:
    answer = Answer("r", "tiny", 1)
    answer.add(piece("a", [1], FinishReason.LENGTH))
    assert answer.whole()["choices"][0]["finish_reason"] == "length"


def test_messages_to_the_engine_arrive_one_by_one() -> None:
    server, engine = socket_pair()
    with server, engine:
        stop = ["x" * (1 << 14)]
        longest = Complete("r", [49151] * MAX_MODEL_LEN, RequestParams(max_tokens=3, stop=stop, stop_token_ids=[1, 2]))
        assert len(encode(longest)) < MAX_BYTES
        for message in (longest, Abort("r")):
            server.send(encode(message))
        assert receive_request(engine) == longest
        assert receive_request(engine) == Abort("r")
        server.close()
        assert receive_request(engine) is None
