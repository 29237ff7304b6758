"""Errors for attributes and operations of tensors and of other libraries' masks: what to use on a mask instead."""

from __future__ import annotations

from typing import NoReturn

_MOVE = "move a mask with mask.to('cuda') or mask.to('cpu')"
_DENSE = "mask.to_dense() is the boolean tensor [B, H, Nq, Nk]"
_PART = "take a part with mask.crop(q=(start, stop), k=(start, stop)), and some heads with mask.select(heads=[0, 1])"
_LISTS = "interop.to_flex(mask) makes FlexAttention's BlockMask"
_NO_DTYPE = "masks have no dtype: they work with queries, keys and values of any dtype"
_PICTURE = "mask.plot() is a matplotlib figure, and print(mask.to_string()) draws in a terminal"
_SIZES = "mask.shape is (B, H, Nq, Nk), and mask.blocks is the number of block rows and columns"
_MASKS = "combine masks with &, | and ~"

ATTRIBUTES = {
    **dict.fromkeys(("cuda", "cpu", "get_device", "is_cuda", "pin_memory"), _MOVE),
    **dict.fromkeys(
        ("dtype", "float", "half", "bfloat16", "long", "int", "double", "type", "requires_grad"), _NO_DTYPE
    ),
    **dict.fromkeys(("bool", "numpy", "tolist", "nonzero", "masked_fill", "item", "todense", "dense_mask"), _DENSE),
    **dict.fromkeys(("ndim", "dim", "size", "numel", "stride"), _SIZES),
    **dict.fromkeys(("narrow", "split", "chunk", "index_select", "take", "_adjust"), _PART),
    **dict.fromkeys(("show", "draw", "display", "savefig"), _PICTURE),
    **dict.fromkeys(("mT", "t"), "the transposed mask is mask.T"),
    **dict.fromkeys(("sum", "any", "all", "mean", "sparsity"), "mask.density is the share of live scores"),
    **dict.fromkeys(("clone", "detach", "contiguous", "copy"), "masks never change, so they need no copy"),
    **dict.fromkeys(("expand", "repeat", "unsqueeze"), "a mask of one head or batch element serves any number of them"),
    **dict.fromkeys(("logical_and", "logical_or", "logical_not", "union", "intersect", "intersection"), _MASKS),
    **dict.fromkeys(("kv_num_blocks", "kv_indices", "mask_mod", "BLOCK_SIZE", "as_tuple", "seq_lengths"), _LISTS),
}


def no_attribute(name: str) -> AttributeError:
    """The error for an attribute that masks do not have.

    >>> no_attribute("cuda")
    AttributeError("BlockMask has no attribute 'cuda': move a mask with mask.to('cuda') or mask.to('cpu').")
    """
    remedy = f": {ATTRIBUTES[name]}." if name in ATTRIBUTES else ""
    return AttributeError(f"BlockMask has no attribute {name!r}{remedy}")


def refuse(what: str) -> NoReturn:
    """Raises TypeError for an operation that masks do not have."""
    remedies = {"index": _PART, "len": f"{_SIZES}; {_DENSE}", "array": _DENSE, "sum": _MASKS}
    said = {
        "index": "indexed, sliced or iterated over",
        "len": "passed to len()",
        "array": "converted to an array",
        "sum": "added or multiplied",
    }
    raise TypeError(f"a BlockMask must not be {said[what]}: {remedies[what]}.")
