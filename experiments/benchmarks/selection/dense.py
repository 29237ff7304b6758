"""The dense attention that an idea replaces, and FlexAttention that is told the chosen blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.benchmarks.harness import Unavailable
from experiments.benchmarks.speed.peers import flashattention4
from experiments.benchmarks.speed.peers.flexattention import compiled, small_tiles
from experiments.benchmarks.speed.peers.runner import Inputs
from sparseflash import BlockMask
from sparseflash.interop import to_flex


def sdpa(inputs: Inputs, causal: bool) -> Callable[[], Tensor]:
    q, k, v, _ = inputs.tensors
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] > k.shape[1])


def fa4(inputs: Inputs, causal: bool) -> Callable[[], Tensor]:
    if inputs.q.device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    return partial(flashattention4.call(causal=causal), *inputs.tensors[:3])


def flex(inputs: Inputs, chosen: BlockMask | Tensor, span: int) -> Callable[[], Tensor]:
    """FlexAttention, compiled, told the chosen blocks: a mask, or lists `[1, H, N, K]` of blocks of `span` keys."""
    q, k, v, _ = inputs.tensors
    if q.device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    if isinstance(chosen, BlockMask):
        block_mask = to_flex(chosen)
    else:
        if chosen.shape[1] * q.shape[2] * (k.shape[2] // span) > 2**31:
            raise Unavailable("its rule would read a table of more than 2 GiB")
        block_mask = _of_lists(chosen, q.shape[1], q.shape[2], span)
    options: dict[str, Any] = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
    if (block := min(block_mask.BLOCK_SIZE)) < 128:
        options["kernel_options"] = small_tiles(block)
    return partial(compiled(None), q, k, v, block_mask=block_mask, **options)


def _of_lists(index: Tensor, heads: int, tokens: int, span: int) -> Any:
    _, choices, rows, _ = index.shape
    blocks, tiles = -(-tokens // span), -(-tokens // 128)
    group = heads // choices
    table = torch.zeros(choices, rows, blocks + 1, dtype=torch.bool, device=index.device)
    table.scatter_(2, index[0].masked_fill(index[0] < 0, blocks).long(), True)
    table = table[..., :blocks]

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        return table[h // group, q, k // span] & (k <= q)

    by_tile = torch.zeros(choices, tiles, tiles, dtype=torch.bool, device=index.device)
    for tile in range(tiles):
        seen = table[:, tile * 128 : tile * 128 + 128].any(1)  # [choices, blocks]
        if span <= 128:
            width = 128 // span
            by_tile[:, tile] = F.pad(seen, (0, tiles * width - blocks)).unflatten(1, (tiles, width)).any(2)
        else:
            by_tile[:, tile] = seen.repeat_interleave(span // 128, 1)[:, :tiles]
    by_tile &= torch.ones(tiles, tiles, dtype=torch.bool, device=index.device).tril()
    layout = by_tile.repeat_interleave(group, 0)[None]
    return _flex_mask(layout, rule, tokens)


def _flex_mask(layout: Tensor, rule: Callable[..., Any], tokens: int) -> Any:
    """The rule is evaluated in every tile of the layout."""
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    counts = layout.sum(3, dtype=torch.int32)
    listed = layout.to(torch.int8).argsort(dim=3, descending=True, stable=True).int()
    return FlexMask.from_kv_blocks(counts, listed, BLOCK_SIZE=128, mask_mod=rule, seq_lengths=(tokens, tokens))
