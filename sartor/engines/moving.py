"""Copy from the host to the device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return an array of the host as a tensor on a device.

    A copy from ordinary memory to a GPU waits until all work in its queue is done. A copy from
    pinned memory takes its place in the queue, and the host continues.
    """
    held = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda" or held.device.type != "cpu":
        return held.to(device)
    return held.pin_memory().to(device, non_blocking=True)
