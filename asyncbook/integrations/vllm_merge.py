"""Puts the outputs of a step together that vLLM made for some of its rows and the columns for the others."""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any, TypeVar

from vllm.v1.engine import EngineCoreOutputs  # type: ignore[import-not-found]

Output = TypeVar("Output")


def merge_outputs(
    outputs: dict[int, Any], plain: list[Any], others: list[int], names: list[str], clients: list[int] | None
) -> dict[int, Any]:
    """What vLLM's `update_from_output` returns for the whole step, by client.

    `outputs`: what it returned for the rows `others`, by their place in the step. `plain`: one output for each of the
    other rows, in order, and `clients` whose they are; None: client 0's. `names`: of all rows.
    """
    stats = None
    for batch in outputs.values():
        if batch.scheduler_stats is not None:  # one has them: the first that had something to say
            stats, batch.scheduler_stats = batch.scheduler_stats, None
    merged: dict[int, list[Any]] = {}
    if clients is None and outputs.keys() <= {0}:
        made = [output for batch in outputs.values() for output in batch.outputs]
        merged[0] = _in_order([(output.request_id, output) for output in made], plain, others, names)
    else:
        made = [(client, output) for client, batch in outputs.items() for output in batch.outputs]
        mine = list(zip(repeat(0) if clients is None else clients, plain, strict=False))
        named = [(output.request_id, (client, output)) for client, output in made]
        for client, output in _in_order(named, mine, others, names):
            merged.setdefault(client, []).append(output)
    result = {}
    for client, its_outputs in merged.items():
        batch = outputs.get(client)
        if batch is None:
            batch = EngineCoreOutputs()
        batch.outputs = its_outputs
        result[client] = batch
    for client, batch in outputs.items():
        if client not in result and batch.finished_requests is not None:
            result[client] = batch
    if stats is not None:
        first = next(iter(result.values()), None)
        assert first is not None
        first.scheduler_stats = stats
    return result


def _in_order(made: list[tuple[str, Output]], plain: list[Output], others: list[int], names: list[str]) -> list[Output]:
    """All outputs by the order of the rows. `made`: by name, those of no row of the step come last."""
    of_name: dict[str, list[Output]] = {}
    for name, output in made:
        of_name.setdefault(name, []).append(output)
    ordered: list[Output] = []
    taken = 0
    for number, place in enumerate(others):
        until = place - number  # so many plain rows stand before it
        ordered += plain[taken:until]
        taken = until
        if names[place] in of_name:
            ordered.append(of_name[names[place]].pop(0))
    ordered += plain[taken:]
    return [*ordered, *chain.from_iterable(of_name.values())]
