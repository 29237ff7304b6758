"""Whether the kernels run here. Import this module before modules with kernels, for its error if Triton is missing."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    from triton.runtime.interpreter import InterpretedFunction
except ModuleNotFoundError as error:
    raise RuntimeError(
        "backend='triton' needs the package triton, which is not installed: pip install triton (Linux), or use "
        "backend='blockwise' (for a cache 'reference')."
    ) from error

from sparseflash.backends.triton.device import check_device


@triton.jit
def _nothing() -> None:
    pass


INTERPRETED = isinstance(_nothing, InterpretedFunction)


def check_runs(q: Tensor) -> None:
    """Raises TypeError or RuntimeError unless the kernels run on q's device in q's dtype."""
    if INTERPRETED and q.device.type != "meta":
        if q.dtype == torch.bfloat16:
            raise TypeError("Triton's interpreter silently computes bf16 wrongly; use fp16 or fp32 with it.")
        return
    if q.device.type != "cuda":
        raise RuntimeError(
            f"Triton's kernels run on NVIDIA GPUs; got tensors on {q.device}. Use backend='blockwise' (for a "
            "cache 'reference'), or set TRITON_INTERPRET=1 before the first import to run the kernel slowly in "
            "Triton's interpreter, on the CPU."
        )
    check_device(q.device)
