"""PyTorch's FlexAttention: its `BlockMask`, block lists and a `mask_mod`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import BLOCKS, checked_mask, integer
from sparseflash.blockmask.csr import row_of_entry
from sparseflash.interop.lists import Lists, mask_of_lists, padded_lists
from sparseflash.interop.lookup import READS, MaskMod, mask_mod, tile_lookup

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask


def to_flex(mask: BlockMask) -> FlexBlockMask:
    """FlexAttention's `BlockMask` with the same live scores, blocks and device: for `flex_attention`, compiled or not.

    Every mask has one. Its `mask_mod` looks a score up in the mask's own bits, so any pattern goes; code that
    `torch.compile` made for one mask serves others whose arrays have the same shapes. FlexAttention's format takes
    `Mq * Mk` entries of 4 bytes in each of four lists a pattern and head, and the lookup as many a pattern: megabytes
    where the mask here has kilobytes. `lengths` become patterns of their own. Compiled FlexAttention wants blocks that
    its tiles divide: 128 always goes.

    >>> from torch.nn.attention.flex_attention import create_mask
    >>> flex = to_flex(BlockMask.from_function(lambda q, k: k <= q, 256, block=128))
    >>> flex.kv_num_blocks.tolist(), flex.full_kv_num_blocks.tolist()
    ([[[1, 1]]], [[[0, 1]]])
    >>> create_mask(flex.mask_mod, 1, 1, 3, 3, device="cpu").tolist()
    [[[[True, False, False], [True, True, False], [True, True, True]]]]
    """
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    mask = checked_mask(mask).bake_lengths()
    row_blocks, col_blocks = mask.blocks
    by_rows = (mask.indptr, mask.indices, mask.tile), row_blocks, col_blocks
    by_columns = mask.columns, col_blocks, row_blocks
    lists: dict[str, Any] = {}
    # All four lists, because `from_kv_blocks` sorts all Mq * Mk tiles to make the second pair from the first.
    for name, ((indptr, indices, tile), blocks, width) in (("kv", by_rows), ("q", by_columns)):
        rows = row_of_entry(indptr, len(indices))
        for prefix, chosen in (("", tile > 0), ("full_", tile == 0)):
            counts, listed = padded_lists(rows[chosen], indices[chosen], mask.pattern, blocks, width)
            lists |= {f"{prefix}{name}_num_blocks": counts, f"{prefix}{name}_indices": listed}
    return FlexBlockMask(
        seq_lengths=(mask.q_len, mask.k_len),
        **lists,
        BLOCK_SIZE=(mask.block_q, mask.block_k),
        mask_mod=mask_mod(tile_lookup(mask), mask.block_q, mask.block_k),
    )


def from_flex(block_mask: FlexBlockMask, *, batch: int | None = None, heads: int | None = None) -> BlockMask:
    """The mask of FlexAttention's `BlockMask`, in its blocks, as the compiled kernels read it.

    A score is live if its block is listed as full, or if it is listed as partial and `mask_mod` says so; `mask_mod` is
    evaluated in those blocks alone, for the batch elements and heads that the lists tell apart. Where the lists are one
    for all (B or H of `create_block_mask` was None or 1) and `mask_mod` asks for the number nevertheless, its answers
    are others for each, and how many there are must be said: `batch`, `heads`, those of the attention. In eager mode
    FlexAttention asks `mask_mod` everywhere and ignores the lists: masks made by `create_block_mask` with the real B
    and H mean the same either way. Because `mask_mod` may be anything, a thousand partial blocks of 128 x 128 take
    about a second on a CPU (full ones nothing): keep a long mask itself (`BlockMask.save`) rather than what `to_flex`
    made of it.

    Raises TypeError for anything else; ValueError for blocks that a mask cannot have (powers of two from 16 to 256),
    lists that name a block twice or out of range, and numbers of batch elements or heads that are needed and not given,
    or others than the lists have; whatever `mask_mod` raises, as that of a sliced `BlockMask` does.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> from_flex(create_block_mask(lambda b, h, q, k: k <= q, None, None, 256, 256, device="cpu", BLOCK_SIZE=64))
    BlockMask(256 x 256, blocks of 64, 10 tiles: 6 full + 4 partial (1 distinct), density 50.2 %)
    """
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    kind: type = type(block_mask)
    if not issubclass(kind, FlexBlockMask):
        raise TypeError(f"block_mask must be FlexAttention's BlockMask; got {kind.__module__}.{kind.__qualname__}.")
    block_q, block_k = block_mask.BLOCK_SIZE
    if block_q not in BLOCKS or block_k not in BLOCKS:
        raise ValueError(
            f"BLOCK_SIZE must be of {', '.join(map(str, BLOCKS))}; got {block_q} x {block_k}. Give such a BLOCK_SIZE "
            "to create_block_mask."
        )
    q_len, k_len = block_mask.seq_lengths
    partial = _four_dimensional(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = None
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _four_dimensional(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    rows = partial[0].shape[-1]
    if rows != -(-q_len // block_q) and rows * block_q < q_len:
        raise ValueError(
            f"block_mask must have lists for all {q_len} queries; it has {rows} block rows of {block_q}, as a slice "
            "has, which FlexAttention leaves the lengths of the whole: from_flex(whole).crop(q=(start, stop))."
        )
    asked = numbers_asked(block_mask.mask_mod, partial[0].device)
    sizes = [
        _size(name, given, listed, uses)
        for name, given, listed, uses in zip(("batch", "heads"), (batch, heads), partial[0].shape, asked)
    ]
    partial = _for_each(partial, sizes)
    full = None if full is None else _for_each(full, sizes)
    return mask_of_lists(q_len, k_len, block_q, block_k, partial, full, block_mask.mask_mod)


def numbers_asked(mask_mod: MaskMod | None, device: torch.device) -> tuple[bool, bool]:
    """Whether a `mask_mod` makes use of the number of the batch element, and of the head, or may do.

    What FlexAttention can ask, and nobody can trace, as a rule that reads a number from a tensor in Python, may use
    both. What FlexAttention cannot ask uses neither: what it raises comes when it is asked.

    >>> numbers_asked(lambda b, h, q, k: (k <= q) & (q - k < h), torch.device("cpu"))
    (False, True)
    """
    if mask_mod is None:
        return False, False
    if (reads := getattr(mask_mod, READS, None)) is not None:
        return bool(reads[0]), bool(reads[1])
    from torch.fx.experimental.proxy_tensor import make_fx

    numbers = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]
    try:  # through vmap, as FlexAttention asks it: then a number may be an index
        graph = make_fx(torch.vmap(mask_mod))(*numbers).graph
    except Exception:
        return (_can_be_asked(mask_mod, numbers),) * 2
    graph.eliminate_dead_code()
    b, h, *_ = graph.find_nodes(op="placeholder")
    return any(map(_reads, b.users)), any(map(_reads, h.users))


def _can_be_asked(mask_mod: MaskMod, numbers: Sequence[Tensor]) -> bool:
    try:
        torch.vmap(mask_mod)(*numbers)
    except Exception:
        return False
    return True


def _reads(node: Node) -> bool:
    """Whether an operation looks at a number, and does not only make another tensor like it, as `and_masks` does."""
    name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    return not (name.startswith("new_") or name.endswith("_like"))


def _size(name: str, given: int | None, listed: int, asked: bool) -> int:
    """How many batch elements or heads the mask tells apart."""
    if given is not None:
        given = integer(given, name, "")
        if given < 1 or listed not in (1, given):
            raise ValueError(f"{name} must be {listed}, as block_mask has, or left out; got {given}.")
        return given if asked else listed
    if listed == 1 and asked:
        what = "batch element" if name == "batch" else "head"
        raise ValueError(
            f"mask_mod asks for the {what}, or may do, and block_mask has one list for all: say {name}=, how many the "
            f"attention has (1, if there is one), or give create_block_mask the real {'B' if name == 'batch' else 'H'}."
        )
    return listed


def _for_each(lists: Lists, sizes: Sequence[int]) -> Lists:
    """Lists that are one for all, once for each."""
    counts, indices = lists
    shape = [size if own == 1 else own for own, size in zip(counts.shape, sizes)]
    return counts.expand(*shape, -1), indices.expand(*shape, -1, -1)


def _four_dimensional(counts: Tensor, indices: Tensor) -> Lists:
    """Lists that lack a batch or head dimension are shared."""
    return counts[(None,) * (3 - counts.ndim)], indices[(None,) * (4 - indices.ndim)]
