"""The text of the rows of a book: detokenized as ids come, cut at stop strings, held back as long as it can become one.

    text = TextRows(Path("tokenizer.json"), num_rows=256)
    text.open(row, prompt_token_ids, stop=["\\n\\n"])
    complete_at = text.append(rows, token_ids, width, counts, ends_by_id)   # one step, before the ledger applies it
    texts = text.take(rows, has_finished)                                   # when the reader can take it
    text.close(row)

The rules, all of them for characters that are known for certain:

* A row's text is that of its outputs decoded at once, written as they stand behind the prompt. Bytes of a character
  that is not complete yet are no text; when the row finishes they become one U+FFFD.
* A stop string is complete with the id that brings its last character. Of several it is the one whose last character
  comes first, and the first in the list of those that end with the same. One that is complete before `min_tokens`
  outputs were there does not count, then or later; one that only began before does.
* The text ends before the stop string, with `include_stop_str_in_output` after it. What follows it, also in the text of
  the same id, is no text.
* Held back is the longest end of the text that begins a stop string, nothing with `include_stop_str_in_output`.
* An id that stops the request says nothing, unless `include_stop_str_in_output`; and no stop string ends with it.

State of a row follows from its prompt, its outputs and how many bytes of text were delivered: see `open`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np

from asyncbook.ipc.columns import Texts
from asyncbook.worker.detokenize import IdTable, Stream, Vocabulary, byte_table
from asyncbook.worker.stops import StopTable
from asyncbook.worker.text_kernels import (
    BLOCK_SIZE,
    FREE_HEAD,
    HAS_ENDED,
    HAS_FALLBACK,
    HEAD,
    INCLUDES_STOP,
    LENGTH,
    MAX_DECODED,
    MIN_TOKENS,
    NUM_DELIVERED,
    NUM_STOPS,
    SKIPS_SPECIAL,
    SPECIAL,
    STOP_INDEX,
    STRIPS_SPACE,
    TAIL,
    TextField,
    add_blocks,
    append_text,
    clear_text,
    measure_text,
    take_text,
)

_TRUE, _FALSE = np.ones(1, np.bool_), np.zeros(1, np.bool_)


class TextRows:
    """Text of `num_rows` rows with one tokenizer. Raises `ImportError` without the `tokenizers` library, and the
    library's own error for a file that is no tokenizer.

    `uses_table=False` decodes every tokenizer by the library's streams: for tests and benchmarks.
    """

    def __init__(self, tokenizer: str | os.PathLike[str], num_rows: int, *, uses_table: bool = True) -> None:
        from tokenizers import Tokenizer

        library = Tokenizer.from_file(os.fspath(tokenizer))
        vocabulary = Vocabulary(library)
        self._table = byte_table(library, vocabulary) if uses_table else None
        # With a table neither is needed any more, and both are large.
        self._make_stream = functools.partial(Stream, library, vocabulary) if self._table is None else None
        self._streams: list[Stream | None] = [None] * num_rows
        self._rows = np.zeros((len(TextField), num_rows), np.int64)
        self._rows[[HEAD, TAIL, STOP_INDEX]] = -1
        self._partial = np.zeros((num_rows, 4), np.uint8)
        self._stops = StopTable(num_rows)
        self._stop: list[Sequence[str]] = [()] * num_rows
        self._decoded = np.zeros(MAX_DECODED, np.uint8)
        self._blocks = np.zeros((0, BLOCK_SIZE), np.uint8)
        self._links = np.zeros(0, np.int32)
        self._free = np.zeros(2, np.int64)
        self._free[FREE_HEAD] = -1
        self._add_blocks(2 * num_rows)

    @property
    def uses_table(self) -> bool:
        """Whether ids are looked up; else each row has a `DecodeStream`."""
        return self._table is not None

    @property
    def num_bytes_reserved(self) -> int:
        """Memory for text that waits: at most twice the most that ever waited, and some blocks a row."""
        return self._blocks.nbytes + self._links.nbytes

    def _add_blocks(self, num_missing: int) -> None:
        num_blocks = self._links.size
        size = num_blocks + max(num_missing, num_blocks)
        blocks, links = np.empty((size, BLOCK_SIZE), np.uint8), np.empty(size, np.int32)
        blocks[:num_blocks], links[:num_blocks] = self._blocks, self._links
        self._blocks, self._links = blocks, links
        add_blocks(links, self._free, num_blocks)

    # A request's row

    def open(
        self,
        row: int,
        prompt_token_ids: Sequence[int] | np.ndarray,
        output_token_ids: Sequence[int] | np.ndarray = (),
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        last_is_stop_id: bool = False,
        num_delivered_bytes: int | None = None,
    ) -> int:
        """A request takes the row. Returns the index of its last earlier output where that completes a stop string,
        else -1: like an id that stops, it ends the request again. Stop strings before the last output do not count;
        they did not end it then.

        `num_delivered_bytes`: of the text of the earlier outputs (what `num_delivered_bytes(row)` said); the rest is
        delivered. Default: all of whole characters, as of a request that was aborted, which delivered what it held.
        `last_is_stop_id`: the last earlier output stops the request. Raises `ValueError` for stop strings that cannot
        be, with the row closed.
        """
        self.close(row)
        self._stops.set(row, stop)
        self._stop[row] = tuple(stop)
        rows, outputs = self._rows, np.ascontiguousarray(output_token_ids, np.int32)
        rows[NUM_STOPS, row] = len(stop)
        rows[SKIPS_SPECIAL, row], rows[INCLUDES_STOP, row] = skip_special_tokens, include_stop_str_in_output
        rows[MIN_TOKENS, row] = max(min_tokens, outputs.size - 1)
        if self._table is not None:
            rows[HAS_FALLBACK, row] = self._table.has_fallback
            rows[STRIPS_SPACE, row] = self._table.strips_space and not self._says_anything(
                np.asarray(prompt_token_ids), skip_special_tokens
            )
        if self._make_stream is not None:
            self._streams[row] = self._make_stream(np.asarray(prompt_token_ids).tolist(), skip_special_tokens)
        complete_at = self.append_one(row, outputs, last_is_stop_id) if outputs.size else -1
        rows[MIN_TOKENS, row] = min_tokens
        rows[NUM_DELIVERED, row] = rows[LENGTH, row] if num_delivered_bytes is None else num_delivered_bytes
        return complete_at

    def _says_anything(self, token_ids: np.ndarray, skips_special: bool) -> bool:
        """Whether these ids have any text in the table."""
        assert self._table is not None
        _, starts, kinds = self._table.ids
        known = token_ids[(token_ids >= 0) & (token_ids < kinds.size)]
        has_text = starts[known + 1] > starts[known]
        if skips_special:
            has_text &= kinds[known] & SPECIAL == 0
        return bool(has_text.any())

    def close(self, row: int) -> None:
        """The row is free: what it had not delivered is gone."""
        clear_text(self._rows, self._links, self._free, row)
        self._streams[row] = None
        self._stop[row] = ()

    def stop_indices(self, rows: np.ndarray) -> np.ndarray:
        """int64 [n]: which of its stop strings ended each row, -1 for none."""
        indices: np.ndarray = self._rows[STOP_INDEX, rows]
        return indices

    def stop_string(self, row: int) -> str | None:
        """The stop string that ended the row."""
        index = int(self._rows[STOP_INDEX, row])
        return None if index < 0 else self._stop[row][index]

    def num_delivered_bytes(self, row: int) -> int:
        """Bytes of the row's text, from its first output on, that `take` has given."""
        return int(self._rows[NUM_DELIVERED, row])

    @property
    def delivered_bytes(self) -> np.ndarray:
        """int64 [num_rows]: the same of every row."""
        delivered: np.ndarray = self._rows[NUM_DELIVERED]
        return delivered

    # A step

    def append(
        self, rows: np.ndarray, token_ids: np.ndarray, width: int, counts: np.ndarray, ends_by_id: np.ndarray
    ) -> np.ndarray:
        """Text of the ids that n rows got, those that the rows would keep without stop strings. Entry i is row
        `rows[i]` (int32 [n], none twice) with `counts[i]` ids (int32 [n], 0: none) from `token_ids[i * width]` on
        (int32, 1-D); the last is a stop id of the request where `ends_by_id[i]` (bool [n]).

        Returns int32 [n]: the index of the id that completes a stop string, else -1. The row's text has ended with it,
        and the ids behind it are not the row's. Rows that have ended are passed over.
        """
        if self._table is None:
            table, token_ids, width = self._decode_streams(rows, token_ids, width, counts, ends_by_id)
        else:
            table = self._table.ids
        return self._append(table, rows, token_ids, width, counts, ends_by_id)

    def _append(
        self, table: IdTable, rows: np.ndarray, token_ids: np.ndarray, width: int, counts: np.ndarray,
        ends_by_id: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        complete_at = np.empty(rows.size, np.int32)
        while True:
            num_missing = append_text(
                self._rows, self._partial, self._stops.stop_bytes, self._stops.borders, self._stops.ends,
                self._stops.progress, self._blocks, self._links, self._free, *table, self._decoded, rows, token_ids,
                width, counts, ends_by_id, complete_at,
            )  # fmt: skip
            if num_missing == 0:
                return complete_at
            self._add_blocks(num_missing)

    def append_one(self, row: int, token_ids: Sequence[int] | np.ndarray, is_stop_id: bool = False) -> int:
        """`append` for one row."""
        ids = np.array(token_ids, np.int32)  # the kernels take what can be written, too
        counts, ends_by_id = np.array([ids.size], np.int32), _TRUE if is_stop_id else _FALSE
        return int(self.append(np.array([row], np.int32), ids, ids.size, counts, ends_by_id)[0])

    def _decode_streams(
        self, rows: np.ndarray, token_ids: np.ndarray, width: int, counts: np.ndarray, ends_by_id: np.ndarray
    ) -> tuple[IdTable, np.ndarray, int]:
        """What the rows' streams say to their ids, as a table of its own: its "id" k is the k-th id of this call."""
        # Lists: an element of an array is looked up slowly, and this is done for every row of every step.
        all_ids, num_ids_of, stops = token_ids.tolist(), counts.tolist(), ends_by_id.tolist()
        has_ended, includes_stop = self._rows[HAS_ENDED, rows].tolist(), self._rows[INCLUDES_STOP, rows].tolist()
        pieces: list[bytes] = []
        firsts = []
        for i, row in enumerate(rows.tolist()):
            firsts.append(len(pieces))
            num_ids = num_ids_of[i]
            if num_ids == 0 or has_ended[i]:
                continue
            stream = self._streams[row]
            assert stream is not None, f"row {row} is not open"
            step, start = stream.step, i * width
            says_nothing = stops[i] and not includes_stop[i]
            for token_id in all_ids[start : start + num_ids - says_nothing]:
                pieces.append(step(token_id).encode())
            if says_nothing:
                pieces.append(b"")
        widest = max(num_ids_of, default=0)
        numbers = np.array(firsts, np.int32)[:, None] + np.arange(widest, dtype=np.int32)
        return IdTable.of_text(pieces), numbers.reshape(-1), widest

    # What is delivered

    def measure(self, rows: np.ndarray, has_finished: np.ndarray) -> np.ndarray:
        """int64 [n + 1]: where the text that `take` would give of each of n rows would begin, and end."""
        if self._table is None:
            for row in rows[has_finished].tolist():
                self._end_stream(row)
        offsets = np.empty(rows.size + 1, np.int64)
        measure_text(self._rows, self._blocks, self._links, self._free, rows, has_finished, offsets)
        return offsets

    def take(self, rows: np.ndarray, has_finished: np.ndarray) -> Texts:
        """What can be delivered of n rows (int32 [n], none twice) since they were taken last; it counts as delivered.
        Where `has_finished[i]` (bool [n]), for whatever reason, the row's text ends here."""
        offsets = self.measure(rows, has_finished)
        data = np.empty(int(offsets[-1]), np.uint8)
        take_text(self._rows, self._blocks, self._links, self._free, rows, offsets, data)
        return Texts(data, offsets)

    def take_one(self, row: int, has_finished: bool = False) -> str:
        """`take` for one row."""
        return self.take(np.array([row], np.int32), _TRUE if has_finished else _FALSE).text(0)

    def _end_stream(self, row: int) -> None:
        """The stream's last bytes are text, in which no stop string is looked for: the request is over."""
        stream = self._streams[row]
        if stream is None or self._rows[HAS_ENDED, row]:
            return
        self._streams[row] = None
        rest = stream.rest()
        if rest:
            self._rows[NUM_STOPS, row] = 0
            self._append(
                IdTable.of_text([rest.encode()]), np.array([row], np.int32), np.zeros(1, np.int32), 1,
                np.ones(1, np.int32), _FALSE,
            )  # fmt: skip
