"""The boolean and additive masks of `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import Block, block_pair, checked_mask, integer, plain_tensor, token_counts


def to_sdpa(mask: BlockMask) -> Tensor:
    """The `attn_mask` of PyTorch's SDPA: bool `[B or 1, Hq or 1, Nq, Nk]`, True where a score is live.

    >>> to_sdpa(BlockMask.from_function(lambda q, k: k <= q, 32, block=16))[0, 0].int().sum(1)[:4].tolist()
    [1, 2, 3, 4]

    Every mask can be converted; the result takes `Nq * Nk` bytes per head. The boolean masks of
    `torch.nn.MultiheadAttention` have the opposite meaning: pass it `~to_sdpa(mask)`.
    """
    return checked_mask(mask).to_dense()


def from_sdpa(
    attn_mask: Tensor, *, q_len: int | None = None, k_len: int | None = None, block: Block = 128
) -> BlockMask:
    """The mask of an `attn_mask` of PyTorch's SDPA.

    >>> from_sdpa(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]), block=16).to_dense()[0, 0].tolist()
    [[True, False], [True, True]]

    Args:
        attn_mask: bool (True: live), or floating point with only 0 and -inf; `[Nq, Nk]`, `[Hq, Nq, Nk]` or `[B, Hq, Nq,
            Nk]`, where B and Hq may be 1.
        q_len, k_len: tokens, if that dimension of `attn_mask` is 1 and is to be repeated.
        block: tokens per side of a tile.

    For a key padding mask `[B, Nk]` where True means padding (as in `torch.nn.MultiheadAttention`) use
    `from_sdpa(~padding[:, None, None, :], q_len=Nq)`; its time is proportional to the tiles.

    Raises TypeError for another dtype, ValueError for another shape or for a bias, which a mask cannot represent.
    """
    if not isinstance(attn_mask, Tensor) or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        got = attn_mask.dtype if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
        raise TypeError(f"attn_mask must be a bool or floating point tensor; got {got}.")
    plain_tensor(attn_mask, "attn_mask")
    if attn_mask.ndim not in (2, 3, 4):
        raise ValueError(
            f"attn_mask must have shape [Nq, Nk], [Hq, Nq, Nk] or [B, Hq, Nq, Nk]; got {list(attn_mask.shape)}."
        )
    if attn_mask.is_floating_point():
        live = attn_mask == 0
        wrong = (~live & (attn_mask != -torch.inf)).nonzero()
        if len(wrong):
            place = tuple(wrong[0].tolist())
            raise ValueError(
                f"attn_mask must hold 0 and -inf only (a bias is not a mask); got {attn_mask[place].item()} at "
                f"{list(place)}. If only 0 is live, pass attn_mask == 0."
            )
        attn_mask = live
    shape = list(attn_mask.shape)
    for name, dim, length in (("q_len", -2, q_len), ("k_len", -1, k_len)):
        if length is not None:
            shape[dim] = integer(length, name, "tokens")
            if attn_mask.shape[dim] not in (1, shape[dim]):
                raise ValueError(f"{name} must be {attn_mask.shape[dim]}, as in attn_mask; got {length}.")
    if attn_mask.shape[-2] == 1 and shape[-2] > 1:
        return _seen_by_all_queries(attn_mask.expand(*shape[:-2], 1, shape[-1]), shape[-2], block)
    return BlockMask.from_dense(attn_mask.expand(shape), block=block)


def _seen_by_all_queries(keys: Tensor, q_len: int, block: Block) -> BlockMask:
    """The mask of keys, bool `[..., 1, Nk]`, that are live for every query, without expanding to `Nq x Nk` scores."""
    block_q, block_k = block_pair(block)
    q_len, k_len = token_counts(q_len, keys.shape[-1])
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    batch, heads = ((1,) * (4 - keys.ndim) + keys.shape)[:2]
    padded = torch.nn.functional.pad(keys.reshape(batch * heads, k_len), (0, col_blocks * block_k - k_len))
    parts = []
    for live in padded.view(batch * heads, col_blocks, block_k):
        some = live.any(1).nonzero()[:, 0]
        i = torch.arange(row_blocks, device=live.device).repeat_interleave(len(some))
        kind = torch.arange(1, len(some) + 1, device=live.device).repeat(row_blocks)
        words = bitmask.pack(live[some][:, None, :].expand(-1, block_q, -1))
        parts.append((i, some.repeat(row_blocks), kind, words))
    numbers = torch.arange(len(parts), device="cpu").view(batch, heads)
    return BlockMask._of(q_len, k_len, block_q, block_k, parts, numbers)
