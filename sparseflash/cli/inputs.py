"""Random inputs for a mask."""

from __future__ import annotations

import torch

from sparseflash import BlockMask
from sparseflash.cli.names import PRECISIONS
from sparseflash.testing import Inputs

DTYPES = dict(zip(PRECISIONS, (torch.bfloat16, torch.float16, torch.float32), strict=True))


def drawn(
    mask: BlockMask, *, batch: int, heads: int, kv_heads: int | None, dim: int, dtype: torch.dtype, seed: int
) -> Inputs:
    """Normally distributed inputs on the mask's device.

    batch, heads: used where the mask is shared; a mask with its own batch elements or heads determines their number.
    kv_heads: as many as query heads if None. Raises ValueError if they do not divide the query heads.
    """
    batch = mask.shape[0] if mask.shape[0] > 1 else batch
    heads = mask.shape[1] if mask.shape[1] > 1 else heads
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"--kv-heads must divide the {heads} heads; got {kv_heads}")
    generator = torch.Generator(mask.device).manual_seed(seed)
    shapes = ((heads, mask.q_len), (kv_heads, mask.k_len), (kv_heads, mask.k_len), (heads, mask.q_len))
    q, k, v, dout = (
        torch.randn(batch, *shape, dim, generator=generator, device=mask.device, dtype=torch.float32).to(dtype)
        for shape in shapes
    )
    dlse = torch.randn(batch, heads, mask.q_len, generator=generator, device=mask.device, dtype=torch.float32)
    return Inputs(q, k, v, dout, dlse.to(dtype))
