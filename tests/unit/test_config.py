"""`BookConfig` and `RequestParams` as values: what they hold and what a config refuses."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from asyncbook import BookConfig, RequestParams
from asyncbook.ipc.layout import MAX_IN_FLIGHT, MAX_POSITIONS, MAX_ROWS, MAX_SPEC_TOKENS

SIZES: dict[str, Any] = {"max_num_reqs": 4, "max_model_len": 16, "vocab_size": 100}
LIMITS = {
    "max_num_reqs": (1, MAX_ROWS),
    "max_model_len": (1, MAX_POSITIONS),
    "vocab_size": (1, 2**31 - 1),
    "num_spec_tokens": (0, MAX_SPEC_TOKENS),
    "max_in_flight": (1, MAX_IN_FLIGHT),
    "spin_us": (0, 1_000_000),
}


def test_defaults_are_the_contract_s() -> None:
    config = BookConfig(**SIZES)
    defaults = {
        "num_spec_tokens": 0, "max_in_flight": 2, "max_logprobs": None, "tokenizer": None, "device": None,
        "transport": "zmq", "restart": "replay", "sidecar_cpu": None, "spin_us": 50,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in defaults} == defaults
    params = {
        "max_tokens": None, "min_tokens": 0, "eos_token_id": None, "stop_token_ids": (), "stop": (),
        "ignore_eos": False, "include_stop_str_in_output": False, "logprobs": None,
    }  # fmt: skip
    assert {name: getattr(RequestParams(), name) for name in params} == params


@pytest.mark.parametrize("name", LIMITS)
def test_sizes_have_limits(name: str) -> None:
    least, most = LIMITS[name]
    for value in (least, most):
        assert getattr(BookConfig(**(SIZES | {name: value})), name) == value
    for wrong in (least - 1, most + 1, -(2**70), 2.0, "4", None, True, [4]):
        with pytest.raises(ValueError, match=name) as caught:
            BookConfig(**(SIZES | {name: wrong}))
        assert repr(wrong) in str(caught.value)
        assert f"{least} to {most}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        ("transport", "tcp", ["zmq", "ring"]),
        ("transport", None, ["zmq", "ring"]),
        ("restart", "never", ["replay", "fail"]),
        ("sidecar_cpu", 1 << 20, [str(min(os.sched_getaffinity(0)))]),
        ("device", "tpu:0", ["None", "cuda:"]),
        ("device", "cuda:", ["None", "cuda:"]),
        ("device", 0, ["None", "cuda:"]),
        ("sidecar_cpu", -1, [str(min(os.sched_getaffinity(0)))]),
        ("start_timeout_s", 0, ["more than 0"]),
        ("start_timeout_s", -1.5, ["more than 0"]),
        ("start_timeout_s", float("nan"), ["more than 0"]),
    ],
)
def test_choices_are_checked(name: str, wrong: object, expected: list[str]) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        BookConfig(**(SIZES | {name: wrong}))
    for fragment in (repr(wrong), *expected):
        assert fragment in str(caught.value)


def test_choices_are_taken() -> None:
    core = min(os.sched_getaffinity(0))
    config = BookConfig(**SIZES, transport="ring", restart="fail", sidecar_cpu=core, start_timeout_s=0.5)
    assert (config.transport, config.restart, config.sidecar_cpu, config.start_timeout_s) == ("ring", "fail", core, 0.5)


def test_configs_are_values() -> None:
    config = BookConfig(**SIZES)
    assert config == BookConfig(**SIZES)
    assert hash(config) == hash(BookConfig(**SIZES))
    assert config != BookConfig(**(SIZES | {"vocab_size": 101}))
    with pytest.raises(FrozenInstanceError):
        config.vocab_size = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        BookConfig(4, 16, 100)  # type: ignore[call-arg]
    for name in SIZES:
        with pytest.raises(TypeError, match=name):
            BookConfig(**{key: value for key, value in SIZES.items() if key != name})
    assert RequestParams(max_tokens=3) == RequestParams(max_tokens=3)
    with pytest.raises(FrozenInstanceError):
        RequestParams().max_tokens = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("eos_token_id", "ids"), [(None, ()), (2, (2,)), (0, (0,)), ([2, 7], (2, 7)), ((), ()), (range(3), (0, 1, 2))]
)
def test_eos_token_ids(eos_token_id: Any, ids: tuple[int, ...]) -> None:
    assert RequestParams(eos_token_id=eos_token_id).eos_token_ids == ids
