"""An arm that does the whole step as a book does it: all rules, stops, counters, and a frame, by the ledger."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np

from asyncbook.bench.update_cells import MAX_IDS, MAX_MODEL_LEN, VOCAB_SIZE, Step
from asyncbook.ipc import jit, wire
from asyncbook.ipc.layout import INT32_MAX, Field, Layout
from asyncbook.worker import kernels
from asyncbook.worker.ledger import Ledger, Tables

EOS_TOKEN_ID = VOCAB_SIZE  # looked for in every id, never sampled


class LedgerState:
    """A ledger with a request in every row, and one batch of `rows`."""

    def __init__(self, prompt_lengths: np.ndarray, rows: np.ndarray) -> None:
        jit.compile_all()
        layout = Layout(prompt_lengths.size, MAX_MODEL_LEN, MAX_IDS - 1, max_in_flight=2)
        self._ledger = Ledger(Tables(layout, memoryview(mmap.mmap(-1, layout.total_bytes))), VOCAB_SIZE + 1)
        nothing = memoryview(b"")
        for row, length in enumerate(prompt_lengths.tolist()):
            prompt = memoryview(bytes(4 * length))
            self._ledger.apply(
                wire.Admit(
                    self._next_seq, row, 1, row, f"request-{row}", prompt, nothing, None, 0, INT32_MAX, 0,
                    [EOS_TOKEN_ID], [], False,
                )
            )  # fmt: skip
        fields = np.zeros((wire.BatchField.COUNT, rows.size), np.int32)
        fields[wire.BatchField.ROW] = rows
        fields[wire.BatchField.GENERATION] = 1
        fields[wire.BatchField.NUM_SCHEDULED_TOKENS] = wire.DEFAULT_SCHEDULED
        self._ledger.apply(wire.DescribeBatch(self._next_seq, 0, memoryview(fields.tobytes())))
        self._no_drafts = np.zeros(0, np.int32)
        self._num_rows = prompt_lengths.size
        self._work, self._lengths = self._ledger.work.copy(), self._ledger.lengths.copy()

    @property
    def _next_seq(self) -> int:
        return self._ledger.applied_seq + 1

    def run(self, step: Step) -> None:
        """One step."""
        ledger, sampled = self._ledger, step.sampled
        ledger.apply_step(
            ledger.applied_seq + 1, ledger.step + 1, 0, sampled.reshape(-1), sampled.shape[1], self._no_drafts, 0
        )

    def rewind(self) -> None:
        """Back to the prompts."""
        self._ledger.work[:] = self._work
        self._ledger.lengths[:] = self._lengths
        self._ledger.history_lengths[:] = kernels.ALL_ROWS

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """The same arrays as `State.arrays`."""
        work, tables, size = self._ledger.work, self._ledger.tables, self._num_rows
        yield "num_tokens_no_spec", work[Field.NUM_TOKENS_NO_SPEC, :size]
        yield "num_tokens", work[Field.NUM_TOKENS, :size]
        yield "token_ids", tables.token_ids[:, :MAX_MODEL_LEN]
        yield "is_token_ids", tables.is_token_ids[:, :MAX_MODEL_LEN]
