"""The workloads with text and logprobs: what they bring, and that an arm which makes something else of it is found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")
from click.testing import CliRunner
from tokenizers import Tokenizer

from asyncbook.__main__ import main
from asyncbook.bench import arms, per_row_outputs
from asyncbook.bench.arms import ARMS, ArmsDiffer, BookArm, LoopArm
from asyncbook.bench.delivered import Delivered, Delivery, without_begun
from asyncbook.bench.pacing import Pace, measure
from asyncbook.bench.per_row_loop import PerRowLoop
from asyncbook.bench.per_row_outputs import BatchedLogprobs, LogprobColumns, PerRowLogprobs, PerRowText
from asyncbook.bench.story import LAST_WORDS, STOP, Story
from asyncbook.bench.workloads import EOS_TOKEN_ID, WORKLOADS, Steps, make_steps
from asyncbook.demo import CannotRun, smollm2
from tests.unit.text_oracle import byte_level, metaspace

TINY = ("bench", "critical-path", "--rows", "3", "--interval-ms", "0.5", "--steps", "6", "--arms", "loop,embedded")


def story_of(tokenizer: Tokenizer, folder: Path) -> Story:
    tokenizer.save(str(folder / "tokenizer.json"))
    return Story.of(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return story_of(byte_level(), tmp_path_factory.mktemp("story"))


def run_tiny(workload: str, story: Story | None, num_steps: int = 10, **openers: Any) -> None:
    pace = Pace(0.1, num_steps, round_steps=num_steps)
    measure(WORKLOADS[workload], 40, pace, openers or {name: ARMS[name] for name in ("loop", "embedded")}, story=story)


def test_a_story_is_told_by_every_row(story: Story) -> None:
    """Accepted ids of each row are natural language, and a tenth of the rows meets the last words."""
    steps = make_steps(WORKLOADS["everything"], 200, 40, story=story)
    texts = [byte_level().decode(row[row >= 0].tolist()) for row in np.moveaxis(steps.sampled, 1, 0)]
    assert 0 < sum(LAST_WORDS in text for text in texts) < 60
    plain = make_steps(WORKLOADS["text"], 50, 60, story=story)
    texts = [byte_level().decode(row.tolist()) for row in plain.sampled[..., 0].T]
    assert len(set(texts)) > 40, "rows are at different places of it"
    assert all(STOP[0] not in text.replace(LAST_WORDS, "") and STOP[1] not in text for text in texts)


def test_logprobs_are_as_a_sampler_has_them() -> None:
    steps = make_steps(WORKLOADS["logprobs"], 50, 20)
    for step in range(20):
        ids, values, ranks = steps.logprobs_of(step)  # type: ignore[misc]
        assert np.array_equal(ids[..., 0], steps.sampled[step])
        assert (np.diff(values[..., 1:], axis=-1) <= 0).all(), "best first"
        for row in range(50):
            rank = ranks[row, 0]
            if rank <= 5:
                assert (ids[row, 0, rank], values[row, 0, rank]) == (ids[row, 0, 0], values[row, 0, 0])
            else:
                assert values[row, 0, 0] < values[row, 0, -1]
    assert (ranks <= 5).any()
    assert (ranks > 5).any()


@pytest.mark.parametrize("tokenizer", [byte_level, metaspace])
def test_texts_are_those_of_the_library(tokenizer: Callable[[], Tokenizer], tmp_path: Path) -> None:
    """The loop's text, which all arms are compared with, ends at the stop string, and else is all of the story."""
    steps = make_steps(WORKLOADS["text"], 60, 60, story=story_of(tokenizer(), tmp_path))
    arm, library, stopped = LoopArm(steps, PerRowLoop), tokenizer(), 0
    for step in range(60):
        arm.submit(step)
        arm.read(step)
    arm.settle()
    for row in range(60):
        before = library.decode(steps.prompt.tolist())
        text = library.decode([*steps.prompt.tolist(), *steps.sampled[:, row, 0].tolist()]).removeprefix(before)
        stopped += STOP[0] in text
        assert arm.finish_reason(row) == (STOP[0] in text)
        assert arm.text(row) == without_begun(text.partition(STOP[0])[0], () if STOP[0] in text else STOP)
    assert stopped > 0


def test_stop_strings_of_the_loop(story: Story) -> None:
    """Over the borders of ids, only from `min_tokens` on, the first by its last character; ids up to that one stay."""

    def loop(stop: tuple[str, ...], min_tokens: int = 0) -> PerRowText:
        return PerRowText(story.tokenizer, story.prompt(4), 1, stop, min_tokens)

    ids = byte_level().encode("stop hello", add_special_tokens=False).ids
    ends = [len(byte_level().decode(ids[: i + 1])) for i in range(len(ids))]
    at = next(i for i, end in enumerate(ends) if end >= len("stop hel"))
    for step in (1, len(ids)):
        text = loop(("lo", "p hel", "hello"))
        kept = [text.append(0, ids[start : start + step], start) for start in range(0, len(ids), step)]
        assert next(start * step + count for start, count in enumerate(kept) if count >= 0) == at + 1
    text = loop(("p hel",))
    assert text.append(0, ids, 0) == at + 1
    assert text.take(0, True) == "sto"
    assert loop(("sto",), min_tokens=len(ids)).append(0, ids, 0) == -1
    text = loop(("olleh",))
    assert text.append(0, ids, 0) == -1
    assert text.take(0, False) + text.undelivered(0) == "stop hello"


def test_what_may_become_a_stop_string() -> None:
    assert without_begun("a the en", ("the end.", "x")) == "a "
    assert without_begun("a the end", ("end.",)) == "a the "
    assert without_begun("abc", ("x",)) == "abc" == without_begun("abc", ())


def test_logprobs_behind_padding_are_passed_over(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether lists are made of them or not, the loop delivers the same."""
    monkeypatch.setattr(per_row_outputs, "MUCH_PADDING", 1)
    run_tiny("everything", story)


def test_requests_that_have_all_ended(story: Story) -> None:
    """Nothing is new then."""
    steps = make_steps(WORKLOADS["everything"], 2, 20, story=story)
    steps.sampled[9], steps.sampled[9, :, 0] = -1, EOS_TOKEN_ID
    assert steps.given is not None
    steps.given.token_ids[9, ..., 0] = steps.sampled[9]
    with ExitStack() as stack:
        chosen = {name: stack.enter_context(ARMS[name](steps)) for name in ("loop", "numpy (PR)", "embedded", "thread")}
        for name, arm in chosen.items():
            for step in range(20):
                arm.submit(step)
                arm.wait(step)
                arm.read(step)
            arms.settle(name, arm)
        arms.check_equal(chosen, 2)
        assert {arm.finish_reason(row) for arm in chosen.values() for row in range(2)} == {1}


def changed(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """What a method returns becomes something else."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: change(original(*arguments)))


def test_another_text_is_found(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, BookArm, "text", lambda text: text.replace("e", "a"))
    with pytest.raises(ArmsDiffer, match="embedded and loop differ in the text of row 0"):
        run_tiny("text", story)


def test_a_stop_string_that_is_overlooked_is_found(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, PerRowText, "_find_stop", lambda found: (-1, -1))
    with pytest.raises(ArmsDiffer, match="embedded delivered"):
        run_tiny("text", story, num_steps=40)


@pytest.mark.parametrize(("field", "change"), [("values", 0.25), ("ranks", 1), ("token_ids", 1)])
def test_other_logprobs_are_found(field: str, change: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In columns, and those of the loop, which are objects."""

    def other(columns: LogprobColumns) -> LogprobColumns:
        return columns._replace(**{field: getattr(columns, field) + np.array(change, getattr(columns, field).dtype)})

    changed(monkeypatch, BatchedLogprobs, "append", other)
    with pytest.raises(ArmsDiffer, match=rf"numpy \(PR\) delivered other {field} of logprobs"):
        run_tiny("logprobs", None, **{"numpy (PR)": ARMS["numpy (PR)"]})
    place = LogprobColumns._fields.index(field)

    def other_objects(entries: list[Any]) -> list[Any]:
        id_value_rank = [*entries[0][-1]]
        id_value_rank[place] += change
        return [[*entries[0][:-1], tuple(id_value_rank)], *entries[1:]]

    changed(monkeypatch, PerRowLogprobs, "append", other_objects)
    with pytest.raises(ArmsDiffer, match=f"loop delivered other {field} of logprobs"):
        run_tiny("logprobs", None)


def test_logprobs_that_are_missing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, PerRowLogprobs, "append", lambda entries: entries[1:])
    with pytest.raises(ArmsDiffer, match="loop delivered logprobs of 39 ids, expected 40"):
        run_tiny("logprobs", None)
    steps = make_steps(WORKLOADS["logprobs"], 2, 3)
    with pytest.raises(ArmsDiffer, match="did not deliver the logprobs"):
        Delivered(steps).add(Delivery([0, 1], [1, 1]))
    monkeypatch.undo()
    monkeypatch.setattr(Steps, "logprobs_of", lambda steps, step: None)
    with pytest.raises(ArmsDiffer, match="embedded delivered other token_ids of logprobs"):
        run_tiny("logprobs", None, embedded=ARMS["embedded"])


def test_another_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, LoopArm, "cumulative_logprob", lambda total: total + 1e-9)
    with pytest.raises(ArmsDiffer, match="embedded and loop differ in the cumulative logprob of row 0"):
        run_tiny("logprobs", None)


def test_sidecars_do_the_new_workloads(story: Story) -> None:
    result = CliRunner().invoke(
        main,
        [*TINY[:-2], "--workloads", "logprobs,text", "--tokenizer", str(story.tokenizer), "--arms",
         f"{arms.LOOP},{arms.ZMQ},{arms.RING}"],
        catch_exceptions=False,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.output.count("sidecar ring") == 2


def test_without_a_tokenizer_text_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise CannotRun("not there")

    monkeypatch.setattr(smollm2, "smollm2_path", missing)
    result = CliRunner().invoke(main, [*TINY, "--workloads", "plain,text"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "workloads with text are left out: text needs --tokenizer" in result.output
    assert "plain, 3 rows" in result.output
    result = CliRunner().invoke(main, [*TINY, "--workloads", "text"], catch_exceptions=False)
    assert result.exit_code == 1
    assert "--tokenizer" in result.output
