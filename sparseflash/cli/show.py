"""The cost and the reach of a mask, as text and as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from sparseflash import BlockMask, analysis

Line = tuple[str, str]  # label and text


def facts(mask: BlockMask, *, head_dim: int, heads: int | None, dtype: torch.dtype, causal: bool) -> Iterator[Line]:
    """Yields the lines of `show` one by one, since the last ones may take long.

    heads: used if the mask is shared by all heads; causal: reach counts earlier keys only.
    """
    heads = heads if mask.shape[1] == 1 else None
    yield "scores", str(analysis.density(mask))
    yield "forward", str(analysis.flops(mask, head_dim, dtype=dtype, heads=heads))
    yield "backward", str(analysis.flops(mask, head_dim, dtype=dtype, backward=True, heads=heads))
    yield "memory traffic", f"forward, {analysis.bytes_moved(mask, head_dim, dtype=dtype, heads=heads)}"
    balances = analysis.balance(mask)
    for number, balance in enumerate(balances):
        of = f" of pattern {number}" if len(balances) > 1 else ""
        yield f"block rows{of}", str(balance.rows)
        yield f"block columns{of}", str(balance.columns)
    for number, other in enumerate(analysis.coarsening(mask)):
        yield "" if number else "in other blocks", str(other)
    yield "reach", reach(mask, causal)


def figures(
    mask: BlockMask, *, head_dim: int, heads: int | None, dtype: torch.dtype, causal: bool
) -> dict[str, Any]:  # fmt: skip
    """The same as JSON values."""
    shared = heads if mask.shape[1] == 1 else None
    return {
        "mask": repr(mask),
        "digest": mask.digest,
        "shape": list(mask.shape),
        "block": [mask.block_q, mask.block_k],
        "density": mask.density,
        "bytes": mask.nbytes,
        "scores": asdict(analysis.density(mask)),
        "forward_flops": asdict(analysis.flops(mask, head_dim, dtype=dtype, heads=shared)),
        "backward_flops": asdict(analysis.flops(mask, head_dim, dtype=dtype, backward=True, heads=shared)),
        "forward_bytes": asdict(analysis.bytes_moved(mask, head_dim, dtype=dtype, heads=shared)),
        "balance": [asdict(each) for each in analysis.balance(mask)],
        "other_blocks": [asdict(each) for each in analysis.coarsening(mask)],
        "reach": reach(mask, causal),
    }


def reach(mask: BlockMask, causal: bool) -> str:
    """The number of layers after which every token has seen every other one, as text."""
    if mask.q_len != mask.k_len:
        return "only for masks with as many queries as keys"
    whom = "every earlier token" if causal else "every other token"
    try:
        layers = analysis.layers_to_full_reach(mask, causal=causal)
    except ValueError as error:
        return str(error)
    if layers is None:
        hint = "" if causal else "; --causal asks about earlier tokens only"
        return f"no number of layers lets every token see {whom}{hint}"
    return f"every token has seen {whom} after {layers} layer{'s' if layers != 1 else ''}"
