"""Text of rows, compiled: bytes of ids, UTF-8 completed across ids, stop strings, and what waits for the reader.

Everything here is UTF-8 bytes. A stop string is looked for in bytes: UTF-8 is such that a byte sequence of whole
characters is found at character borders only, so this finds what a search in characters finds.

Arrays, with R rows: `rows` int64 [len(TextField), R]; `partial` uint8 [R, 4], the bytes of a character that is not
complete yet; `stop_bytes` uint8 and `borders` int32 [R, S], `ends` int32 [R, N + 1], `progress` int32 [R, N] (see
`stops.py`); `blocks` uint8 [B, BLOCK_SIZE], `links` int32 [B], `free` int64 [2] (see `put_byte`); and the table of ids:
`id_bytes` uint8, id i's are `id_bytes[starts[i] : starts[i + 1]]` (int64), `kinds` uint8 of the flags below.

Undelivered text of a row is a chain of blocks, so memory follows what waits and not what could wait. Block k of a row
holds bytes k * BLOCK_SIZE and following of its whole text; blocks that were delivered are free again.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import types

from asyncbook.ipc.jit import kernel, rule


class TextField(IntEnum):
    """Rows of `rows`. Counts of bytes are of the row's whole text, from its first output on."""

    HEAD = 0  # first block that is kept, -1: none
    TAIL = 1
    HEAD_START = 2  # which byte of the text the first kept block begins with
    LENGTH = 3
    NUM_DELIVERED = 4  # bytes that the reader has; more than LENGTH while a row is taken up again
    NUM_HELD = 5  # at the end of the text, can still become a stop string
    NUM_PARTIAL = 6  # bytes in `partial`
    NUM_OUTPUTS = 7
    MIN_TOKENS = 8
    NUM_STOPS = 9
    SKIPS_SPECIAL = 10
    INCLUDES_STOP = 11
    HAS_ENDED = 12  # no text will follow
    STOP_INDEX = 13  # of the stop string that ended it, -1: none did
    IS_BROKEN = 14  # the run of fallback bytes that the row is in: all of it is U+FFFD
    HAS_FALLBACK = 15  # the tokenizer has fallback bytes
    STRIPS_SPACE = 16  # nothing was said before: the first space is none


HEAD, TAIL, HEAD_START = int(TextField.HEAD), int(TextField.TAIL), int(TextField.HEAD_START)
LENGTH, NUM_DELIVERED, NUM_HELD = int(TextField.LENGTH), int(TextField.NUM_DELIVERED), int(TextField.NUM_HELD)
NUM_PARTIAL, NUM_OUTPUTS, MIN_TOKENS = int(TextField.NUM_PARTIAL), int(TextField.NUM_OUTPUTS), int(TextField.MIN_TOKENS)
NUM_STOPS, SKIPS_SPECIAL = int(TextField.NUM_STOPS), int(TextField.SKIPS_SPECIAL)
INCLUDES_STOP, HAS_ENDED = int(TextField.INCLUDES_STOP), int(TextField.HAS_ENDED)
STOP_INDEX, IS_BROKEN = int(TextField.STOP_INDEX), int(TextField.IS_BROKEN)
HAS_FALLBACK, STRIPS_SPACE = int(TextField.HAS_FALLBACK), int(TextField.STRIPS_SPACE)

BLOCK_SIZE = 64
FREE_HEAD, NUM_FREE = 0, 1  # of `free`: a chain through `links`, as the rows' are
SPECIAL, WHOLE, FALLBACK = 1, 2, 4  # flags of `kinds`: a special token; whole characters; a byte that had no other id
MAX_DECODED = 12  # bytes that one id's byte can make certain: U+FFFD for three before it and for itself
SPACE = 0x20

_ROWS = types.int64[:, ::1]
_UINT8 = types.uint8[::1]
_UINT8_2D = types.uint8[:, ::1]
_INT32 = types.int32[::1]
_INT32_2D = types.int32[:, ::1]
_INT64 = types.int64[::1]
_BOOL = types.boolean[::1]
_INT = types.int64
_POOL = (_UINT8_2D, _INT32, _INT64)  # blocks, links, free


@rule
def put_byte(rows, blocks, links, free, row, byte):
    """Appends one byte to a row's text. There must be a free block."""
    length = rows[LENGTH, row]
    if length % BLOCK_SIZE == 0:
        block = free[FREE_HEAD]
        free[FREE_HEAD] = links[block]
        free[NUM_FREE] -= 1
        links[block] = -1
        if rows[HEAD, row] < 0:
            rows[HEAD, row] = block
            rows[HEAD_START, row] = length
        else:
            links[rows[TAIL, row]] = block
        rows[TAIL, row] = block
    blocks[rows[TAIL, row], length % BLOCK_SIZE] = byte
    rows[LENGTH, row] = length + 1


@rule
def free_blocks(rows, links, free, row, end):
    """Gives back the row's first blocks, those that hold nothing from byte `end` on."""
    while rows[HEAD, row] >= 0 and rows[HEAD_START, row] + BLOCK_SIZE <= end:
        block = rows[HEAD, row]
        rows[HEAD, row] = links[block]
        rows[HEAD_START, row] += BLOCK_SIZE
        links[block] = free[FREE_HEAD]
        free[FREE_HEAD] = block
        free[NUM_FREE] += 1


@rule
def match_byte(stop_bytes, borders, ends, progress, num_stops, row, byte):
    """Takes a row's stop strings one byte further (Knuth, Morris and Pratt). Returns the first in the order of the list
    that is complete with it, else -1."""
    complete = -1
    for index in range(num_stops):
        start = ends[row, index]
        matched = progress[row, index]
        while matched > 0 and stop_bytes[row, start + matched] != byte:
            matched = borders[row, start + matched - 1]
        if stop_bytes[row, start + matched] == byte:
            matched += 1
        if start + matched == ends[row, index + 1]:
            if complete < 0:
                complete = index
            matched = borders[row, start + matched - 1]
        progress[row, index] = matched
    return complete


@rule
def put_bytes(rows, stop_bytes, borders, ends, progress, blocks, links, free, row, source, start, end, counts):
    """Appends bytes of whole characters. Where a stop string is complete, and `counts`, the text ends there: returns
    True. A stop string that does not count is passed over for good."""
    num_stops = rows[NUM_STOPS, row]
    for position in range(start, end):
        byte = source[position]
        put_byte(rows, blocks, links, free, row, byte)
        if num_stops > 0:
            complete = match_byte(stop_bytes, borders, ends, progress, num_stops, row, byte)
            if complete >= 0 and counts:
                if rows[INCLUDES_STOP, row] == 0:
                    rows[LENGTH, row] -= ends[row, complete + 1] - ends[row, complete]
                rows[STOP_INDEX, row] = complete
                rows[HAS_ENDED, row] = 1
                rows[NUM_PARTIAL, row] = 0
                return True
    return False


@rule
def sequence_length(byte):
    """Bytes of a character that begins with this one; 0: none does."""
    if byte < 0x80:
        return 1
    if byte < 0xC2 or byte > 0xF4:
        return 0
    if byte < 0xE0:
        return 2
    return 3 if byte < 0xF0 else 4


@rule
def continues(first, num_before, byte):
    """Whether the byte can follow `num_before` bytes of a character that begins with `first`."""
    least, most = 0x80, 0xBF
    if num_before == 1:
        if first == 0xE0:
            least = 0xA0
        elif first == 0xED:
            most = 0x9F
        elif first == 0xF0:
            least = 0x90
        elif first == 0xF4:
            most = 0x8F
    return least <= byte <= most


@rule
def put_replacement(target, at):
    """U+FFFD."""
    target[at], target[at + 1], target[at + 2] = 0xEF, 0xBF, 0xBD


@rule
def decode_byte(rows, partial, row, byte, decoded):
    """Takes one byte of possibly broken UTF-8; writes what is certain with it into `decoded`, uint8 [MAX_DECODED], and
    returns how much that is. Each longest broken part becomes one U+FFFD, as in Rust's `from_utf8_lossy`."""
    num_decoded = 0
    num_partial = rows[NUM_PARTIAL, row]
    if num_partial > 0:
        if continues(partial[row, 0], num_partial, byte):
            partial[row, num_partial] = byte
            num_partial += 1
            if num_partial < sequence_length(partial[row, 0]):
                rows[NUM_PARTIAL, row] = num_partial
                return 0
            for index in range(num_partial):
                decoded[index] = partial[row, index]
            rows[NUM_PARTIAL, row] = 0
            return num_partial
        put_replacement(decoded, 0)
        num_decoded = 3
        rows[NUM_PARTIAL, row] = 0
    length = sequence_length(byte)
    if length == 1:
        decoded[num_decoded] = byte
        return num_decoded + 1
    if length == 0:
        put_replacement(decoded, num_decoded)
        return num_decoded + 3
    partial[row, 0] = byte
    rows[NUM_PARTIAL, row] = 1
    return num_decoded


@rule
def break_run(rows, row, decoded, num_bytes):
    """A run of fallback bytes is broken: each of its last bytes is one U+FFFD, unlike a byte-level id's."""
    for index in range(num_bytes):
        put_replacement(decoded, 3 * index)
    rows[NUM_PARTIAL, row] = 0
    return 3 * num_bytes


@rule
def decode_fallback(rows, partial, row, byte, decoded):
    """`decode_byte` for a tokenizer that falls back to bytes. Its library's decoder writes a whole run of them as
    U+FFFD where the run is no text; what was certain before that stays."""
    num_partial = rows[NUM_PARTIAL, row]
    is_next = num_partial > 0 and continues(partial[row, 0], num_partial, byte)
    if rows[IS_BROKEN, row] == 0 and (is_next or (num_partial == 0 and sequence_length(byte) > 0)):
        return decode_byte(rows, partial, row, byte, decoded)
    if is_next:
        partial[row, num_partial] = byte
        rows[NUM_PARTIAL, row] = num_partial + 1
        if num_partial + 1 < sequence_length(partial[row, 0]):
            return 0
        return break_run(rows, row, decoded, num_partial + 1)
    rows[IS_BROKEN, row] = 1
    num_decoded = break_run(rows, row, decoded, num_partial)
    if sequence_length(byte) > 1:  # if it is the last of the output, it is one U+FFFD with what follows it
        partial[row, 0] = byte
        rows[NUM_PARTIAL, row] = 1
        return num_decoded
    put_replacement(decoded, num_decoded)
    return num_decoded + 3


@rule
def append_id(rows, partial, stop_bytes, borders, ends, progress, blocks, links, free, id_bytes, starts, kinds, decoded,
              row, token_id, is_stop_id):  # fmt: skip
    """Appends one id's text; True where it completes a stop string that counts. What a stop id says is text only where
    the request includes what stops it, and is not searched: the id comes before a string."""
    counts = rows[NUM_OUTPUTS, row] >= rows[MIN_TOKENS, row] and not is_stop_id
    rows[NUM_OUTPUTS, row] += 1
    if is_stop_id and rows[INCLUDES_STOP, row] == 0:
        return False
    if token_id < 0 or token_id >= kinds.shape[0]:  # the engine's vocabulary may be padded: such an id says nothing
        return False
    kind = kinds[token_id]
    if kind & SPECIAL and rows[SKIPS_SPECIAL, row] != 0:
        return False
    start, end = starts[token_id], starts[token_id + 1]
    if rows[STRIPS_SPACE, row] != 0 and start < end:
        rows[STRIPS_SPACE, row] = 0
        if id_bytes[start] == SPACE:
            start += 1
    num_decoded = 0
    if kind & FALLBACK:
        if start < end:
            num_decoded = decode_fallback(rows, partial, row, id_bytes[start], decoded)
        start = end
    elif rows[HAS_FALLBACK, row] != 0:
        num_decoded = break_run(rows, row, decoded, rows[NUM_PARTIAL, row])
        rows[IS_BROKEN, row] = 0
    # One call to put bytes, inlined once: what is decoded first, then whole characters, or one byte after the other.
    while True:
        if num_decoded > 0:
            if put_bytes(
                rows, stop_bytes, borders, ends, progress, blocks, links, free, row, decoded, 0, num_decoded, counts
            ):
                return True
        elif start < end and kind & WHOLE and rows[NUM_PARTIAL, row] == 0:
            return put_bytes(
                rows, stop_bytes, borders, ends, progress, blocks, links, free, row, id_bytes, start, end, counts
            )
        if start == end:
            return False
        num_decoded = decode_byte(rows, partial, row, id_bytes[start], decoded)
        start += 1


@rule
def hold(rows, progress, row):
    """Held is the longest end of the text that begins a stop string, no more; nothing where the stop is included."""
    num_held = 0
    if rows[HAS_ENDED, row] == 0 and rows[INCLUDES_STOP, row] == 0:
        for index in range(rows[NUM_STOPS, row]):
            num_held = max(num_held, progress[row, index])
    rows[NUM_HELD, row] = num_held


@rule
def max_blocks(starts, kinds, token_ids, width, counts, i):
    """Blocks that the ids of entry i can need: a broken byte becomes three."""
    num_bytes = MAX_DECODED
    for index in range(counts[i]):
        token_id = token_ids[i * width + index]
        if 0 <= token_id < kinds.shape[0]:
            num_bytes += 3 * (starts[token_id + 1] - starts[token_id])
    return num_bytes // BLOCK_SIZE + 1


@kernel((_ROWS, _UINT8_2D, _UINT8_2D, _INT32_2D, _INT32_2D, _INT32_2D, *_POOL, _UINT8, _INT64, _UINT8, _UINT8, _INT32,
         _INT32, _INT, _INT32, _BOOL, _INT32))  # fmt: skip
def append_text(rows, partial, stop_bytes, borders, ends, progress, blocks, links, free, id_bytes, starts, kinds,
                decoded, batch_rows, token_ids, width, counts, ends_by_id, complete_at):  # fmt: skip
    """Ids of n rows. Entry i is row `batch_rows[i]` with the `counts[i]` ids from `token_ids[i * width]` on, the last
    of them a stop id where `ends_by_id[i]`. `complete_at[i]`: which of them completes a stop string, -1: none; the
    later ones are not looked at. Rows that have ended are passed over. `decoded` is scratch.

    Keeps one free block a row for `measure_text`. Returns how many blocks are missing; then nothing has changed.
    """
    missing = rows.shape[1] - free[NUM_FREE]
    for i in range(batch_rows.shape[0]):
        missing += max_blocks(starts, kinds, token_ids, width, counts, i)
    if missing > 0:
        return missing
    for i in range(batch_rows.shape[0]):
        row = np.uintp(batch_rows[i])
        complete_at[i] = -1
        if rows[HAS_ENDED, row] != 0:
            continue
        for index in range(counts[i]):
            if append_id(
                rows, partial, stop_bytes, borders, ends, progress, blocks, links, free, id_bytes, starts, kinds,
                decoded, row, token_ids[i * width + index], ends_by_id[i] and index == counts[i] - 1,
            ):  # fmt: skip
                complete_at[i] = index
                break
        hold(rows, progress, row)
    return 0


@kernel((_ROWS, *_POOL, _INT32, _BOOL, _INT64))
def measure_text(rows, blocks, links, free, batch_rows, has_finished, offsets):
    """What can be delivered of n rows: entry i's bytes are to be `[offsets[i], offsets[i + 1])` of one buffer. Rows
    that have finished end here: what is held is text, and a character that was never completed is one U+FFFD."""
    offsets[0] = 0
    for i in range(batch_rows.shape[0]):
        row = np.uintp(batch_rows[i])
        if has_finished[i]:
            if rows[NUM_PARTIAL, row] > 0:
                for byte in (0xEF, 0xBF, 0xBD):
                    put_byte(rows, blocks, links, free, row, byte)
                rows[NUM_PARTIAL, row] = 0
            rows[NUM_HELD, row] = 0
            rows[HAS_ENDED, row] = 1
        ready = rows[LENGTH, row] - rows[NUM_HELD, row] - rows[NUM_DELIVERED, row]
        offsets[i + 1] = offsets[i] + max(ready, 0)


@kernel((_ROWS, *_POOL, _INT32, _INT64, _UINT8))
def take_text(rows, blocks, links, free, batch_rows, offsets, target):
    """Copies what `measure_text` found into `target`, uint8 [offsets[n]]; from here on it counts as delivered."""
    for i in range(batch_rows.shape[0]):
        row = np.uintp(batch_rows[i])
        position, at, last = rows[NUM_DELIVERED, row], offsets[i], offsets[i + 1]
        # A block that holds the end of the text stays, as long as more can be written behind it.
        free_blocks(rows, links, free, row, min(position, rows[LENGTH, row]))
        while at < last:
            target[at] = blocks[rows[HEAD, row], position % BLOCK_SIZE]
            at += 1
            position += 1
            if position % BLOCK_SIZE == 0:
                free_blocks(rows, links, free, row, position)
        rows[NUM_DELIVERED, row] = position


@kernel((_ROWS, _INT32, _INT64, _INT))
def clear_text(rows, links, free, row):
    """A row without text, its blocks given back."""
    free_blocks(rows, links, free, row, rows[HEAD_START, row] + (1 << 62))
    for field in range(rows.shape[0]):
        rows[field, row] = 0
    rows[HEAD, row] = rows[TAIL, row] = rows[STOP_INDEX, row] = -1


@kernel((_INT32, _INT64, _INT))
def add_blocks(links, free, first):
    """Puts the blocks from `first` on on the free chain."""
    for block in range(first, links.shape[0]):
        links[block] = free[FREE_HEAD]
        free[FREE_HEAD] = block
    free[NUM_FREE] += links.shape[0] - first
