"""vLLM with the plugin against stock vLLM: the same requests, and after every step everything that can be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncbook.integrations import vllm as plugin
from tests.vllm.conftest import MakeEngine
from tests.vllm.scenarios import SCENARIOS, Scenario
from tests.vllm.watch import Run, count_fields, difference, run_requests, scheduler_of

PARTS = ("steps", "runner_steps", "results")
compared = {"requests": 0, "steps": 0, "fields": 0}


@pytest.fixture(scope="module", autouse=True)
def _print_what_was_compared() -> Iterator[None]:
    yield
    print("\ncompared with stock vLLM:", ", ".join(f"{count:,} {name}" for name, count in compared.items()))


def run(llm: Any, scenario: Scenario, read: Callable[[], None] = lambda: None) -> Run:
    """The scenario's requests; `read` looks at something else after each step. Nothing is cached of earlier ones."""
    assert llm.reset_prefix_cache()

    def after_step(engine: Any, step: int) -> None:
        read()
        scenario.after_step(engine, step)

    return run_requests(llm, scenario.requests(llm.get_tokenizer()), after_step, scenario.at_once)


def check_equal(stock: Run, mine: Run) -> None:
    """Every field of every step, and of every result."""
    for part in PARTS:
        assert difference(getattr(stock, part), getattr(mine, part), part) is None
    compared["requests"] += len(stock.results)
    compared["steps"] += len(stock.steps)
    compared["fields"] += sum(count_fields(getattr(stock, part)) for part in PARTS)


def run_both(
    make_engine: MakeEngine, scenario: Scenario, mode: str = "embedded", reader_of: Callable[[Any], Any] | None = None
) -> tuple[Run, Run, Any]:
    """The scenario on both; the engine with the plugin as well, which a reader looks at after each step."""
    stock = run(make_engine(scenario.engine, "stock"), scenario)
    llm = make_engine(scenario.engine, mode)
    plugin.switch_on()
    try:
        mine = run(llm, scenario) if reader_of is None else run(llm, scenario, reader_of(llm).read)
    finally:
        plugin.switch_off()
    return stock, mine, llm


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_field_is_equal(make_engine: MakeEngine, name: str) -> None:
    scenario = SCENARIOS[name]
    stock, mine, llm = run_both(make_engine, scenario)
    check_equal(stock, mine)
    assert type(scheduler_of(llm)).__module__.startswith("asyncbook.")
    # It is the scenario that its name says.
    if "preemption" in name:
        assert stock.num_preemptions > 0
    if "drafts" in name:
        assert acceptance(stock)["num_accepted_tokens"] > 0
        assert acceptance(stock) == acceptance(mine)


def acceptance(run: Run) -> dict[str, Any]:
    """The draft rounds of a run, as vLLM's scheduler reported them."""
    total: dict[str, Any] = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    for step in run.steps:
        for outputs in step["outputs"].values():
            stats = (outputs["scheduler_stats"] or {}).get("spec_decoding_stats")
            for name in total if stats else ():
                total[name] += stats[name]
    return total


def test_most_rows_do_not_take_the_slow_way(make_engine: MakeEngine) -> None:
    """Equality alone would hold as well if every step were left to vLLM."""
    llm = make_engine("plain", "embedded")
    columns = scheduler_of(llm)
    done, slow = 0, 0
    grow, look_at = columns._grow, columns._look_at

    def counted_grow(*arguments: Any) -> Any:
        nonlocal done
        outputs = grow(*arguments)
        done += len(outputs)
        return outputs

    def counted_look_at(names: dict[str, int]) -> None:
        nonlocal slow
        slow += len(names)
        look_at(names)

    columns._grow, columns._look_at = counted_grow, counted_look_at
    run(llm, SCENARIOS["greedy"])
    del columns._grow, columns._look_at
    assert done > 3 * slow  # two steps in 32 fill a block or begin one; the first and the last are slow as well
