"""Outputs as columns, between whoever gathers them and whoever reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class OutputColumns:
    """n requests with something new.

    `request_nos` int64 [n], `offsets` int32 [n + 1], `token_ids` int32 [offsets[n]], `finish_reasons` uint8 [n],
    `stop_reasons` int32 [n].
    """

    request_nos: np.ndarray
    offsets: np.ndarray
    token_ids: np.ndarray
    finish_reasons: np.ndarray
    stop_reasons: np.ndarray
