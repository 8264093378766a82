"""The text of a book's requests, as its ledger and its outbox need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncbook.ipc import wire
from asyncbook.ipc.columns import FIRST_STOP_STRING, Texts
from asyncbook.ipc.layout import NUM_CHECKPOINTS, Field, FinishReason
from asyncbook.ipc.wire import BatchField
from asyncbook.worker import kernels

if TYPE_CHECKING:  # a book without a tokenizer does without its kernels, too
    from asyncbook.worker.text import TextRows

_STOP = int(FinishReason.STOP)


class RowTexts:
    """`TextRows` and the columns that go with it. A row's text follows from the table and what it was admitted with;
    how much of it was delivered is in `Field.TEXT_DELIVERED`, so a checkpoint holds all that is needed."""

    def __init__(self, text_rows: TextRows, work: np.ndarray, token_ids: np.ndarray) -> None:
        self._texts, self._work, self._token_ids = text_rows, work, token_ids
        num_rows = token_ids.shape[0]
        self._counts = np.zeros(num_rows, np.int32)
        self._ends_by_id = np.zeros(num_rows, np.bool_)

    def admit(self, message: wire.Admit, prompt: np.ndarray, outputs: np.ndarray) -> bool:
        """A request takes the row. Whether its last earlier output completes a stop string."""
        last_is_stop_id = bool(outputs.size) and int(outputs[-1]) in message.stop_ids
        complete_at = self._texts.open(
            message.row,
            prompt,
            outputs,
            stop=message.stop,
            include_stop_str_in_output=message.include_stop_str_in_output,
            min_tokens=message.min_tokens,
            skip_special_tokens=message.skip_special_tokens,
            last_is_stop_id=last_is_stop_id and outputs.size - 1 >= message.min_tokens,
        )
        self._work[Field.TEXT_DELIVERED, message.row] = self._texts.num_delivered_bytes(message.row)
        return complete_at >= 0

    def restore(self, message: wire.RestoredRow) -> None:
        """The row as the ledger's columns say that it is."""
        row, work = message.row, self._work
        num_prompt, end = work[Field.NUM_PROMPT_TOKENS, row], work[Field.NUM_TOKENS_NO_SPEC, row]
        outputs = self._token_ids[row, num_prompt:end]
        if work[Field.NUM_OUTPUT_TOKENS, row] > outputs.size:  # one is in a column only
            outputs = np.append(outputs, work[Field.LAST_TOKEN_ID, row])
        self._texts.open(
            row,
            self._token_ids[row, :num_prompt],
            outputs,
            stop=message.stop,
            include_stop_str_in_output=message.include_stop_str_in_output,
            min_tokens=int(work[Field.MIN_TOKENS, row]),
            skip_special_tokens=message.skip_special_tokens,
            last_is_stop_id=bool(work[Field.FINISH_REASON, row] == _STOP and work[Field.STOP_REASON, row] >= 0),
            num_delivered_bytes=int(work[Field.TEXT_DELIVERED, row]),
        )

    def close(self, row: int) -> None:
        """The row is free."""
        self._texts.close(row)

    def stop_strings_at(
        self, stop_ids: np.ndarray, batch: np.ndarray, sampled: np.ndarray, width: int, vocab_size: int, max_len: int
    ) -> np.ndarray:
        """int32 [n]: with which of its ids of a step each row completes a stop string, -1 for none. The ids' text is
        the rows' from here on."""
        counts, ends_by_id = self._counts, self._ends_by_id
        kernels.count_kept_ids(self._work, stop_ids, batch, sampled, width, counts, ends_by_id, vocab_size, max_len)
        n = batch.shape[1]
        return self._texts.append(batch[BatchField.ROW], sampled, width, counts[:n], ends_by_id[:n])

    def measure(self, rows: np.ndarray) -> np.ndarray:
        """int64 [n + 1]: the offsets of the text that n rows have to deliver."""
        return self._texts.measure(rows, self._work[Field.FINISH_REASON, rows] != 0)

    def take(self, rows: np.ndarray, finish_reasons: np.ndarray, stop_reasons: np.ndarray) -> Texts:
        """What rows (int32 [n]) have to deliver, which counts as delivered. `finish_reasons` [n] says which of them are
        told to have ended; where a stop string did that, it is put into `stop_reasons`."""
        texts = self._texts.take(rows, finish_reasons != 0)
        self._work[Field.TEXT_DELIVERED, rows] = self._texts.delivered_bytes[rows]
        self._work[Field.IS_DIRTY, rows] = NUM_CHECKPOINTS
        indices = self._texts.stop_indices(rows)
        by_string = (finish_reasons == _STOP) & (stop_reasons == -1) & (indices >= 0)
        stop_reasons[by_string] = FIRST_STOP_STRING - indices[by_string]
        return texts
