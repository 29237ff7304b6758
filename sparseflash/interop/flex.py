"""PyTorch's FlexAttention: its `BlockMask`, which is block lists and a `mask_mod`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import BLOCKS, checked_mask, integer
from sparseflash.blockmask.csr import row_of_entry
from sparseflash.interop.flex_blocks import in_supported_blocks
from sparseflash.interop.lists import Lists, mask_of_lists, padded_lists
from sparseflash.interop.lookup import READS, MaskMod, tile_lookup
from sparseflash.interop.lookup import mask_mod as looked_up

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask


def to_flex(mask: BlockMask, *, mask_mod: MaskMod | None = None) -> FlexBlockMask:
    """FlexAttention's `BlockMask` with the same live scores, blocks and device, for `flex_attention`, compiled or not.

    >>> from torch.nn.attention.flex_attention import create_mask
    >>> flex = to_flex(BlockMask.from_function(lambda q, k: k <= q, 256, block=128))
    >>> flex.kv_num_blocks.tolist(), flex.full_kv_num_blocks.tolist()
    ([[[1, 1]]], [[[0, 1]]])
    >>> create_mask(flex.mask_mod, 1, 1, 3, 3, device="cpu").tolist()
    [[[[True, False, False], [True, True, False], [True, True, True]]]]

    Args:
        mask_mod: `mask_mod(b, h, q, k)`, a rule that says which scores of partial tiles are live, such as
            `lambda b, h, q, k: k <= q` for a causal mask. By default the result looks them up in the bits of `mask`; a
            rule is faster, because it reads no memory. The rule must agree with the mask, which is not checked.

    Every mask can be converted. Code that `torch.compile` generated for one mask runs others whose arrays have the
    same shapes.

    FlexAttention's format is dense in tiles: four lists with `Mq * Mk` entries of 4 bytes for each head, and for the
    lookup as many entries for each pattern. If the mask has lengths (padding), each sequence becomes a pattern of its
    own. Compiled FlexAttention needs block sizes that are multiples of its kernels' tile sizes; 128 always works.
    """
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    mask = checked_mask(mask).bake_lengths()
    row_blocks, col_blocks = mask.blocks
    by_rows = (mask.indptr, mask.indices, mask.tile), row_blocks, col_blocks
    by_columns = mask.columns, col_blocks, row_blocks
    lists: dict[str, Any] = {}
    # All four lists, because `from_kv_blocks` would sort all Mq * Mk tiles to derive the second pair from the first.
    for name, ((indptr, indices, tile), blocks, width) in (("kv", by_rows), ("q", by_columns)):
        rows = row_of_entry(indptr, len(indices))
        for prefix, chosen in (("", tile > 0), ("full_", tile == 0)):
            counts, listed = padded_lists(rows[chosen], indices[chosen], mask.pattern, blocks, width)
            lists |= {f"{prefix}{name}_num_blocks": counts, f"{prefix}{name}_indices": listed}
    return FlexBlockMask(
        seq_lengths=(mask.q_len, mask.k_len),
        **lists,
        BLOCK_SIZE=(mask.block_q, mask.block_k),
        mask_mod=looked_up(tile_lookup(mask), mask.block_q, mask.block_k) if mask_mod is None else mask_mod,
    )


def from_flex(block_mask: FlexBlockMask, *, batch: int | None = None, heads: int | None = None) -> BlockMask:
    """The mask of FlexAttention's `BlockMask`, in its blocks if a mask can have them, as the compiled kernels read it.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> from_flex(create_block_mask(lambda b, h, q, k: k <= q, None, None, 256, 256, device="cpu", BLOCK_SIZE=64))
    BlockMask(256 x 256, blocks of 64, 10 tiles: 6 full + 4 partial (1 distinct), density 50.2 %)

    Args:
        block_mask: FlexAttention's mask.
        batch, heads: the attention's numbers of batch elements and heads. Needed if B or H of `create_block_mask` was
            None or 1, so that one list serves all, but `mask_mod` depends on b or h.

    A score is live if its block is listed as full, or if it is listed as partial and `mask_mod` returns True.
    `mask_mod` is evaluated only in partial blocks, for the batch elements and heads that the lists distinguish.

    This is how compiled FlexAttention reads the lists; in eager mode it ignores them and evaluates `mask_mod` for every
    score.

    Time is proportional to the partial blocks. To store a long mask, save the mask itself (`BlockMask.save`) rather
    than the result of `to_flex`.

    Blocks of other sizes than powers of two from 16 to 256 become blocks of the next smaller one, or of 16.

    Raises TypeError for anything else than a FlexAttention mask; ValueError for lists that name a block twice or out of
    range, and for numbers of batch elements or heads that are missing or differ from the lists'. Errors of `mask_mod`
    propagate.
    """
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    kind: type = type(block_mask)
    if not issubclass(kind, FlexBlockMask):
        raise TypeError(f"block_mask must be FlexAttention's BlockMask; got {kind.__module__}.{kind.__qualname__}.")
    block_q, block_k = block_mask.BLOCK_SIZE
    q_len, k_len = block_mask.seq_lengths
    partial = _four_dimensional(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = None
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _four_dimensional(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    rows = partial[0].shape[-1]
    if rows != -(-q_len // block_q) and rows * block_q < q_len:
        raise ValueError(
            f"block_mask must have lists for all {q_len} queries; got {rows} block rows of {block_q}. A slice keeps "
            "the lengths of the whole mask: use from_flex(whole).crop(q=(start, stop)). _adjust to longer lengths "
            "adds no lists: make the mask with create_block_mask(mask_mod, B, H, Nq, Nk)."
        )
    for counts, indices in (partial,) if full is None else (partial, full):
        listed = torch.arange(indices.shape[-1], device=counts.device) < counts.unsqueeze(-1)
        last = int(torch.where(listed, indices, -1).max()) if indices.numel() else -1
        if last >= -(-k_len // block_k):
            raise ValueError(
                f"block_mask must list blocks of its {k_len} keys, 0 to {-(-k_len // block_k) - 1}; got {last}. "
                "_adjust to fewer keys leaves the blocks of removed keys in the lists: use "
                "from_flex(whole).crop(q=(0, Nq), k=(0, Nk))."
            )
    asked = numbers_asked(block_mask.mask_mod, partial[0].device)
    sizes = [
        _size(name, given, listed, uses)
        for name, given, listed, uses in zip(("batch", "heads"), (batch, heads), partial[0].shape, asked)
    ]
    partial = _for_each(partial, sizes)
    full = None if full is None else _for_each(full, sizes)
    rule = block_mask.mask_mod
    if block_q not in BLOCKS or block_k not in BLOCKS:
        (block_q, block_k), partial, full, rule = in_supported_blocks(
            partial, full, (q_len, k_len), (block_q, block_k), rule
        )
    return mask_of_lists(q_len, k_len, block_q, block_k, partial, full, rule)


def numbers_asked(mask_mod: MaskMod | None, device: torch.device) -> tuple[bool, bool]:
    """Whether a `mask_mod` may depend on the number of the batch element, and on the number of the head.

    >>> numbers_asked(lambda b, h, q, k: (k <= q) & (q - k < h), torch.device("cpu"))
    (False, True)

    A rule that FlexAttention can call but that cannot be traced, because it reads a number from a tensor in Python, may
    depend on both. For a rule that even FlexAttention cannot call, the answer is neither: its error is raised when it
    is evaluated.
    """
    if mask_mod is None:
        return False, False
    if (reads := getattr(mask_mod, READS, None)) is not None:
        return bool(reads[0]), bool(reads[1])
    from torch.fx.experimental.proxy_tensor import make_fx

    numbers = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]
    try:  # through vmap, as FlexAttention calls it, so that numbers may be indices
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
    """Whether an operation reads a number's value, and does not only make another tensor like it (`and_masks`)."""
    name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    return not (name.startswith("new_") or name.endswith("_like"))


def _size(name: str, given: int | None, listed: int, asked: bool) -> int:
    if given is not None:
        given = integer(given, name, "")
        if given < 1 or listed not in (1, given):
            raise ValueError(f"{name} must be {listed}, as in block_mask, or left out; got {given}.")
        return given if asked else listed
    if listed == 1 and asked:
        what = "batch element" if name == "batch" else "head"
        raise ValueError(
            f"mask_mod may depend on the {what}, but block_mask has one list for all: pass {name}=, the attention's "
            f"number of them (1 if there is one), or pass create_block_mask the real {'B' if name == 'batch' else 'H'}."
        )
    return listed


def _for_each(lists: Lists, sizes: Sequence[int]) -> Lists:
    counts, indices = lists
    shape = [size if own == 1 else own for own, size in zip(counts.shape, sizes)]
    return counts.expand(*shape, -1), indices.expand(*shape, -1, -1)


def _four_dimensional(counts: Tensor, indices: Tensor) -> Lists:
    return counts[(None,) * (3 - counts.ndim)], indices[(None,) * (4 - indices.ndim)]
