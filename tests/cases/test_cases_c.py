"""Group C of the cases from the field: speculative decoding. A book is told what verification accepted: the v ids in
front of the first -1 are the accepted drafts and one more."""

from __future__ import annotations

import numpy as np
import pytest

from asyncbook import Book, FinishReason, RequestParams, SpecDecodeStats
from tests.conftest import Delivered, MakeBook, delivered, grown, have, step, tables, tokens
from tests.logprobs import delivered_logprobs, logprobs_of


def since(book: Book, before: SpecDecodeStats) -> tuple[int, int, int, int, list[int]]:
    """Rounds, draft tokens, accepted, emitted, accepted per position."""
    now = book.spec_decode_stats()
    per_position = zip(now.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos, strict=True)
    return (
        now.num_drafts - before.num_drafts,
        now.num_draft_tokens - before.num_draft_tokens,
        now.num_accepted_tokens - before.num_accepted_tokens,
        now.num_emitted_tokens - before.num_emitted_tokens,
        [new - old for new, old in per_position],
    )


# C1: acceptances behind the first rejection are counted.


@pytest.mark.parametrize("behind", [[-1, -1, -1], [-1, 12, 13], [-1, -1, 13]])
def test_c1_nothing_counts_behind_the_first_rejection(book: Book, behind: list[int]) -> None:
    row = book.admit("a", [1])
    step(book, [row], [5], drafts=[[10, 20, 12, 13]])
    before = book.spec_decode_stats()
    step(book, [row], [[10, 11, *behind]], d=[4])  # flags T F T T: one accepted, then the correction
    assert tokens(book, row) == [1, 5, 10, 11]
    assert have(book, row, num_accepted_tokens=1, num_output_tokens=3, num_computed_tokens=3)
    assert since(book, before) == (1, 4, 1, 2, [1, 0, 0, 0, 0])


def test_c1_a_batch(book: Book) -> None:
    rows = [book.admit("a", [1]), book.admit("b", [1])]
    step(book, rows, [5, 5], drafts=[[10, 20, 12], [10, 11, 12]])
    before = book.spec_decode_stats()
    step(book, rows, [[10, 11, -1, -1], [10, 11, 12, 13]], d=[3, 3])  # flags 1 0 1 and 1 1 1
    assert since(book, before) == (2, 6, 4, 6, [2, 1, 1, 0, 0])
    assert [tokens(book, row)[2:] for row in rows] == [[10, 11], [10, 11, 12, 13]]


def test_c1_none_accepted_and_all_accepted(book: Book) -> None:
    rows = [book.admit("none", [1]), book.admit("all", [1])]
    step(book, rows, [5, 5], drafts=[[10] * 5, [10] * 5])
    before = book.spec_decode_stats()
    step(book, rows, [[11], [10, 10, 10, 10, 10, 11]], d=[5, 5])
    assert have(book, rows[0], num_accepted_tokens=0, num_computed_tokens=2)
    assert have(book, rows[1], num_accepted_tokens=5, num_computed_tokens=7)
    assert since(book, before) == (2, 10, 5, 7, [1, 1, 1, 1, 1])


# C2: lengths with and without the bonus token are mixed.


@pytest.mark.parametrize("k", [3])
def test_c2_mean_acceptance_length(make_book: MakeBook, k: int) -> None:
    book = make_book(fresh=True)
    row = book.admit("a", [1])
    step(book, [row], [5])
    accepted = [3, 0, 2, 1]  # told with the bonus or correction: 4, 1, 3, 2 ids
    for count in accepted:
        step(book, [row], [[7] * (count + 1)], d=[k])
        assert have(book, row, num_accepted_tokens=count)
    for stats in (book.spec_decode_stats(), book.spec_decode_stats(row)):
        assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 12, 6)
        assert stats.num_emitted_tokens == 10
        assert stats.num_accepted_tokens / stats.num_draft_tokens == 0.5
        assert stats.mean_acceptance_length == 1 + 6 / 4 == 2.5
        assert stats.acceptance_rate_per_pos == [3 / 4, 2 / 4, 1 / 4, 0.0, 0.0]
    assert have(book, row, num_output_tokens=11)


def test_c2_steps_without_drafts_are_no_rounds(make_book: MakeBook) -> None:
    book = make_book(fresh=True)
    row = book.admit("a", [1, 2, 3])
    step(book, [row], [99], scheduled=[2])  # a chunk
    step(book, [row], [5])
    step(book, [row], [[6, 7]])  # two ids, no drafts declared
    step(book, [row], [[-1, -1]], d=[1])  # drafts and no id at all
    assert book.spec_decode_stats().num_drafts == 0
    assert book.spec_decode_stats().mean_acceptance_length == 1.0
    assert tokens(book, row) == [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize(("given", "counted"), [([8, 9, 9], 3), ([8, 9, -1], 2), ([8, -1, 9], 1), ([-1, -1, -1], 0)])
def test_c2_padding_is_no_draft(book: Book, given: list[int], counted: int) -> None:
    row = book.admit("a", [1])
    step(book, [row], [5], drafts=[given])
    before = book.spec_decode_stats()
    step(book, [row], [[6]], d=[3])  # the engine runs all rows with the same width
    rounds, draft_tokens, *_ = since(book, before)
    assert (rounds, draft_tokens) == ((1, counted) if counted else (0, 0))


# C5: length is looked at before the stop in a step of several ids; counters include what was cut.


@pytest.mark.parametrize(
    ("ids", "finish_reason", "stop_reason", "kept"),
    [
        ([10, 11, 77, 20, 21, 22], FinishReason.STOP, 77, 3),
        ([10, 11, 12, 13, 14, 77], FinishReason.LENGTH, -1, 5),
        ([10, 11, 12, 13, 77, 22], FinishReason.STOP, 77, 5),  # both at once: the stop is first
        ([77, 10, 11, 12, 13, 14], FinishReason.STOP, 77, 1),
    ],
)
@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("cap", ["max_tokens", "max_model_len"])
@pytest.mark.parametrize("kind_of_stop", ["stop", "eos"])
def test_c5_the_first_end_in_a_step_counts(
    book: Book, ids: list[int], finish_reason: FinishReason, stop_reason: int, kept: int, drafts: int, cap: str,
    kind_of_stop: str,
) -> None:  # fmt: skip
    params = RequestParams(
        max_tokens=5 if cap == "max_tokens" else None,
        stop_token_ids=[77] if kind_of_stop == "stop" else (),
        eos_token_id=77 if kind_of_stop == "eos" else None,
    )
    prompt = [1] * (11 if cap == "max_model_len" else 3)
    before, rounds_before = book.stats(), book.spec_decode_stats()
    row, below = book.admit("a", prompt, params, num_computed_tokens=len(prompt) - 1), book.admit("b", [2])
    step(book, [row], [ids], d=[drafts])
    assert have(
        book, row, finish_reason=finish_reason, stop_reason=stop_reason, num_output_tokens=kept,
        num_tokens=len(prompt) + kept, num_tokens_no_spec=len(prompt) + kept, last_token_id=ids[kept - 1],
        num_computed_tokens=len(prompt) - 1 + kept, num_accepted_tokens=drafts,
    )  # fmt: skip
    assert tokens(book, row) == prompt + ids[:kept]
    assert tokens(book, below) == [2]
    assert delivered(book) == {"a": Delivered(ids[:kept], finish_reason, None if stop_reason == -1 else stop_reason, 1)}
    growth = {"admitted_requests": 2, "submitted_tokens": 6, "committed_tokens": kept, "dropped_after_finish": 6 - kept}
    assert grown(book, before) == growth | {f"finished_{finish_reason.name}": 1}
    # What verification accepted stays what it was; what was kept of it is told apart.
    expected = (1, 5, 5, kept, [1] * 5) if drafts else (0, 0, 0, 0, [0] * 5)
    assert since(book, rounds_before) == expected


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4])
def test_c5_a_stop_inside_min_tokens_is_a_token(book: Book, min_tokens: int) -> None:
    row = book.admit("a", [1], RequestParams(stop_token_ids=[77], min_tokens=min_tokens))
    step(book, [row], [[10, 77, 77, 11, 77]])
    kept = {0: 2, 1: 2, 2: 3, 3: 5, 4: 5}[min_tokens]
    assert tokens(book, row) == [1, *[10, 77, 77, 11, 77][:kept]]
    assert have(book, row, finish_reason=FinishReason.STOP, stop_reason=77, num_output_tokens=kept)


# C6 and C7: offsets are computed after discarded rows are dropped; ids behind a stop are cut, and their logprobs.


@pytest.mark.parametrize(("verified", "kept"), [([10, 11, 12], [10, 11, 12]), ([10, 13, -1], [10, 13])])
def test_c6_a_discarded_row_takes_nothing_from_the_others(book: Book, verified: list[int], kept: list[int]) -> None:
    discarded, several, one = book.admit("r0", [1] * 9), book.admit("r1", [2]), book.admit("r2", [3])
    step(book, [several, one], [5, 5], drafts=[[10, 11], [-1, -1]])
    book.poll_outputs()
    number = step(
        book, [discarded, several, one], [[99, 98, 97], verified, [20, -1, -1]], scheduled=[4, 3, 1], d=[0, 2, 0]
    )
    (outputs,) = book.poll_outputs()
    assert outputs.step == number
    assert outputs.request_ids == ["r1", "r2"]
    assert outputs.offsets.tolist() == [0, len(kept), len(kept) + 1]
    assert outputs.token_ids.tolist() == [*kept, 20]
    assert have(book, discarded, num_computed_tokens=4, num_output_tokens=0)


def test_c7_ids_behind_a_stop_are_cut_everywhere(book: Book) -> None:
    row = book.admit("a", [1], RequestParams(eos_token_id=77))
    step(book, [row], [[5, 77, 9]])
    (outputs,) = book.poll_outputs()
    assert outputs.token_ids.tolist() == [5, 77]
    assert outputs.offsets.tolist() == [0, 2]
    assert book.output_token_ids(row).tolist() == [5, 77]
    assert tables(book)[1][row.index].sum() == 3


@pytest.mark.parametrize(("verified", "kept"), [([10, 11, 12], [10, 11, 12]), ([10, 13, -1], [10, 13])])
def test_c6_logprobs_go_with_their_ids(make_book: MakeBook, verified: list[int], kept: list[int]) -> None:
    book = make_book(max_logprobs=1)
    discarded, several, one = (
        book.admit(name, prompt, RequestParams(logprobs=1))
        for name, prompt in (("r0", [1] * 9), ("r1", [2]), ("r2", [3]))
    )
    ids = np.array([5, 5], np.int32)
    step(book, [several, one], ids, drafts=[[10, 11], [-1, -1]], logprobs=logprobs_of(ids, [[0, -9], [0, -9]]))
    book.poll_outputs()
    ids = np.array([[99, 98, 97], verified, [20, -1, -1]], np.int32)
    values = [[[-7, -7]] * 3, [[-1, -1.5], [-2, -2.5], [-3, -3.5]], [[-4, -4.5], [-7, -7], [-7, -7]]]
    given = logprobs_of(ids, values, ranks=[[7, 7, 7], [1, 2, 3], [4, 7, 7]])
    step(book, [discarded, several, one], ids, scheduled=[4, 3, 1], d=[0, 2, 0], logprobs=given)
    (outputs,) = book.poll_outputs()
    assert outputs.request_ids == ["r1", "r2"]
    assert outputs.token_ids.tolist() == [*kept, 20]
    logprobs = outputs.logprobs
    assert logprobs is not None
    assert logprobs.num_logprobs.tolist() == [1, 1]
    assert logprobs.ranks.tolist() == [*[1, 2, 3][: len(kept)], 4]
    assert logprobs.values_offsets.tolist() == [0, 2 * len(kept), 2 * len(kept) + 2]
    assert logprobs.token_ids.reshape(-1, 2)[:, 0].tolist() == [*kept, 20]
    assert logprobs.logprobs.reshape(-1, 2).tolist() == [*values[1][: len(kept)], [-4, -4.5]]
    assert logprobs.cumulative.tolist() == [-sum([1, 2, 3][: len(kept)]), -4]
    assert logprobs.of(1) == [[(20, -4, 4), (21, -4.5, 1)]]
    # What the partial prefill sampled is nowhere.
    book.release(discarded)
    step(book, [], [])
    assert delivered_logprobs(book)["r0"] == ([], 0.0, False)


def test_c7_logprobs_behind_a_stop_are_cut_with_their_ids(make_book: MakeBook) -> None:
    book = make_book(max_logprobs=0)
    row = book.admit("a", [1], RequestParams(eos_token_id=77, logprobs=0))
    ids = np.array([[5, 77, 9]], np.int32)
    step(book, [row], ids, logprobs=logprobs_of(ids, [[-0.1, -0.2, -9.0]], ranks=[[1, 2, 3]]))
    (outputs,) = book.poll_outputs()
    assert outputs.token_ids.tolist() == [5, 77]
    (request,) = outputs
    assert request.logprobs is not None
    assert [[(token_id, rank) for token_id, _, rank in one] for one in request.logprobs] == [[(5, 1)], [(77, 2)]]
    np.testing.assert_array_equal(outputs.logprobs.logprobs, np.array([-0.1, -0.2], np.float32))
    assert request.cumulative_logprob == pytest.approx(-0.3)
    assert not outputs.logprobs.has_nan.any()


# C9: drafts exceed the room that is left.


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("num_tokens", [5, 8, 9, 10])
def test_c9_drafts_end_at_max_model_len(make_book: MakeBook, k: int, num_tokens: int) -> None:
    book = make_book(max_model_len=10)
    row, below = book.admit("a", [1] * (num_tokens - 1)), book.admit("b", [2])
    drafts = list(range(50, 50 + k))
    step(book, [row, below], [7, 7], drafts=[drafts, drafts])
    room = 10 - num_tokens
    assert tokens(book, row) == [1] * (num_tokens - 1) + [7] + drafts[:room]
    assert have(book, row, num_tokens=num_tokens + min(k, room), num_tokens_no_spec=num_tokens)
    assert tokens(book, below) == [2, 7, *drafts]
    # The end of the row's memory, behind max_model_len, is nobody's.
    assert not book._layout.token_ids.view(book._segment.readable())[:, 10:].any()


def test_c9_a_draft_without_room_still_counts_as_given(make_book: MakeBook) -> None:
    book = make_book(max_model_len=10)
    row = book.admit("a", [1] * 8)
    step(book, [row], [7], drafts=[[50, 51, 52]])  # 9 tokens: room for one
    assert have(book, row, num_tokens=10)
    before = book.spec_decode_stats()
    step(book, [row], [[50, 51]], d=[3])
    assert have(book, row, num_tokens=10, finish_reason=FinishReason.LENGTH)
    assert since(book, before) == (1, 3, 1, 1, [1, 0, 0, 0, 0])


def test_c9_a_full_row_gets_no_drafts(make_book: MakeBook) -> None:
    book = make_book(max_model_len=10)
    row, below = book.admit("a", [1] * 10), book.admit("b", [2])
    step(book, [row], [7], drafts=[[50, 51]])
    assert tokens(book, row) == [1] * 10
    assert tokens(book, below) == [2]
    step(book, [below], np.array([5], np.int64), drafts=[[50]])
    assert tokens(book, below) == [2, 5, 50]
