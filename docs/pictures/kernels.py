"""How the kernels work: tiles and lists, bits, work order and splits, passes of the backward."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from sparseflash import BlockMask, draw, masks
from sparseflash.backends.triton.schedule.longest_first import start_order
from sparseflash.draw import colours
from sparseflash.draw.colours import hexadecimal

FULL, PARTIAL, DEAD = map(hexadecimal, (colours.FULL, colours.PARTIAL, colours.DEAD_SCORE))
EDGE = "#9aa7b8"
COLOURS = ["#ffffff", DEAD, PARTIAL, FULL]  # of draw.kinds


def bare(axis: Any) -> None:
    """No ticks and no frame."""
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_visible(False)


def small_mask() -> BlockMask:
    """A causal window with two global keys, which has full, partial and empty tiles."""
    return BlockMask.from_function(lambda q, k: (k <= q) & ((q - k < 40) | (k < 2)), 128, block=16)


def tiles() -> Figure:
    """A mask as scores, as tiles, and as the lists that a kernel reads."""
    mask = small_mask()
    kinds = draw.kinds(mask)
    blocks = mask.blocks[0]
    figure = Figure(figsize=(9.2, 3.7), layout="constrained")
    scores, grid, lists = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
    scores.imshow(mask.to_dense()[0, 0].numpy(), cmap="Greys", vmax=1.6, interpolation="nearest")
    scores.set_title("what the rule says: 128 x 128 scores", fontsize=9)
    for row in range(blocks):
        for column in range(blocks):
            kind = kinds[16 * row : 16 * row + 16, 16 * column : 16 * column + 16].max()
            colour = COLOURS[kind] if kind != 1 else "#ffffff"
            grid.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor=EDGE, linewidth=0.6))
    grid.set(xlim=(0, blocks), ylim=(blocks, 0), aspect="equal")
    grid.set_title("what is stored: live tiles of 16 x 16", fontsize=9)
    for axis in (scores, grid):
        bare(axis)
        axis.set_xlabel("keys", fontsize=8)
        axis.set_ylabel("queries", fontsize=8)
    indptr, indices, tile = mask.indptr.tolist(), mask.indices.tolist(), mask.tile.tolist()
    for row in range(blocks):
        lists.text(-0.3, row + 0.5, f"row {row}:", ha="right", va="center", fontsize=8)
        for place, entry in enumerate(range(indptr[row], indptr[row + 1])):
            full = tile[entry] == 0
            lists.add_patch(Rectangle((place, row + 0.12), 0.92, 0.76, facecolor=FULL if full else PARTIAL))
            text = f"{indices[entry]}" if full else f"{indices[entry]}\nbits {tile[entry]}"
            lists.text(
                place + 0.46,
                row + 0.5,
                text,
                ha="center",
                va="center",
                fontsize=6.5,
                color="white" if full else "black",
            )
    lists.set(xlim=(-1.6, 5), ylim=(blocks, 0))
    lists.set_title("what a kernel walks: key blocks of each row", fontsize=9)
    lists.set_aspect("auto")
    bare(lists)
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor=EDGE) for colour in (FULL, PARTIAL, "#ffffff")]
    names = ["full: no bits are read", "partial: one bit a score", "empty: not stored, never visited"]
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
    return figure


def bits() -> Figure:
    """Two tiles of a sliding window and the words that hold them; all tiles of one kind share their words."""
    mask = masks.local(256, window=64, causal=True, block=32)
    figure = Figure(figsize=(8.6, 2.75), layout="constrained")
    whole, *parts = figure.subplots(1, 3, width_ratios=(1, 1, 1))
    numbers = mask.tile.tolist()
    kinds = draw.kinds(mask)
    whole.imshow(np.array([(255, 255, 255), colours.DEAD_SCORE, colours.PARTIAL, colours.FULL], dtype=np.uint8)[kinds])
    entries = zip(numbers, mask.indices.tolist(), np.repeat(range(8), np.diff(mask.indptr.tolist())).tolist())
    for number, column, row in entries:
        text = "full" if number == 0 else str(number)
        whole.text(
            32 * column + 16,
            32 * row + 16,
            text,
            ha="center",
            va="center",
            fontsize=7,
            color="white" if number == 0 else "black",
        )
    whole.set_title(f"{len(numbers)} live tiles, {len(mask.bits)} distinct partial ones", fontsize=9)
    for number, (axis, words) in enumerate(zip(parts, mask.bits[..., 0].tolist()), 1):
        dense = np.array([[word >> bit & 1 for bit in range(32)] for word in words])
        axis.imshow(dense, cmap="Greys", vmax=1.6, interpolation="nearest")
        for row in range(0, 32, 5):
            axis.text(33, row, f"0x{words[row] & 0xFFFFFFFF:08x}", fontsize=6.5, va="center", family="monospace")
        axis.set_title(f"bits {number}: 32 words of 32 bits", fontsize=9)
    for axis in (whole, *parts):
        bare(axis)
    return figure


def schedule(lengths: list[int], order: list[int], slots: int) -> tuple[list[tuple[int, int, int]], int]:
    """Where and when each item runs if the next one starts wherever there is room: (slot, start, item), and the end."""
    free = [0] * slots
    placed = []
    for item in order:
        slot = int(np.argmin(free))
        placed.append((slot, free[slot], item))
        free[slot] += lengths[item]
    return placed, max(free)


def work_order() -> Figure:
    """The same rows on sixteen multiprocessors, in three ways."""
    mask = masks.bigbird(4096, block=128, seed=1)
    lengths = mask.indptr.diff().tolist()
    cut, chunk = [], 10
    for length in lengths:
        pieces = -(-length // chunk)
        cut += [(length // pieces + (piece < length % pieces), pieces > 1) for piece in range(pieces)]
    sizes, is_chunk = [size for size, _ in cut], [several for _, several in cut]
    global_rows = [length == max(lengths) for length in lengths]
    ways = (
        ("in the order of the rows", lengths, global_rows, list(range(len(lengths)))),
        ("longest first", lengths, global_rows, start_order(torch.tensor(lengths)).tolist()),
        ("longest first, long rows in chunks", sizes, is_chunk, start_order(torch.tensor(sizes)).tolist()),
    )
    slots = 16
    figure = Figure(figsize=(8.8, 3.2), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    for axis, (name, work, is_global, order) in zip(axes, ways):
        placed, end = schedule(work, order, slots)
        for slot, start, item in placed:
            colour = FULL if is_global[item] else PARTIAL
            axis.add_patch(
                Rectangle((start, slot), work[item], 0.86, facecolor=colour, edgecolor="white", linewidth=0.6)
            )
        axis.axvline(end, color="black", linewidth=1.2, linestyle="--")
        axis.set_title(f"{name}:\ndone after {end} tiles", fontsize=9)
        axis.set_xlabel("time, in tiles", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_yticks([])
    axes[0].set(ylim=(slots, -0.3), xlim=(0, 1.04 * max(schedule(work, order, slots)[1] for _, work, _, order in ways)))
    axes[0].set_ylabel(f"{slots} multiprocessors", fontsize=8)
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour) for colour in (FULL, PARTIAL)]
    figure.legend(
        handles,
        ["a global row, or its chunks", "another row"],
        loc="outside lower center",
        ncols=2,
        fontsize=8.5,
        frameon=False,
    )
    return figure


def passes() -> Figure:
    """The matrix products of the backward, in its two kernels."""
    figure = Figure(figsize=(8.8, 3.4), layout="constrained")
    ways = (
        ("portable: two passes, seven products, no waiting",
         (("over columns (one program a tile of keys)", ("S = Q K'", "dP = dO V'", "dV += P' dO", "dK += dS' Q")),
          ("over rows (one program a tile of queries)", ("S = Q K'", "dP = dO V'", "dQ += dS K")))),
        ("Hopper: one pass, five products, dQ in a fixed order",
         (("over columns (one program a multiprocessor)", ("S = K Q'", "dP = V dO'", "dV += P dO", "dK += dS Q")),
          ("sent through memory, each in its turn", ("dQ += dS' K",)))),
    )  # fmt: skip
    for axis, (title, lines) in zip(figure.subplots(1, 2), ways):
        bare(axis)
        axis.set(xlim=(0, 4), ylim=(2.9, 0))
        axis.set_title(title, fontsize=9.5)
        for line, (name, products) in enumerate(lines):
            axis.text(0.05, 0.22 + 1.45 * line, name, fontsize=8.5)
            for place, product in enumerate(products):
                again = line == 1 and product.startswith(("S", "dP"))
                sent = line == 1 and product.startswith("dQ += dS'")
                colour = "#f6d5c2" if again else "#cfe8dd" if sent else "#d6e4f5"
                axis.add_patch(
                    Rectangle((place + 0.05, 0.42 + 1.45 * line), 0.9, 0.6, facecolor=colour, edgecolor=EDGE)
                )
                axis.text(
                    place + 0.5, 0.72 + 1.45 * line, product, ha="center", va="center", fontsize=7.8, family="monospace"
                )
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor=EDGE) for colour in ("#d6e4f5", "#f6d5c2", "#cfe8dd")
    ]
    names = ["a product of two tiles", "computed a second time", "added to a sum that other programs add to, too"]
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "kernel-tiles.png": tiles,
    "kernel-bits.png": bits,
    "kernel-order.png": work_order,
    "kernel-backward.png": passes,
}
