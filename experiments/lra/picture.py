"""Masks side by side as a picture file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparseflash import BlockMask

COLOURS = ("#ffffff", "#fde3c8", "#e8731a", "#1f4e8c")
MEANINGS = (
    "empty tile: skipped",
    "partial tile: dead score",
    "partial tile: live score",
    "full tile: all scores live",
)


def draw(named_masks: Mapping[str, BlockMask], path: Path) -> Path:
    """Write one panel a mask, queries down and keys across, in tokens; full and partial tiles told apart.

    For masks of some thousand tokens at most: every score is a point.
    """
    # Only here: matplotlib takes a second to import, and most runs draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(4.1 * len(named_masks), 5.0), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    panels = figure.subplots(1, len(named_masks), squeeze=False)[0]
    for panel, (name, mask) in zip(panels, named_masks.items()):
        panel.imshow(
            kinds(mask), cmap=ListedColormap(COLOURS), vmin=0, vmax=3, interpolation="nearest",
            extent=(0, mask.k_len, mask.q_len, 0),
        )  # fmt: skip
        panel.set_title(f"{name}\n{100 * mask.density:.1f} % of the scores live", fontsize=12)
        panel.set_xlabel("key (token)")
        panel.set_ylabel("query (token)")
        for axis, length, block in (
            (panel.xaxis, mask.k_len, mask.block_k),
            (panel.yaxis, mask.q_len, mask.block_q),
        ):
            axis.set_ticks(np.linspace(0, length, 5))
            axis.set_ticks(np.arange(0, length + 1, block), minor=True)
        panel.grid(which="minor", color="#c8c8c8", linewidth=0.4)
        panel.tick_params(which="minor", length=0)
    sizes = {f"{mask.block_q} x {mask.block_k}" for mask in named_masks.values()}
    figure.suptitle(f"Attention masks, tiles of {' or '.join(sorted(sizes))} tokens", fontsize=13)
    patches = [Patch(facecolor=colour, edgecolor="#999999") for colour in COLOURS]
    figure.legend(patches, MEANINGS, loc="outside lower center", ncols=len(patches), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def kinds(mask: BlockMask) -> NDArray[np.uint8]:
    """What each score [Nq, Nk] of the first head is: the index of its meaning in MEANINGS."""
    live = mask.to_dense()[0, 0].cpu().numpy()
    rows = np.arange(0, mask.q_len, mask.block_q)
    cols = np.arange(0, mask.k_len, mask.block_k)
    some = np.logical_or.reduceat(np.logical_or.reduceat(live, rows, 0), cols, 1)  # [Mq, Mk]
    all_ = np.logical_and.reduceat(np.logical_and.reduceat(live, rows, 0), cols, 1)
    tiles = np.where(all_, 3, np.where(some, 1, 0)).astype(np.uint8)
    scores = tiles.repeat(mask.block_q, 0).repeat(mask.block_k, 1)[: mask.q_len, : mask.k_len]
    return np.where(live & (scores == 1), 2, scores).astype(np.uint8)
