"""The vectorized drafter against one that looks at every place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from asyncbook.demo.ngram import propose  # noqa: E402


def drafts_by_search(token_ids: list[int], min_n: int, max_n: int, num_drafts: int) -> list[int]:
    """What followed the earliest place of the longest of the row's last n-grams."""
    for n in range(min(max_n, len(token_ids) - 1), min_n - 1, -1):
        tail = token_ids[-n:]
        for start in range(len(token_ids) - n):
            if token_ids[start : start + n] == tail:
                return token_ids[start + n :][:num_drafts]
    return []


def propose_rows(rows: list[list[int]], max_len: int, min_n: int, max_n: int, num_drafts: int) -> list[list[int]]:
    """Padded with ids that would match if anything looked at them; without the padding of the result."""
    table = torch.tensor([row + row[-1:] * (max_len - len(row)) for row in rows])
    drafts = propose(table, torch.tensor([len(row) for row in rows]), min_n, max_n, num_drafts)
    assert drafts.shape == (len(rows), num_drafts)
    found = []
    for row in drafts.tolist():
        kept = [token_id for token_id in row if token_id >= 0]
        assert row == kept + [-1] * (num_drafts - len(kept))
        found.append(kept)
    return found


@settings(deadline=None, max_examples=300)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=6),
    spare=st.integers(0, 5),
    min_n=st.integers(1, 3),
    more=st.integers(0, 3),
    num_drafts=st.integers(1, 6),
)
def test_finds_what_a_search_finds(rows, spare, min_n, more, num_drafts):
    max_len = max(map(len, rows)) + spare
    expected = [drafts_by_search(row, min_n, min_n + more, num_drafts) for row in rows]
    assert propose_rows(rows, max_len, min_n, min_n + more, num_drafts) == expected


def test_longest_first_then_earliest():
    shorter, longer = [7, 8, 1], [5, 7, 8, 2]
    assert propose_rows([[*shorter, *longer, 5, 7, 8]], 10, 2, 5, 1) == [[2]]
    assert propose_rows([[7, 8, 1, 7, 8, 2, 7, 8]], 8, 2, 5, 1) == [[1]]


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_nothing_to_look_up(num_tokens):
    drafts = propose(torch.zeros((1, 8), dtype=torch.int64), torch.tensor([num_tokens]), 2, 5, 3)
    assert drafts.tolist() == [[-1, -1, -1]]
