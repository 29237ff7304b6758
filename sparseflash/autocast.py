"""Products in the dtype of their inputs, also under autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disables autocast on a device. It does nothing on the meta device, where PyTorch has no autocast.

    >>> x = torch.ones(2, 2)
    >>> with torch.autocast("cpu", torch.bfloat16), without_autocast(x.device):
    ...     (x @ x).dtype
    torch.float32
    """
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
