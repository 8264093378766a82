"""The only module of the core that knows torch, and only where the caller passes a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncbook.ipc.errors import InvalidBatch


def host_array(name: str, tensor: Any) -> np.ndarray:
    """A CPU tensor's memory as a numpy array, without a copy."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidBatch(f"{name} is a {type(tensor).__name__}, expected a numpy array or a torch tensor")
    if tensor.device.type != "cpu":
        raise NotImplementedError(f"{name} on {tensor.device}: tensors on a device are not part of this version yet")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise InvalidBatch(f"{name} is {tensor.dtype}, expected torch.int32 or torch.int64")
    array: np.ndarray = tensor.detach().numpy()
    return array
