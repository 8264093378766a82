"""What the drawing at the top of `ipc/layout.py` promises, for books of many sizes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbook.ipc import layout as layout_module
from asyncbook.ipc.columns import block_size
from asyncbook.ipc.layout import (
    COLUMN_DTYPES,
    LINE_BYTES,
    MAGIC,
    MAX_IN_FLIGHT,
    MAX_LOGPROBS,
    MAX_POSITIONS,
    MAX_ROWS,
    MAX_SPEC_TOKENS,
    NO_LOGPROBS,
    NUM_CHECKPOINTS,
    NUM_INT32_COLUMNS,
    PAGE_BYTES,
    WORDS_PER_LINE,
    Column,
    Counter,
    Layout,
    Owner,
    Region,
    RunnerWord,
    SlotWord,
    Stamp,
    Word,
    layout_hash,
)
from asyncbook.ipc.logprobs import section_size, section_start
from asyncbook.ipc.outputs_log import lines_of

SIZES = st.builds(
    Layout,
    max_num_reqs=st.one_of(st.integers(1, 300), st.integers(1, MAX_ROWS)),
    max_model_len=st.one_of(st.integers(1, 300), st.integers(1, MAX_POSITIONS)),
    num_spec_tokens=st.integers(0, MAX_SPEC_TOKENS),
    max_in_flight=st.integers(1, MAX_IN_FLIGHT),
    max_logprobs=st.one_of(st.just(NO_LOGPROBS), st.integers(0, 20), st.integers(NO_LOGPROBS, MAX_LOGPROBS)),
)


def regions(layout: Layout) -> list[Region]:
    """Everything that is declared, in order of offset."""
    declared = [value for name in dir(Layout) if isinstance(value := getattr(layout, name), Region)]
    for slot in range(layout.num_frames):
        declared += [layout.frame_int32(slot), layout.frame_uint8(slot)]
    for slot in range(NUM_CHECKPOINTS):
        declared += [
            layout.checkpoint_header(slot), layout.checkpoint_counters(slot), layout.checkpoint_work(slot),
            layout.checkpoint_row_counters(slot),
        ]  # fmt: skip
    return sorted(declared, key=lambda region: (region.offset, region.end))


@settings(max_examples=200, deadline=None)
@given(SIZES)
def test_every_byte_is_declared_once(layout: Layout) -> None:
    declared = regions(layout)
    assert len({region.name for region in declared}) == len(declared)
    assert declared[0].offset == 0
    for one, other in itertools.pairwise(declared):
        assert one.end <= other.offset, f"{one.name} reaches into {other.name}"
        # What lies between two parts is padding up to a page, no more.
        assert other.offset - one.end < PAGE_BYTES
    assert 0 <= layout.total_bytes - declared[-1].end < PAGE_BYTES


@settings(max_examples=200, deadline=None)
@given(SIZES)
def test_parts_pages_and_lines(layout: Layout) -> None:
    parts = [
        layout.bookkeeper_offset, layout.runner_offset, layout.runner_end, layout.frames_offset, layout.table_offset,
        layout.is_token_ids.offset, layout.logprobs.offset, layout.overflow_log.offset, layout.total_bytes,
    ]  # fmt: skip
    assert all(offset % PAGE_BYTES == 0 for offset in parts)
    assert parts == sorted(parts)
    for region in regions(layout):
        assert region.offset % region.dtype.itemsize == 0, region.name
    for region in (layout.words, layout.stamps, layout.counters, layout.runner_words, layout.ring_headers):
        assert region.offset % LINE_BYTES == 0, region.name
    # Columns, rows of both tables and slots of the ring start on a line.
    assert 4 * layout.padded_rows % LINE_BYTES == layout.padded_rows % LINE_BYTES == 0
    for slot in range(layout.num_frames):
        assert layout.frame_int32(slot).offset % LINE_BYTES == layout.frame_uint8(slot).offset % LINE_BYTES == 0
    for region in (
        layout.token_ids, layout.is_token_ids, layout.logprobs, layout.ring_token_ids, layout.ring_draft_token_ids,
        layout.ring_logprobs,
    ):  # fmt: skip
        assert region.shape[1] * region.dtype.itemsize % LINE_BYTES == 0
        assert region.offset % LINE_BYTES == 0, region.name


@settings(max_examples=200, deadline=None)
@given(SIZES)
def test_there_is_room_for_what_a_book_of_this_size_holds(layout: Layout) -> None:
    num_rows, width = layout.max_num_reqs, 1 + layout.num_spec_tokens
    assert layout.num_frames == layout.max_in_flight + 2
    assert layout.num_ring_slots == layout.max_in_flight
    for table in (layout.token_ids, layout.is_token_ids):
        assert table.shape[0] == num_rows
        assert table.shape[1] >= layout.max_model_len
    for slot in range(layout.num_frames):
        assert layout.frame_int32(slot).shape == (NUM_INT32_COLUMNS, layout.padded_rows)
        assert layout.frame_uint8(slot).shape == (layout.padded_rows,)
        # One block: a single copy takes a frame to a device.
        assert layout.frame_uint8(slot).end - layout.frame_int32(slot).offset == layout.frame_bytes
    assert layout.padded_rows >= num_rows
    assert layout.stamps.shape == (layout.num_frames, WORDS_PER_LINE)
    assert layout.counters.shape[0] >= Counter.ACCEPTED_PER_POS + layout.num_spec_tokens
    assert layout.row_counters.shape[0] == num_rows
    assert layout.ring_token_ids.shape[1] >= num_rows * width
    assert layout.ring_draft_token_ids.shape[1] >= num_rows * layout.num_spec_tokens
    # An entry of the most logprobs for each output and each id of a step; without logprobs, nothing.
    most = layout.max_logprobs + 1
    assert layout.entry_size == (1 + 2 * most if most else 0)
    assert layout.logprobs.shape[0] == num_rows
    assert layout.logprobs.shape[1] >= layout.max_model_len * layout.entry_size
    assert layout.ring_logprobs.shape[1] >= num_rows * width * layout.entry_size
    if not layout.has_logprobs:
        assert layout.logprobs.shape[1] == layout.ring_logprobs.shape[1] == 0
    # A record takes all that a step can bring, as `ipc/columns.py` and `ipc/logprobs.py` have it.
    size = block_size(num_rows, num_rows * width)
    if most:
        size = section_start(size) + section_size(num_rows, num_rows * width, 0)
    assert layout.max_record_lines >= lines_of(size + 2 * num_rows * width * most)
    assert layout.outputs_log.shape[0] >= 4 * layout.max_record_lines
    # The index of a token does not fit an int32 where the book is big (F15): it is an int64 everywhere.
    assert layout.token_ids.end == layout.token_ids.offset + 4 * layout.token_ids.shape[0] * layout.token_ids.shape[1]


def test_a_big_book_does_not_wrap() -> None:
    layout = Layout(max_num_reqs=599, max_model_len=3_600_000, num_spec_tokens=0, max_in_flight=2)
    assert 598 * 3_600_000 == 2_152_800_000
    assert layout.token_ids.end - layout.token_ids.offset > 4 * 2_152_800_000
    assert layout.total_bytes > 2**33


def test_words_stand_alone_on_their_lines() -> None:
    for words in (Word, RunnerWord):
        assert all(word % WORDS_PER_LINE == 0 for word in words)
        assert sorted(words) == [index * WORDS_PER_LINE for index in range(len(words))]
    # A slot's two words that are published are on different lines: one is the runner's, the other its device's.
    assert SlotWord.DESCRIBED // WORDS_PER_LINE != SlotWord.ARRIVED // WORDS_PER_LINE
    others = [word for word in SlotWord if word is not SlotWord.ARRIVED]
    assert all(word // WORDS_PER_LINE == SlotWord.DESCRIBED // WORDS_PER_LINE for word in others)
    assert len(Stamp) <= WORDS_PER_LINE
    assert len(Owner) * 8 <= PAGE_BYTES


def test_indices_have_no_gaps() -> None:
    for words in (Owner, Stamp, Column, Counter):
        assert [int(word) for word in words] == list(range(len(words)))
    assert list(COLUMN_DTYPES) == [column.name.lower() for column in Column] + ["finish_reason"]
    assert MAGIC.to_bytes(8, "little") == b"ASNCBOOK"


def test_views_are_where_they_are_declared() -> None:
    layout = Layout(max_num_reqs=3, max_model_len=5, num_spec_tokens=2, max_in_flight=1, max_logprobs=2)
    memory = bytearray(layout.total_bytes)
    for number, region in enumerate(regions(layout), 1):
        view = region.view(memory)
        assert (view.shape, view.dtype) == (region.shape, region.dtype)
        assert view.flags.c_contiguous
        assert not view.any(), f"{region.name} was written through another region"
        view[...] = True if region.dtype == np.bool_ else number
    for number, region in enumerate(regions(layout), 1):
        assert (region.view(memory) == (True if region.dtype == np.bool_ else number)).all(), region.name
    part = bytearray(memory[layout.runner_offset : layout.runner_end])
    np.testing.assert_array_equal(
        layout.ring_headers.view(part, layout.runner_offset), layout.ring_headers.view(memory)
    )
    with pytest.raises(TypeError):
        layout.words.view(memory[: layout.words.end - 1])


def test_read_only_memory_gives_read_only_views() -> None:
    layout = Layout(max_num_reqs=3, max_model_len=5, num_spec_tokens=2, max_in_flight=1, max_logprobs=2)
    memory = memoryview(bytearray(layout.total_bytes)).toreadonly()
    assert not any(region.view(memory).flags.writeable for region in regions(layout))


PROGRAM = """
from asyncbook.ipc.layout import Layout, Region, layout_hash
layout = Layout(max_num_reqs=70, max_model_len=1000, num_spec_tokens=3, max_in_flight=4, max_logprobs=5)
names = [name for name in dir(Layout) if isinstance(getattr(layout, name), Region)]
print([repr(getattr(layout, name)) for name in names], layout.frame_int32(3), layout.total_bytes, layout_hash())
"""


def test_another_process_sees_the_same(tmp_path: Path) -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1")
    }
    (output,) = outputs
    assert layout_hash() in output
    assert Layout(70, 1000, 3, 4, 5) == Layout(70, 1000, 3, 4, 5)
    assert repr(Layout(70, 1000, 3, 4, 5).frame_int32(3)) in output


@pytest.mark.parametrize(
    ("sizes", "valid"),
    [
        ((1, 1, 0, 1), True),
        ((MAX_ROWS, MAX_POSITIONS, MAX_SPEC_TOKENS, MAX_IN_FLIGHT), True),
        ((0, 1, 0, 1), False),
        ((1, 0, 0, 1), False),
        ((1, 1, -1, 1), False),
        ((1, 1, 0, 0), False),
        ((MAX_ROWS + 1, 1, 0, 1), False),
        ((1, MAX_POSITIONS + 1, 0, 1), False),
        ((1, 1, MAX_SPEC_TOKENS + 1, 1), False),
        ((1, 1, 0, MAX_IN_FLIGHT + 1), False),
        ((1, 1, 0, 1, MAX_LOGPROBS), True),
        ((1, 1, 0, 1, NO_LOGPROBS), True),
        ((1, 1, 0, 1, MAX_LOGPROBS + 1), False),
        ((1, 1, 0, 1, NO_LOGPROBS - 1), False),
    ],
)
def test_limits(sizes: tuple[int, ...], valid: bool) -> None:
    if valid:
        assert Layout(*sizes).total_bytes > 0
    else:
        with pytest.raises(AssertionError):
            Layout(*sizes)


@pytest.mark.parametrize("name", ["LINE_BYTES", "PAGE_BYTES", "NUM_HISTOGRAM_BUCKETS"])
def test_the_hash_changes_with_the_layout(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = layout_hash()
    assert len(bytes.fromhex(before)) == 8
    monkeypatch.setattr(layout_module, name, 2 * getattr(layout_module, name))
    assert layout_hash() != before
