"""Whether PyTorch, and with it sparseflash and the peers, multiplies fp32 matrices in TF32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products_in_tf32(wanted: bool) -> Iterator[None]:
    """TF32 inside the context if `wanted`, full fp32 otherwise.

    The function that is used sets both of PyTorch's settings, the old and the new one. torch.compile reads both, and
    PyTorch raises an error if only one of them is set.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
