"""What a book is made with, and what a request brings along."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from asyncbook.ipc.errors import InvalidRequest
from asyncbook.ipc.layout import (
    INT32_MAX,
    MAX_IN_FLIGHT,
    MAX_LOGPROBS,
    MAX_POSITIONS,
    MAX_ROWS,
    MAX_SPEC_TOKENS,
    NO_LOGPROBS,
    Layout,
)
from asyncbook.ipc.wire import MAX_STOP_BYTES, MAX_STOP_IDS

TRANSPORTS = ("zmq", "ring")
RESTARTS = ("replay", "fail")
_DEVICE = re.compile(r"(cuda|fake)(:\d+)?")  # "fake" is for tests, see device/fake.py
IDLE_POLICIES = ("spin-then-sleep", "cadence")  # the names in worker/idle.py, which the runner does not import


def _not_yet(feature: str) -> NotImplementedError:
    return NotImplementedError(f"{feature} is not part of this version of asyncbook yet")


def _check_range(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}, expected an int from {least} to {most}")


@dataclass(frozen=True, kw_only=True)
class BookConfig:
    """Size and manner of a book. Raises `ValueError` naming the field, what was expected and what came.

    `max_num_reqs` rows of `max_model_len` positions; ids below `vocab_size`; at most `num_spec_tokens` drafts a row and
    step; at most `max_in_flight` steps submitted and not yet applied. `max_logprobs`: the most top logprobs that a
    request may ask for; 0: the sampled ids' only; None: none. `spin_us`: how long an idle sidecar looks for work before
    it sleeps; `idle_policy`: how it waits (`worker/idle.py`). `sidecar_cpu`: the core it is bound to.
    `device`: "cuda:0", whose tensors `submit` takes and `Frame.to_device` makes; the sample ring and the frames are
    pinned for it in the runner, where that is possible.
    `start_timeout_s`: how long `spawn` waits for it (kernels that must be compiled first do not count).
    `runner_reads_outputs=False`: a sidecar's outputs are for subscribers alone, and nothing is kept for the runner.
    """

    max_num_reqs: int
    max_model_len: int
    vocab_size: int
    num_spec_tokens: int = 0
    max_in_flight: int = 2
    max_logprobs: int | None = None
    tokenizer: str | os.PathLike[str] | None = None
    device: str | None = None
    transport: str = "zmq"
    restart: str = "replay"
    sidecar_cpu: int | None = None
    spin_us: int = 50
    idle_policy: str = "spin-then-sleep"
    start_timeout_s: float = 30.0
    runner_reads_outputs: bool = True

    def __post_init__(self) -> None:
        _check_range("max_num_reqs", self.max_num_reqs, 1, MAX_ROWS)
        _check_range("max_model_len", self.max_model_len, 1, MAX_POSITIONS)
        _check_range("vocab_size", self.vocab_size, 1, INT32_MAX)
        _check_range("num_spec_tokens", self.num_spec_tokens, 0, MAX_SPEC_TOKENS)
        _check_range("max_in_flight", self.max_in_flight, 1, MAX_IN_FLIGHT)
        if self.max_logprobs is not None:
            _check_range("max_logprobs", self.max_logprobs, 0, MAX_LOGPROBS)
        _check_range("spin_us", self.spin_us, 0, 1_000_000)
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport is {self.transport!r}, expected one of {', '.join(TRANSPORTS)}")
        if self.restart not in RESTARTS:
            raise ValueError(f"restart is {self.restart!r}, expected one of {', '.join(RESTARTS)}")
        if self.idle_policy not in IDLE_POLICIES:
            raise ValueError(f"idle_policy is {self.idle_policy!r}, expected one of {', '.join(IDLE_POLICIES)}")
        if self.device is not None and not (isinstance(self.device, str) and _DEVICE.fullmatch(self.device)):
            raise ValueError(f"device is {self.device!r}, expected None, 'cuda' or 'cuda:' and a number")
        if self.sidecar_cpu is not None and self.sidecar_cpu not in os.sched_getaffinity(0):
            usable = sorted(os.sched_getaffinity(0))
            raise ValueError(f"sidecar_cpu is {self.sidecar_cpu!r}, expected a core this process may use: {usable}")
        if not self.start_timeout_s > 0:
            raise ValueError(f"start_timeout_s is {self.start_timeout_s!r}, expected more than 0")

    def check_supported(self) -> None:
        """Raises `ValueError` or `ImportError` for what is not there on this machine, `NotImplementedError` naming what
        this version does not have yet."""
        path = self.tokenizer_path
        if path is not None and not os.path.isfile(path):
            raise ValueError(f"tokenizer is {path!r}, expected the path of a tokenizer.json")
        if path is not None and importlib.util.find_spec("tokenizers") is None:
            raise ImportError('a book with a tokenizer needs the tokenizers library: pip install "asyncbook[text]"')

    @property
    def tokenizer_path(self) -> str | None:
        """Absolute: the sidecar may work elsewhere."""
        return None if self.tokenizer is None else os.path.abspath(os.fspath(self.tokenizer))

    @property
    def layout(self) -> Layout:
        """Where everything is in this book's segment."""
        max_logprobs = NO_LOGPROBS if self.max_logprobs is None else self.max_logprobs
        return Layout(self.max_num_reqs, self.max_model_len, self.num_spec_tokens, self.max_in_flight, max_logprobs)


@dataclass(frozen=True, kw_only=True)
class RequestParams:
    """What ends a request and what it reports. Names and meaning are vLLM's; `eos_token_id` is one id or several.

    `max_tokens` and `min_tokens` count outputs; `ignore_eos` ignores `eos_token_id` and nothing else. `stop`: strings
    that end the request, which need a book with a tokenizer. `logprobs`: how many of the top ids' to report with the
    sampled id's; 0: only that; None: none.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    eos_token_id: int | Sequence[int] | None = None
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def check(self, *, has_tokenizer: bool) -> None:
        """Raises `InvalidRequest` naming the field, what was expected and what came. `Book.admit` calls it."""
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens, 1)
        _check_count("min_tokens", self.min_tokens, 0)
        if self.eos_token_id is not None and not is_int(self.eos_token_id):
            _check_ids("eos_token_id", self.eos_token_id)
        _check_ids("eos_token_id", self.eos_token_ids)
        _check_ids("stop_token_ids", self.stop_token_ids)
        num_stop_ids = len(self.eos_token_ids) + len(self.stop_token_ids)
        if num_stop_ids > MAX_STOP_IDS:
            raise InvalidRequest(f"eos_token_id and stop_token_ids hold {num_stop_ids} ids, at most {MAX_STOP_IDS}")
        if isinstance(self.stop, str):
            raise InvalidRequest(f"stop is the string {self.stop!r}, expected a sequence of strings")
        _check_strings("stop", self.stop)
        num_stop_bytes = sum(len(string.encode()) for string in self.stop)
        if num_stop_bytes > MAX_STOP_BYTES:
            raise InvalidRequest(f"stop holds strings of {num_stop_bytes} bytes, at most {MAX_STOP_BYTES}")
        if self.stop and not has_tokenizer:
            raise InvalidRequest(f"stop is {self.stop!r}, which needs a book with tokenizer=")
        if self.logprobs is not None:
            _check_count("logprobs", self.logprobs, 0)

    @property
    def logprobs_width(self) -> int:
        """Logprobs an id: the sampled id's and the top k; 0: none."""
        return 0 if self.logprobs is None else 1 + int(self.logprobs)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids, none, one or several."""
        if self.eos_token_id is None:
            return ()
        if is_int(self.eos_token_id):
            return (self.eos_token_id,)  # type: ignore[return-value]
        return tuple(self.eos_token_id)  # type: ignore[arg-type]


def is_int(value: object) -> bool:
    """Whether it is an integer of Python or numpy, and no bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _check_ids(name: str, ids: object) -> None:
    try:
        token_ids = list(ids)  # type: ignore[call-overload]
    except TypeError:
        raise InvalidRequest(f"{name} is {ids!r}, expected ids") from None
    for token_id in token_ids:
        if not is_int(token_id) or not 0 <= token_id <= INT32_MAX:
            raise InvalidRequest(f"{name} holds {token_id!r}, expected ids from 0 to {INT32_MAX}")


def _check_strings(name: str, strings: object) -> None:
    try:
        texts = list(strings)  # type: ignore[call-overload]
    except TypeError:
        raise InvalidRequest(f"{name} is {strings!r}, expected a sequence of strings") from None
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"{name} holds {text!r}, expected strings of at least one character")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{name} holds {text!r}, which is no text: {error}") from None


def _check_count(name: str, value: object, least: int) -> None:
    if not is_int(value) or value < least:  # type: ignore[operator]
        raise InvalidRequest(f"{name} is {value!r}, expected an int of at least {least}")


DEFAULT_PARAMS = RequestParams()
