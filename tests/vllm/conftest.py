"""Engines of real vLLM, stock and with the plugin, for tests that compare them. `make test-vllm` runs these.

They need an environment with vLLM, and in `ASYNCBOOK_VLLM_MODEL` the folder of a checkpoint; `tools/make_vllm_env.sh`
makes both. Nothing here is collected where vLLM is not installed.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
# Small enough for prompts to come in chunks, and in "tight" for requests to be preempted.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"max_num_batched_tokens": 192, "num_gpu_blocks_override": 160},
    "tight": {"max_num_batched_tokens": 96, "num_gpu_blocks_override": 26},
    "ngram": {"max_num_batched_tokens": 192, "num_gpu_blocks_override": 160, "speculative_config": NGRAM},
    "ngram-tight": {"max_num_batched_tokens": 96, "num_gpu_blocks_override": 26, "speculative_config": NGRAM},
}
COMMON: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 24,
    "block_size": 32,
    "enforce_eager": True,
    "dtype": "float32",
    "seed": 0,
    "disable_log_stats": False,
    "max_logprobs": 20,
}
MAX_ENGINES = 3
MakeEngine = Callable[[str, str], Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/vllm/" in str(item.path):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def make_engine() -> Iterator[MakeEngine]:
    """`make_engine(name, mode)`: an `LLM` of `ENGINES`, stock or with the plugin's scheduler. It is made once, as long
    as no more than `MAX_ENGINES` are asked for in turn: each takes about a GiB."""
    from vllm import LLM

    from asyncbook.integrations import vllm as plugin

    plugin.let_vllm_look_around()  # stock vLLM does not start twice in a process, or behind numba, without it
    made: dict[tuple[str, str], Any] = {}  # the one asked for last is the last

    def end_first() -> None:
        made.pop(next(iter(made))).llm_engine.engine_core.shutdown()
        gc.collect()

    def make(name: str, mode: str) -> Any:
        if (name, mode) in made:
            made[name, mode] = made.pop((name, mode))
            return made[name, mode]
        if len(made) == MAX_ENGINES:
            end_first()
        if mode != "stock":
            os.environ["ASYNCBOOK_VLLM"] = mode
            plugin.switch_on()
        try:
            made[name, mode] = LLM(model=os.environ["ASYNCBOOK_VLLM_MODEL"], **COMMON, **ENGINES[name])
        finally:
            os.environ.pop("ASYNCBOOK_VLLM", None)
            plugin.switch_off()
        return made[name, mode]

    yield make
    while made:
        end_first()
