"""What a message must be for the ledger to take it: every number in the range that the arrays and kernels stand on.

The runner checks its callers' mistakes by name, and keeps to all of this. Here it is about a message that the runner
did not mean: whatever bytes come, the ledger applies what makes sense, or raises `BadMessage` with nothing changed.
"""

from __future__ import annotations

import numpy as np

from asyncbook.ipc import wire
from asyncbook.ipc.errors import BadMessage
from asyncbook.ipc.layout import INT32_MAX, Layout
from asyncbook.ipc.wire import BatchField


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Raises `BadMessage` unless the value is in the range."""
    if not least <= value <= most:
        raise BadMessage(f"{name} out of range: {value}, expected {least} to {most}")


def _ids(name: str, data: memoryview, vocab_size: int) -> np.ndarray:
    if len(data) % 4:
        raise BadMessage(f"{name} of half an id: {len(data)} bytes, expected a multiple of 4")
    ids: np.ndarray = np.frombuffer(data, np.int32)
    # As unsigned numbers the negative ones are the greatest: one pass finds both kinds.
    if ids.size and ids.view(np.uint32).max() >= vocab_size:
        raise BadMessage(f"{name} with an id outside of the vocabulary, expected 0 to {vocab_size - 1}")
    return ids


def _mask(data: memoryview | None, num_prompt_tokens: int) -> np.ndarray | None:
    if data is None:
        return None
    mask: np.ndarray = np.frombuffer(data, np.uint8)
    if mask.size != num_prompt_tokens:
        raise BadMessage(f"a mask of another length than the prompt: {mask.size} for {num_prompt_tokens}")
    if mask.max() > 1:
        raise BadMessage(f"a mask that is no bool: {mask.max()}")
    return mask.view(np.bool_)


def check_stop_ids(stop_ids: list[int]) -> None:
    """Raises `BadMessage` where there are too many, or one is no id."""
    check_range("the number of stop ids", len(stop_ids), 0, wire.MAX_STOP_IDS)
    if stop_ids:
        check_range("a stop id", min(stop_ids), 0, INT32_MAX)
        check_range("a stop id", max(stop_ids), 0, INT32_MAX)


def check_logprobs_width(value: int, layout: Layout) -> None:
    """Raises `BadMessage` for more logprobs an id than the book has."""
    check_range("logprobs an id", value, 0, 1 + layout.max_logprobs)


def checked_admission(
    message: wire.Admit, layout: Layout, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(prompt, earlier outputs, mask of the prompt) of an admission whose numbers are all in range."""
    prompt = _ids("a prompt", message.prompt_token_ids, vocab_size)
    outputs = _ids("earlier outputs", message.output_token_ids, vocab_size)
    num_tokens = prompt.size + outputs.size
    check_range("row", message.row, 0, layout.max_num_reqs - 1)
    check_range("the length of a prompt", prompt.size, 1, layout.max_model_len)
    check_range("the length of a prompt and its outputs", num_tokens, 1, layout.max_model_len)
    check_range("request_no", message.request_no, 0, INT32_MAX)
    check_range("num_computed_tokens", message.num_computed_tokens, 0, num_tokens)
    check_range("max_tokens", message.max_tokens, outputs.size + 1, INT32_MAX)
    check_range("min_tokens", message.min_tokens, 0, INT32_MAX)
    check_logprobs_width(message.logprobs_width, layout)
    check_stop_ids(message.stop_ids)
    return prompt, outputs, _mask(message.is_token_ids, prompt.size)


def checked_batch(slot: int, fields: memoryview, layout: Layout) -> np.ndarray:
    """int32 [BatchField.COUNT, n], a copy: the message's memory is not the ledger's."""
    check_range("batch slot", slot, 0, wire.NUM_BATCH_SLOTS - 1)
    if len(fields) % (4 * BatchField.COUNT):
        raise BadMessage(f"half a batch: {len(fields)} bytes, expected a multiple of {4 * BatchField.COUNT}")
    check_range("the size of a batch", len(fields) // (4 * BatchField.COUNT), 0, layout.max_num_reqs)
    batch: np.ndarray = np.frombuffer(fields, np.int32).reshape(BatchField.COUNT, -1).copy()
    if batch.size == 0:
        return batch
    rows, drafts, scheduled = (
        batch[field] for field in (BatchField.ROW, BatchField.NUM_DRAFT_TOKENS, BatchField.NUM_SCHEDULED_TOKENS)
    )
    widths = batch[BatchField.LOGPROBS_WIDTH]
    check_logprobs_width(int(widths.min()), layout)
    check_logprobs_width(int(widths.max()), layout)
    for name, values, most in (("row", rows, layout.max_num_reqs - 1), ("drafts", drafts, layout.num_spec_tokens)):
        check_range(f"{name} in a batch", int(values.min()), 0, most)
        check_range(f"{name} in a batch", int(values.max()), 0, most)
    in_order = np.sort(rows)
    if (in_order[1:] == in_order[:-1]).any():
        raise BadMessage("a batch names a row twice")
    if ((scheduled != wire.DEFAULT_SCHEDULED) & (scheduled < np.maximum(drafts, 1))).any():
        raise BadMessage("a batch with fewer tokens scheduled than a row has drafts, or none")
    return batch
