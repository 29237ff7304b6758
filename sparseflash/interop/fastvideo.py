"""FastVideo's block-sparse attention of chosen blocks, with its arguments and layouts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseflash import scores
from sparseflash.attention import Backend, attention
from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import checked_integers, dense_tensor


def block_sparse_attn_from_indices(
    q: Tensor, k: Tensor, v: Tensor, q2k_idx: Tensor, q2k_num: Tensor, variable_block_sizes: Tensor, *,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`fastvideo_kernel.block_sparse_attn_from_indices`, computed by `attention`.

    >>> q, k, v = torch.randn(3, 1, 2, 192, 16)  # three blocks of 64 tokens
    >>> index, counts = torch.tensor([[0, 1], [1, 0], [2, 0]]).expand(1, 2, 3, 2), torch.ones(1, 2, 3).int()
    >>> sizes = torch.tensor([64, 64, 40])  # the last block has 24 tokens of padding
    >>> out, lse2 = block_sparse_attn_from_indices(q, k, v, index, counts, sizes)
    >>> out.shape, lse2.shape
    (torch.Size([1, 2, 192, 16]), torch.Size([1, 2, 192]))

    Args:
        q, k, v: padded to whole blocks, `[B, H, N, D]`. Padding must be finite.
        q2k_idx: the blocks of keys of each block of queries, integers `[B, H, Mq, K]`.
        q2k_num: how many of them count, integers `[B, H, Mq]`.
        variable_block_sizes: the tokens of each block of keys that are not padding, integers `[Mk]`.

    Returns:
        `(out, lse)`, where lse is to the base 2, as FastVideo's Triton kernels return it.

    The block is `Nk / Mk` tokens; FastVideo has 64. The host does not wait for the device.
    """
    dense_tensor(q, "q"), dense_tensor(k, "k")
    sizes = checked_integers(variable_block_sizes, "variable_block_sizes")
    if sizes.ndim != 1 or q.ndim != 4 or k.ndim != 4 or not len(sizes) or k.shape[2] % len(sizes):
        raise ValueError(
            "variable_block_sizes must have one entry for each block of keys, and k whole blocks, [B, H, N, D]; got "
            f"{list(sizes.shape)} and {list(k.shape)}."
        )
    block = k.shape[2] // len(sizes)
    mask = BlockMask.from_block_index(q2k_idx, q2k_num, block=block, q_len=q.shape[2], k_len=k.shape[2])
    padding = torch.arange(block, device=sizes.device) >= sizes[:, None]
    dead = torch.zeros(1, 1, k.shape[2], device=q.device, dtype=torch.float32)
    dead = dead.masked_fill(padding.reshape(1, 1, -1), -torch.inf)
    out, lse = attention(q, k, v, mask, return_lse=True, scores=scores.key_bias(dead), backend=backend)
    return out, lse / math.log(2)
