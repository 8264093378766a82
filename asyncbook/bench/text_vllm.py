"""vLLM's `OutputProcessor.process_outputs` as an arm of `asyncbook bench text`. Written against vLLM 0.32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncbook.bench.text import Costs, Stopwatch


class VllmArm:
    """Requests in an `OutputProcessor` without an engine. What an engine hands over is made before the clock runs."""

    def __init__(self, tokenizer: Path, prompts: Sequence[list[int]], stop: Sequence[str]) -> None:
        from transformers import PreTrainedTokenizerFast
        from vllm.sampling_params import RequestOutputKind, SamplingParams  # type: ignore[import-not-found]
        from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest  # type: ignore[import-not-found]
        from vllm.v1.engine.output_processor import OutputProcessor  # type: ignore[import-not-found]

        tokenizer_of_transformers: Any = PreTrainedTokenizerFast
        self._output: Any = EngineCoreOutput
        self._processor: Any = OutputProcessor(
            tokenizer_of_transformers(tokenizer_file=str(tokenizer)), log_stats=False
        )
        for row, prompt in enumerate(prompts):
            request = EngineCoreRequest(
                request_id=str(row),
                external_req_id=str(row),
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=SamplingParams(
                    stop=list(stop), max_tokens=1 << 20, output_kind=RequestOutputKind.DELTA
                ),
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
            self._processor.add_request(request, None)
        self.texts = [""] * len(prompts)
        self.stopped_by: list[str | None] = [None] * len(prompts)

    def step(self, ids: np.ndarray, costs: Costs) -> None:
        """One id a row. Rows that have stopped are passed over by vLLM."""
        outputs = [
            self._output(request_id=str(row), new_token_ids=[token_id]) for row, token_id in enumerate(ids.tolist())
        ]
        with Stopwatch(costs):
            processed = self._processor.process_outputs(outputs)
        for request in processed.request_outputs:
            row = int(request.request_id)
            self.texts[row] += request.outputs[0].text
            if request.finished:
                self.stopped_by[row] = request.outputs[0].stop_reason
