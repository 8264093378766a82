"""asyncbook: token bookkeeping for LLM engines, off the critical path.

`open(config)` keeps the book in this process; `spawn(config)` keeps it in a sidecar process. Both give the same book.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncbook.attached import AttachedBook
    from asyncbook.batch import Batch
    from asyncbook.book import Book
    from asyncbook.client import attach, open, spawn, subscribe
    from asyncbook.config import BookConfig, RequestParams
    from asyncbook.frame import Frame
    from asyncbook.ipc.errors import (
        AsyncbookError,
        BookClosed,
        BookFull,
        ContractError,
        DuplicateRequest,
        FrameExpired,
        HandshakeFailed,
        InFlightFull,
        InvalidBatch,
        InvalidRequest,
        InvalidToken,
        LayoutMismatch,
        NotApplied,
        OutputsLost,
        PeerError,
        PromptTooLong,
        RunnerDied,
        SidecarDied,
        SidecarTimeout,
        StaleRow,
    )
    from asyncbook.ipc.layout import FinishReason
    from asyncbook.logprobs import Logprobs
    from asyncbook.output_logprobs import OutputLogprobs
    from asyncbook.outputs import StepOutputs
    from asyncbook.rows import Row
    from asyncbook.stats import SpecDecodeStats, Stats
    from asyncbook.streams import RequestOutput
    from asyncbook.subscription import Subscription
    from asyncbook.worker.scatter import append_spans, assign_spans, scatter_columns

__version__ = "0.1.0"

# Where each public name lives. Imported when it is first used: `import asyncbook` is quick, and the sidecar, which
# imports `asyncbook.worker`, does not pay for the client.
_HOMES = {
    "AttachedBook": "attached",
    "Batch": "batch",
    "Book": "book",
    "attach": "client",
    "open": "client",
    "spawn": "client",
    "subscribe": "client",
    "BookConfig": "config",
    "RequestParams": "config",
    "Frame": "frame",
    "FinishReason": "ipc.layout",
    "Logprobs": "logprobs",
    "OutputLogprobs": "output_logprobs",
    "StepOutputs": "outputs",
    "append_spans": "worker.scatter",
    "assign_spans": "worker.scatter",
    "scatter_columns": "worker.scatter",
    "Row": "rows",
    "SpecDecodeStats": "stats",
    "Stats": "stats",
    "RequestOutput": "streams",
    "Subscription": "subscription",
    **dict.fromkeys(
        (
            "AsyncbookError",
            "BookClosed",
            "BookFull",
            "ContractError",
            "DuplicateRequest",
            "FrameExpired",
            "HandshakeFailed",
            "InFlightFull",
            "InvalidBatch",
            "InvalidRequest",
            "InvalidToken",
            "LayoutMismatch",
            "NotApplied",
            "OutputsLost",
            "PeerError",
            "PromptTooLong",
            "RunnerDied",
            "SidecarDied",
            "SidecarTimeout",
            "StaleRow",
        ),
        "ipc.errors",
    ),
}

__all__ = [
    "AsyncbookError",
    "AttachedBook",
    "Batch",
    "Book",
    "BookClosed",
    "BookConfig",
    "BookFull",
    "ContractError",
    "DuplicateRequest",
    "FinishReason",
    "Frame",
    "FrameExpired",
    "HandshakeFailed",
    "InFlightFull",
    "InvalidBatch",
    "InvalidRequest",
    "InvalidToken",
    "LayoutMismatch",
    "Logprobs",
    "NotApplied",
    "OutputLogprobs",
    "OutputsLost",
    "PeerError",
    "PromptTooLong",
    "RequestOutput",
    "RequestParams",
    "Row",
    "RunnerDied",
    "SidecarDied",
    "SidecarTimeout",
    "SpecDecodeStats",
    "StaleRow",
    "Stats",
    "StepOutputs",
    "Subscription",
    "append_spans",
    "assign_spans",
    "attach",
    "open",
    "scatter_columns",
    "spawn",
    "subscribe",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
