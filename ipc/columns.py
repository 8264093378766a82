"""Outputs as columns, between whoever gathers them and whoever reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(slots=True)
class OutputColumns:
    """n requests with something new. Views: valid until the outbox is asked again.

    `request_nos` int64 [n], `offsets` int32 [n + 1], `token_ids` int32 [offsets[n]], `finish_reasons` uint8 [n],
    `stop_reasons` int32 [n].
    """

    request_nos: np.ndarray
    offsets: np.ndarray
    token_ids: np.ndarray
    finish_reasons: np.ndarray
    stop_reasons: np.ndarray

    def copy(self) -> Self:
        """Columns with memory of their own."""
        return type(self)(
            self.request_nos.copy(),
            self.offsets.copy(),
            self.token_ids.copy(),
            self.finish_reasons.copy(),
            self.stop_reasons.copy(),
        )
