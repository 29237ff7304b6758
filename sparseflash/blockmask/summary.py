"""A mask in one line, as it is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflash.blockmask.stats import pattern_count

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


def summary(mask: BlockMask) -> str:
    """`BlockMask(...)` with sizes, tiles, density, patterns, lengths and device."""
    is_meta = mask.device.type == "meta"  # a meta tensor has no contents to count
    if mask.dynamic and not is_meta:
        return f"{summary(mask.canonical())[:-1]}, dynamic)"
    block = f"{mask.block_q}" if mask.block_q == mask.block_k else f"{mask.block_q} x {mask.block_k}"
    parts = [f"{mask.q_len} x {mask.k_len}", f"blocks of {block}"]
    if is_meta:
        parts.append(f"{'room for ' if mask.dynamic else ''}{len(mask.tile)} tiles")
    else:
        full = int((mask.tile == 0).sum())
        distinct = f" ({len(mask.bits)} distinct)" if len(mask.bits) else ""
        count = f"{len(mask.tile)} tile{'' if len(mask.tile) == 1 else 's'}"
        parts.append(f"{count}: {full} full + {len(mask.tile) - full} partial{distinct}")
        parts.append(f"density {100 * mask._padded(None).density:.3g} %")
    if mask.pattern.numel() > 1:
        patterns = pattern_count(mask)
        count = f"{patterns} pattern{'' if patterns == 1 else 's'}"
        parts.append(f"{count} for {mask.pattern.shape[0]} x {mask.pattern.shape[1]} (batch x heads)")
    if mask.lengths is not None:
        within = "" if is_meta else f": density {100 * mask.density:.3g} %"
        sequences = mask.lengths.shape[1]
        count = f"{sequences} sequence{'' if sequences == 1 else 's'}"
        parts.append(f"cut by the lengths of {count}{within}")
    if mask.device.type != "cpu":
        parts.append(str(mask.device))
    if mask.dynamic:
        parts.append("dynamic")
    return f"BlockMask({', '.join(parts)})"
