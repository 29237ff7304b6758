from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparseflash import BlockMask
from sparseflash.draw.figure import MOST_ELEMENTS


def draw(named_masks: Mapping[str, BlockMask], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.1 * len(named_masks), 5.0), layout="constrained")
    panels = figure.subplots(1, len(named_masks), squeeze=False)[0]
    elements = all(max(mask.q_len, mask.k_len) <= MOST_ELEMENTS for mask in named_masks.values())
    meanings = {}
    for panel, (name, mask) in zip(panels, named_masks.items()):
        mask.plot(panel, heads=0, batch=0, elements=elements)
        legend = panel.get_legend()
        meanings |= {text.get_text(): patch for text, patch in zip(legend.get_texts(), legend.get_patches())}
        legend.remove()
        panel.set_title(f"{name}\n{100 * mask.density:.1f} % of the scores live", fontsize=12)
    sizes = {f"{mask.block_q} x {mask.block_k}" for mask in named_masks.values()}
    figure.suptitle(f"Attention masks, tiles of {' or '.join(sorted(sizes))} tokens", fontsize=13)
    figure.legend(meanings.values(), meanings, loc="outside lower center", ncols=len(meanings), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
