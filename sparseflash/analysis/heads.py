"""Checks of head counts, batch sizes and head dims against a mask."""

from __future__ import annotations

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import checked_mask, integer


def repeats(mask: BlockMask, batch: int | None, heads: int | None) -> int:
    """How often each (batch element, head) of the mask occurs in an attention with this batch size and number of heads.

    None: the mask's own number; a shared mask (1 in its shape) serves any number.
    """
    mask, times = checked_mask(mask), 1
    for name, asked, own in (("batch", batch, mask.shape[0]), ("heads", heads, mask.shape[1])):
        if asked is None:
            continue
        asked = integer(asked, name, "batch elements" if name == "batch" else "heads")
        if asked < 1 or own not in (1, asked):
            want = "at least 1" if own == 1 else f"{own}, as in the mask"
            raise ValueError(f"{name} must be {want}; got {asked}.")
        times *= asked // own
    return times


def dims(head_dim: int, v_dim: int | None) -> tuple[int, int]:
    """The head dim of queries and keys, and the head dim of values, checked."""
    head_dim = integer(head_dim, "head_dim", "channels")
    v_dim = head_dim if v_dim is None else integer(v_dim, "v_dim", "channels")
    for name, value in (("head_dim", head_dim), ("v_dim", v_dim)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1 channel; got {value}.")
    return head_dim, v_dim
