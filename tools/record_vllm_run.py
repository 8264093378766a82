"""Records a run of real vLLM with n-gram drafts, step by step, with the acceptance statistics that vLLM reports for it.

    python tools/record_vllm_run.py MODEL tests/data/vllm_spec_decode_run.json

MODEL is a checkpoint folder (SmolLM2-135M-Instruct for the file in the repository). It needs an environment with vLLM,
whose CPU build is enough, and nothing of asyncbook. `tests/cases/test_vllm_statistics.py` replays the file on every
kind of book. KV space is small and the budget of a step as well, so that prompts come in chunks and requests are
preempted and taken up again.

The file: `run` says what ran; `requests` in the order of their numbers, which all else uses; one entry a step:
`new` [request, num_computed_tokens], `resumed` likewise, `preempted` requests, `scheduled` [request, tokens] in the
order of the batch, `drafts` {request: ids}, `sampled` ids by the order of `scheduled`, `reported` (drafts, draft
tokens, accepted, accepted per position: vLLM's own of this step); `results` by request; `report`, vLLM's totals.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_SPEC_TOKENS = 5
ENGINE: dict[str, Any] = {
    "max_model_len": 192,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 96,
    "block_size": 32,
    "num_gpu_blocks_override": 24,
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "dtype": "float32",
    "seed": 0,
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": NUM_SPEC_TOKENS,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
    },
}
PROMPTS = (
    "Repeat after me: one two three four, one two three four, one two three four, one two",
    "The cat sat on the mat. The cat sat on the mat. The cat sat on the mat. The cat",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "List the days of the week, and then list the days of the week once more.",
    "What is the capital of Iceland, and what is it known for?",
    "A B C D E F G A B C D E F G A B C D E F G A B",
    "Write the word hello ten times.",
    "Name the planets of the solar system in order, one per line.",
)
LONG = "In the beginning the committee wrote down what had been agreed upon at the last meeting of the committee. "
# Of each request: its max_tokens, and what else its sampling takes. The stop ids are ". ", "," and a newline.
VARIANTS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 60},
    {"max_tokens": 25, "ignore_eos": True},
    {"max_tokens": 90, "stop_token_ids": [30, 28]},
    {"max_tokens": 400, "ignore_eos": True},  # ends at max_model_len
    {"max_tokens": 7},
    {"max_tokens": 48, "stop_token_ids": [198], "min_tokens": 9},
)


def record_steps(scheduler: Any, numbers: dict[str, int]) -> list[dict[str, Any]]:
    """The list that fills as the scheduler takes in what each step sampled."""
    steps: list[dict[str, Any]] = []
    preempted: list[str] = []
    update_from_output, preempt = scheduler.update_from_output, scheduler._preempt_request

    def preempt_request(request: Any, *arguments: Any, **named: Any) -> None:
        preempt(request, *arguments, **named)
        preempted.append(request.request_id)

    def update(scheduled: Any, sampled: Any) -> Any:
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = scheduled.scheduled_spec_decode_tokens
        step = {
            "new": [[numbers[new.req_id], new.num_computed_tokens] for new in scheduled.scheduled_new_reqs],
            "resumed": [[numbers[name], computed[name]] for name in cached.req_ids if name in cached.resumed_req_ids],
            "preempted": [numbers[name] for name in preempted],
            "scheduled": [[numbers[name], count] for name, count in scheduled.num_scheduled_tokens.items()],
            "drafts": {numbers[name]: list(map(int, ids)) for name, ids in drafts.items()},
            "sampled": [
                list(sampled.sampled_token_ids[sampled.req_id_to_index[name]])
                for name in scheduled.num_scheduled_tokens
            ],
        }
        preempted.clear()
        outputs = update_from_output(scheduled, sampled)
        stats = [output.scheduler_stats for output in outputs.values() if output.scheduler_stats is not None]
        if stats and (spec := stats[0].spec_decoding_stats) is not None:
            step["reported"] = [spec.num_drafts, spec.num_draft_tokens, spec.num_accepted_tokens]
            step["reported"] += [spec.num_accepted_tokens_per_pos]
        if step["scheduled"]:
            steps.append(step)
        return outputs

    scheduler.update_from_output, scheduler._preempt_request = update, preempt_request
    return steps


def catch_log(logged: list[str]) -> Callable[..., None]:
    """What `SpecDecodingLogging.log` prints, into a list."""
    return lambda form, *values: logged.append(form % values)


def report(llm: Any, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """vLLM's totals: its Prometheus counters, and the line that it logs, made from the steps' own statistics."""
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingStats  # type: ignore[import-not-found]

    counters: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_"):
            counters[metric.name.removeprefix("vllm:spec_decode_")] = getattr(metric, "values", None) or metric.value
    logging, logged = SpecDecodingLogging(), []
    for step in steps:
        if "reported" in step:
            drafts, draft_tokens, accepted, per_pos = step["reported"]
            logging.observe(SpecDecodingStats(NUM_SPEC_TOKENS, drafts, draft_tokens, accepted, per_pos))
    logging.log(catch_log(logged))
    length = logged[0].split("Mean acceptance length: ")[1].split(",")[0]
    rates = logged[0].split("Per-position acceptance rate: ")[1].split(", Avg")[0].split(", ")
    return {**counters, "logged_mean_acceptance_length": length, "logged_acceptance_rate_per_pos": rates}


def dump(recording: dict[str, Any]) -> str:
    """JSON with a request, a step or a result a line."""
    parts = []
    for name, value in recording.items():
        if isinstance(value, list):
            lines = ",\n".join(json.dumps(item, separators=(",", ":")) for item in value)
            parts.append(f'"{name}": [\n{lines}\n]')
        else:
            parts.append(f'"{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    model, path = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, disable_log_stats=False, **ENGINE)
    tokenizer = llm.get_tokenizer()
    prompts = [prompt if number % 5 else LONG * 5 + prompt for number, prompt in enumerate(PROMPTS * 4)]
    variants = [VARIANTS[number % len(VARIANTS)] for number in range(len(prompts))]
    ids = [tokenizer.encode(prompt)[:150] for prompt in prompts]
    engine = llm.llm_engine
    numbers: dict[str, int] = {}
    steps = record_steps(engine.engine_core.engine_core.scheduler, numbers)
    requests = []
    for number, (prompt, variant) in enumerate(zip(ids, variants, strict=True)):
        params = SamplingParams(temperature=0.0, detokenize=False, **variant)
        engine.add_request(f"request-{number}", {"prompt_token_ids": prompt}, params)
        requests.append({"prompt": prompt, **variant})
    core = engine.engine_core.engine_core.scheduler
    numbers |= {name: int(name.split("-")[1]) for name in core.requests}
    eos = {request.sampling_params.eos_token_id for request in core.requests.values()} - {None}
    results: list[Any] = [None] * len(requests)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                completion = output.outputs[0]
                results[int(output.request_id.split("-")[1])] = {
                    "outputs": list(completion.token_ids),
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                }
    run = {
        "vllm": vllm.__version__,
        "model": "SmolLM2-135M-Instruct",
        "command": "python tools/record_vllm_run.py MODEL tests/data/vllm_spec_decode_run.json",
        "engine": ENGINE,
        "vocab_size": llm.llm_engine.model_config.get_vocab_size(),
        "eos_token_id": eos.pop(),
    }
    recording = {"run": run, "requests": requests, "steps": steps, "results": results, "report": report(llm, steps)}
    Path(path).write_text(dump(recording))
    print(f"{len(steps)} steps of {len(requests)} requests: {recording['report']}")


if __name__ == "__main__":
    main()
