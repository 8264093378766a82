"""The logprobs that a benchmark's sampler brings along, made before the clock runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncbook import Logprobs

NUM_VALUES = 8  # steps with values of their own, which then come again: ids alone differ in every step
MAX_RANK = 8  # of the sampled id: often among the top 5, not always


@dataclass(frozen=True)
class GivenLogprobs:
    """`token_ids` int32 [steps, rows, width, 1 + k]: first the sampled id, then the top k. `values` float32, the same
    for `NUM_VALUES` steps; `ranks` int32 [NUM_VALUES, rows, width]."""

    token_ids: np.ndarray
    values: np.ndarray
    ranks: np.ndarray

    def of_step(self, step: int) -> Logprobs:
        """What the sampler hands over with the step."""
        at = step % NUM_VALUES
        return Logprobs(self.token_ids[step], self.values[at], self.ranks[at])

    def of_outputs(
        self, steps: np.ndarray, rows: np.ndarray, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids and values [n, 1 + k], ranks [n] of the ids that stand at these places of their rows and steps."""
        at = steps % NUM_VALUES
        return self.token_ids[steps, rows, places], self.values[at, rows, places], self.ranks[at, rows, places]


def draw_logprobs(sampled: np.ndarray, k: int, rng: np.random.Generator) -> GivenLogprobs:
    """For ids [steps, rows, width]. An id of rank r <= k stands at place r of the top as well, as a sampler has it."""
    num_steps, *shape = sampled.shape
    top_values = -np.cumsum(rng.exponential(1.0, (NUM_VALUES, *shape, k)), axis=-1)
    ranks = rng.integers(1, MAX_RANK + 1, (NUM_VALUES, *shape), np.int32)
    places = np.minimum(ranks, k)[..., None] - 1
    is_below = (ranks > k)[..., None]
    own_values = np.take_along_axis(top_values, places, axis=-1) - is_below
    values = np.concatenate([own_values, top_values], axis=-1).astype(np.float32)
    token_ids = np.empty((num_steps, *shape, 1 + k), np.int32)
    token_ids[..., 0] = sampled
    top_ids = rng.integers(0, 1 << 15, (NUM_VALUES, *shape, k), np.int32)
    for step in range(num_steps):
        at = step % NUM_VALUES
        token_ids[step, ..., 1:] = top_ids[at]
        own = np.where(is_below[at], np.take_along_axis(top_ids[at], places[at], axis=-1), sampled[step, ..., None])
        np.put_along_axis(token_ids[step, ..., 1:], places[at], own, axis=-1)
    return GivenLogprobs(token_ids, values, ranks)
