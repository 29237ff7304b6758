from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products_in_tf32(wanted: bool) -> Iterator[None]:
    """TF32 inside the context if `wanted`, full fp32 otherwise. torch.compile reads both of PyTorch's settings, the old
    and the new one; this function sets both."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
