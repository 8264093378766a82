"""The demo as a user runs it, on the random model: three ways to the same books, and what it leaves behind."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("click")
pytest.importorskip("rich")
pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

from click.testing import CliRunner  # noqa: E402
from rich.console import Console  # noqa: E402

from asyncbook import BookConfig, FinishReason, RequestParams  # noqa: E402
from asyncbook.demo import live, results, weights  # noqa: E402
from asyncbook.demo.bookkeeping import open_way  # noqa: E402
from asyncbook.demo.command import demo_command  # noqa: E402
from asyncbook.demo.engine import NUM_SPEC_TOKENS, Engine  # noqa: E402
from asyncbook.demo.loop import LoopBook  # noqa: E402
from asyncbook.demo.runner import Request, Runner  # noqa: E402

CHUNK = 16


@pytest.fixture(autouse=True)
def _restore_threads():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def requests(tokenizer, count: int = 11) -> list[Request]:
    """Prompts of one chunk and of several; ends by length, by the end-of-sequence id and by a user's stop id."""
    made = []
    for number in range(count):
        prompt = "abc " * (1 + number * 3 % 13)
        params = RequestParams(
            max_tokens=5 + 7 * (number % 5),
            min_tokens=number % 3,
            eos_token_id=tokenizer.eos_token_id,
            stop_token_ids=range(40 * (number % 2), 0, -1),
        )
        made.append(Request(f"r{number}", prompt, tokenizer.encode_chat(prompt), params))
    return made


def run(way: str) -> results.Result:
    model, tokenizer = weights.load("random", torch.device("cpu"))
    config = BookConfig(
        max_num_reqs=3, max_model_len=100, vocab_size=tokenizer.vocab_size, num_spec_tokens=NUM_SPEC_TOKENS
    )
    with open_way(way, config) as book:
        runner = Runner(book, Engine(model, 3, config.max_model_len, CHUNK), requests(tokenizer))
        runner.run()
        return results.collect(way, runner, book.spec_decode_stats(), tokenizer, 1.0)


@pytest.fixture(scope="module")
def loop() -> results.Result:
    return run("loop")


def test_the_loop_does_something_worth_comparing(loop):
    reasons = {answer.finish_reason for answer in loop.answers.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert loop.acceptance.num_accepted_tokens > 0
    assert results.own_differences(loop) == []
    for request in requests(weights.load("random", torch.device("cpu"))[1]):
        assert 0 < len(loop.answers[request.request_id].token_ids) <= request.params.max_tokens
    assert loop.columns[:, results.COLUMNS.index("generation")].max() > 1  # rows were reused


@pytest.mark.parametrize("way", ["embedded", "sidecar"])
def test_a_book_does_what_the_loop_does(loop, way):
    result = run(way)
    assert results.differences(loop, result) == []
    assert results.own_differences(result) == []
    assert [span.step for span in result.timeline.bookkeeper] == list(range(1, len(result.columns) + 1))


def test_differences_are_told(loop):
    other = run("loop")
    answer = other.answers["r4"]
    answer.token_ids[2] += 1
    other.columns[3, results.COLUMNS.index("num_tokens"), 1] += 5
    told = "\n".join(results.differences(loop, other))
    assert "request r4: token 2 is" in told
    assert "frame of step 4: num_tokens[1] is" in told
    assert "r4" in results.own_differences(other)[0]


def test_display_shows_texts_while_they_grow(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # one that can be written over
    monkeypatch.setattr(live, "REFRESH_S", 0.0)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, height=30)
    model, tokenizer = weights.load("random", torch.device("cpu"))
    asked = requests(tokenizer)
    config = BookConfig(max_num_reqs=3, max_model_len=100, vocab_size=260, num_spec_tokens=NUM_SPEC_TOKENS)
    with open_way("loop", config) as book, live.Display(console, tokenizer, ["loop"], live=True) as display:
        display.begin("loop", len(asked))
        Runner(book, Engine(model, 3, 100, CHUNK), asked).run(display.after_step)
        display.end(1, 1)
    shown = screen.getvalue()
    assert all(request.prompt.split()[0] in shown for request in asked)
    first = tokenizer.decode(asked[0].token_ids[:2]).strip()
    assert first in shown
    assert "11/11" in shown


def invoke(*options: str):
    return CliRunner().invoke(demo_command, ["--model", "random", "--rows", "4", "--max-tokens", "12", *options])


def test_command(tmp_path):
    result = invoke("--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    for expected in ("identical: loop, embedded, sidecar", "mean acceptance length", "demo.png", "demo-trace.json"):
        assert expected in result.output
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    check_trace(json.loads((tmp_path / "out" / "demo-trace.json").read_text()))


def check_trace(trace: dict) -> None:
    """Three processes; in each a runner launches and submits every step, and a bookkeeper applies it later."""
    events = trace["traceEvents"]
    ways = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(ways.values()) == ["loop", "embedded", "sidecar"]
    for pid in ways:
        lanes = {
            event["args"]["name"]: event["tid"]
            for event in events
            if event["name"] == "thread_name" and event["pid"] == pid
        }
        assert set(lanes) == {"runner", "bookkeeper"}
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == pid]
        assert all(span["dur"] >= 0 for span in spans)
        starts = {
            name: {
                span["args"]["step"]: span["ts"] for span in spans if (span["name"], span["tid"]) == (name, lanes[lane])
            }
            for name, lane in (("forward", "runner"), ("submit", "runner"), ("apply", "bookkeeper"))
        }
        steps = range(1, 1 + len(starts["forward"]))
        assert list(starts["submit"]) == list(starts["apply"]) == list(steps)
        assert all(starts["forward"][step] < starts["submit"][step] < starts["apply"][step] for step in steps)
        assert sum(event["ph"] == "s" and event["pid"] == pid for event in events) == len(steps)


def test_a_wrong_book_is_found_out(tmp_path, monkeypatch):
    append = LoopBook._append

    def forgetful(self, index, ids, tenant):
        return append(self, index, ids[:2], tenant)

    monkeypatch.setattr(LoopBook, "_append", forgetful)
    result = invoke("--out", str(tmp_path), "--ways", "embedded,loop")
    assert result.exit_code == 1
    assert "NOT identical" in result.output
    assert "loop against embedded, request request-" in result.output
    assert (tmp_path / "demo.png").exists()


def test_prompts_of_others(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": "two", "max_tokens": 3}\n')
    result = invoke("--out", str(tmp_path), "--prompts", str(path), "--ways", "loop,embedded", "--no-live")
    assert result.exit_code == 0, result.output
    assert "2 outputs" in result.output
    path.write_text('{"prompt": "one", "max_tokens": 0}\n')
    result = invoke("--out", str(tmp_path), "--prompts", str(path))
    assert result.exit_code == 1
    assert "max_tokens" in result.output


@pytest.mark.parametrize(
    "option", [("--ways", "loop,loop"), ("--ways", "abacus"), ("--device", "abacus"), ("--device", "cuda:99")]
)
def test_what_cannot_be_is_said(tmp_path, option):
    result = invoke("--out", str(tmp_path), *option)
    assert result.exit_code in (1, 2)
    assert option[1] in result.output
    assert "Traceback" not in result.output


def test_per_step_cost_counts_every_call_once(loop):
    spans = [span for span in loop.timeline.runner if span.name not in ("forward", "wait")]
    assert np.isclose(loop.cost_us.sum() * 1000, sum(span.end_ns - span.start_ns for span in spans))
    assert len(loop.cost_us) == len(loop.columns)
