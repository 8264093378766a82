"""The plugin for vLLM: its bookkeeping, batched, on its own objects. Off unless `ASYNCBOOK_VLLM` is set.

    ASYNCBOOK_VLLM=embedded    the model runner's bookkeeping and the scheduler's `update_from_output`, batched
    ASYNCBOOK_VLLM=sidecar     the same, and every step goes to a book in a process of its own as well

vLLM loads `register` through its entry points `vllm.general_plugins`. Only versions whose source was checked are
touched; any other stays as it is, with a warning. `docs/vllm.md` says what is replaced, and what is not done.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

from asyncbook.integrations.vllm_book import MODE_VARIABLE

MODES = ("embedded", "sidecar")
# Which versions the plugin was checked with, and what the functions read there whose effects it repeats.
CHECKED = {"0.32.0": "b4f36c3dc3ab1097"}

logger = logging.getLogger("vllm.asyncbook")
_undo: list[Callable[[], None]] = []


def register() -> None:
    """What vLLM calls in each of its processes, perhaps more than once."""
    mode = os.environ.get(MODE_VARIABLE, "")
    if mode in ("", "0", "off"):
        return
    if mode not in MODES:
        logger.warning("%s is %r, expected one of %s: vLLM is left as it is", MODE_VARIABLE, mode, ", ".join(MODES))
        return
    if (why_not := reason_against()) is not None:
        logger.warning("asyncbook is not switched on, vLLM is left as it is: %s", why_not)
        return
    switch_on()
    logger.info("asyncbook is on (%s), checked with vLLM %s", mode, ", ".join(CHECKED))


def reason_against() -> str | None:
    """Why the vLLM that is installed is not one the plugin was checked with; None where it is."""
    import vllm  # type: ignore[import-not-found]

    checked = ", ".join(CHECKED)
    if vllm.__version__ not in CHECKED:
        return f"vLLM {vllm.__version__} is installed, it was checked with {checked}"
    digest = source_digest()
    if digest != CHECKED[vllm.__version__]:
        return (
            f"the source of vLLM {vllm.__version__} reads {digest} where it was checked, "
            f"expected {CHECKED[vllm.__version__]}: a patched build?"
        )
    return None


def source_digest() -> str:
    """Of the source of all functions of vLLM's whose effects the plugin repeats or relies on."""
    from vllm.v1.core.sched import utils  # type: ignore[import-not-found]
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # type: ignore[import-not-found]
    from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs  # type: ignore[import-not-found]
    from vllm.v1.request import Request  # type: ignore[import-not-found]
    from vllm.v1.sample.rejection_sampler import RejectionSampler  # type: ignore[import-not-found]
    from vllm.v1.spec_decode.metrics import SpecDecodingStats  # type: ignore[import-not-found]
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch  # type: ignore[import-not-found]
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found]

    functions: tuple[Any, ...] = (
        vllm_function(GPUModelRunner, "_bookkeeping_sync"),
        GPUModelRunner._update_states,
        CachedRequestState,
        InputBatch.add_request,
        InputBatch.condense,
        RejectionSampler.parse_output,
        Scheduler,
        AsyncScheduler,
        utils.check_stop,
        Request,
        EngineCoreOutput,
        EngineCoreOutputs,
        SpecDecodingStats,
    )
    digest = hashlib.blake2b(digest_size=8)
    for function in functions:
        digest.update(inspect.getsource(function).encode())
    return digest.hexdigest()


def vllm_function(owner: type, name: str) -> Any:
    """vLLM's own, whether or not the plugin is on."""
    function = getattr(owner, name)
    return getattr(function, "replaces", function)


def let_vllm_look_around() -> None:
    """Keeps the CPU worker of vLLM 0.32 from failing where numba was imported before it.

    It walks over all that all modules hold and asks what it finds for a `__dict__`. llvmlite's handle of its library
    takes that for the name of a C function, and answers with one. No name of that kind is a function there.
    """
    from llvmlite.binding import ffi

    handle: Any = type(ffi.lib)
    answer = handle.__getattr__
    if hasattr(answer, "replaces"):
        return

    def getattr_of_library(library: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(library, name)

    handle.__getattr__ = getattr_of_library
    getattr_of_library.replaces = answer  # type: ignore[attr-defined]


def switch_on() -> None:
    """Puts the batched functions in the place of vLLM's. Once on, it stays on until `switch_off`."""
    if _undo:
        return
    let_vllm_look_around()
    from vllm.config import SchedulerConfig  # type: ignore[import-not-found]
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from asyncbook.integrations.vllm_kernels import compile_all
    from asyncbook.integrations.vllm_runner import bookkeeping_sync

    compile_all()
    choose = SchedulerConfig.get_scheduler_cls

    def get_scheduler_cls(config: Any) -> Any:
        """vLLM's own choice, but for the default."""
        if config.scheduler_cls is not None:
            return choose(config)
        from asyncbook.integrations.vllm_scheduler import scheduler_cls

        return scheduler_cls(config.async_scheduling)

    _replace(GPUModelRunner, "_bookkeeping_sync", bookkeeping_sync)
    _replace(SchedulerConfig, "get_scheduler_cls", get_scheduler_cls)


def switch_off() -> None:
    """Puts vLLM's own functions back. Engines that exist keep the scheduler that they have."""
    while _undo:
        _undo.pop()()


def _replace(owner: Any, name: str, function: Any) -> None:
    function.replaces = getattr(owner, name)
    setattr(owner, name, function)
    _undo.append(lambda: setattr(owner, name, function.replaces))
