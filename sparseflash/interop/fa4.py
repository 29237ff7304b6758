"""FlashAttention-4 (`flash_attn.cute`): block-sparse tensors for the forward and the backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import checked_mask, flag, token_counts
from sparseflash.blockmask.csr import row_of_entry
from sparseflash.interop.lists import mask_of_lists, padded_lists
from sparseflash.interop.lookup import MaskMod, TileLookup, tile_lookup


class BlockSparseTensors(NamedTuple):
    """The fields of `flash_attn.cute.block_sparsity.BlockSparseTensorsTorch` that hold a mask, with its names.

    >>> to_fa4(BlockMask.dense(256)).forward.block_size
    (128, 128)

    Pass them on as `BlockSparseTensorsTorch(**tensors._asdict())`. Forward: M block rows that list key blocks;
    backward: block columns that list query blocks.
    """

    mask_block_cnt: Tensor  # int32 [B or 1, Hq or 1, M]: partial blocks, where FA4 evaluates its mask_mod
    mask_block_idx: Tensor  # int32 [B or 1, Hq or 1, M, longest row]
    full_block_cnt: Tensor  # int32: full blocks, where it does not
    full_block_idx: Tensor  # int32
    block_size: tuple[int, int]  # queries and keys per block, also for the backward


class FA4BlockSparse(NamedTuple):
    """A mask in FA4's form.

    >>> to_fa4(BlockMask.dense(256)).backward.full_block_cnt.tolist()
    [[[2, 2]]]
    """

    forward: BlockSparseTensors
    backward: BlockSparseTensors
    lookup: TileLookup | None  # for masks with partial tiles: the `aux_tensors` of a mask_mod


def to_fa4(mask: BlockMask, *, partial: bool = False) -> FA4BlockSparse:
    """The block-sparse tensors of FlashAttention-4, on the mask's device.

    >>> tensors = to_fa4(BlockMask.dense(300, block=128))
    >>> tensors.forward.full_block_cnt.tolist(), tensors.forward.full_block_idx.tolist()
    ([[[3, 3, 3]]], [[[[0, 1, 2], [0, 1, 2], [0, 1, 2]]]])
    >>> tensors.forward.mask_block_cnt.tolist(), tensors.lookup
    ([[[0, 0, 0]]], None)

    FA4 requires blocks of exactly 128 keys and a multiple of 128 queries (256 queries on SM100, where it works on two
    tiles at once). Tiles at a ragged end count as full if every existing score is live, as in FA4's own
    `compute_block_sparsity`.

    Args:
        mask: in such blocks.
        partial: promises that the caller supplies a `mask_mod` for partial tiles.

    In partial tiles FA4 evaluates a `mask_mod`, compiled from CuTe DSL; without one it treats them as full. So a mask
    with partial tiles is refused without `partial=True`. The `mask_mod` is either the rule of the pattern (causal:
    `k <= q`), or a function that reads the arrays of `lookup`, passed as `aux_tensors`, by the formula of `TileLookup`.

    Raises ValueError for other blocks, and for partial tiles without `partial=True`.
    """
    mask = checked_mask(mask)
    if mask.block_q % 128 or mask.block_k != 128:
        raise ValueError(
            "blocks must have 128 keys and a multiple of 128 queries for FA4; got "
            f"{mask.block_q} x {mask.block_k}. Reblock the mask: mask.reblock(128)."
        )
    mask = mask.bake_lengths()
    row_blocks, col_blocks = mask.blocks
    entry_rows = row_of_entry(mask.indptr, len(mask.indices))
    whole = _whole(mask, entry_rows % row_blocks, mask.indices, mask.tile)
    if not flag(partial, "partial") and not bool(whole.all()):
        entry = int((~whole).nonzero()[0])
        p, i = divmod(int(entry_rows[entry]), row_blocks)
        raise ValueError(
            f"partial=True must be given for a mask with partial tiles; got {int((~whole).sum())}, the first at "
            f"block ({i}, {int(mask.indices[entry])}) of pattern {p}. FA4 treats them as full unless it is "
            "given a mask_mod (CuTe DSL) for them."
        )
    forward = _tensors(mask, entry_rows, mask.indices, whole, row_blocks)
    indptr, rows, tile = mask.columns
    columns = row_of_entry(indptr, len(rows))
    backward = _tensors(mask, columns, rows, _whole(mask, rows, columns % col_blocks, tile), col_blocks)
    return FA4BlockSparse(forward, backward, None if bool(whole.all()) else tile_lookup(mask))


def from_fa4(tensors: BlockSparseTensors, q_len: int, k_len: int, *, mask_mod: MaskMod | None = None) -> BlockMask:
    """The mask of the forward's block-sparse tensors, ours or FA4's own `BlockSparseTensorsTorch`.

    >>> mask = BlockMask.from_layout(torch.eye(3, dtype=torch.bool))
    >>> from_fa4(to_fa4(mask).forward, 384, 384) == mask
    True

        q_len, k_len: tokens.
        mask_mod: `mask_mod(b, h, q, k)`, in PyTorch and with FlexAttention's arguments, gives the live scores of
            partial blocks. For tensors from `to_fa4` it is `sparseflash.interop.lookup.mask_mod(lookup,
            *tensors.block_size)`.

    Raises ValueError for partial blocks without a `mask_mod`, for a missing or impossible `block_size`, and for lists
    that name a block twice or out of range.
    """
    if not all(hasattr(tensors, name) for name in BlockSparseTensors._fields):
        raise TypeError(f"tensors must be BlockSparseTensors, ours or FA4's own; got {type(tensors).__name__}.")
    if tensors.block_size is None:
        raise ValueError("block_size must be set in the tensors, because the lists do not contain it; got None.")
    q_len, k_len = token_counts(q_len, k_len)
    block_q, block_k = tensors.block_size
    full = None
    if tensors.full_block_cnt is not None:
        full = tensors.full_block_cnt, tensors.full_block_idx
    partial = tensors.mask_block_cnt, tensors.mask_block_idx
    return mask_of_lists(q_len, k_len, block_q, block_k, partial, full, mask_mod)


def _whole(mask: BlockMask, rows: Tensor, cols: Tensor, tile: Tensor) -> Tensor:
    """Bool `[E]`: the entries in which every score inside the lengths is live."""
    live_q, live_k = mask.q_len - (mask.blocks[0] - 1) * mask.block_q, mask.k_len - (mask.blocks[1] - 1) * mask.block_k
    counts = bitmask.live_scores(bitmask.choices(mask.bits, mask.block_k))
    height = torch.where(rows == mask.blocks[0] - 1, live_q, mask.block_q)
    width = torch.where(cols == mask.blocks[1] - 1, live_k, mask.block_k)
    return counts[tile.long()] == height * width


def _tensors(mask: BlockMask, rows: Tensor, values: Tensor, whole: Tensor, blocks: int) -> BlockSparseTensors:
    partial, full = (padded_lists(rows[w], values[w], mask.pattern, blocks) for w in (~whole, whole))
    return BlockSparseTensors(*partial, *full, (mask.block_q, mask.block_k))
