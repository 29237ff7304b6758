"""Masks, drawn by the library."""

from collections.abc import Callable

from matplotlib.figure import Figure

from sparseflash import BlockMask, analysis, masks


def drawn(panels: dict[str, BlockMask], *, columns: int = 4, share: str = "live", **options: bool | int) -> Figure:
    """Several masks side by side, each with its density."""
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(2.3 * columns, 2.55 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis, (name, mask) in zip(axes.flat, panels.items()):
        mask.plot(axis, legend=False, **options)
        axis.set_title(f"{name}\n{100 * mask.density:.3g} % {share}", fontsize=9)
        axis.set_xlabel("")
        axis.set_ylabel("")
        axis.set_xticks([])
        axis.set_yticks([])
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    return figure


def dilated() -> Figure:
    """The page's pattern, score by score: the skipped tiles, and the bits of partial tiles."""
    mask = BlockMask.from_function(lambda q, k: ((q - k).abs() <= 64) & ((q - k) % 2 == 0), 256, block=64)
    figure = Figure(figsize=(4.6, 4.9), layout="constrained")
    mask.plot(figure.subplots(), elements=True)
    return figure


def combined() -> Figure:
    """Two masks, their union, and the causal part of the union."""
    near, far = masks.local(2048, window=256, block=64), masks.butterfly(2048, block=64)
    return drawn(
        {
            "near = local": near, "far = butterfly": far, "near | far": near | far,
            "(near | far) & causal": (near | far) & masks.causal(2048, block=64),
        }
    )  # fmt: skip


def families() -> Figure:
    """One mask of each kind, for the page about choosing."""
    tokens, block = 1024, 32
    return drawn(
        {
            "local": masks.local(tokens, window=192, block=block),
            "streaming": masks.streaming(tokens, window=160, sink=16, block=block),
            "longformer": masks.longformer(tokens, window=128, global_tokens=32, block=block),
            "bigbird": masks.bigbird(tokens, block=block),
            "butterfly": masks.butterfly(tokens, block=block),
            "butterfly, causal": masks.butterfly(tokens, causal=True, block=block),
            "strided": masks.strided(tokens, stride=128, block=block),
            "documents": masks.documents([300, 84, 512, 128], causal=True, block=block),
        },
        elements=True,
    )


def six() -> Figure:
    """Six masks, for README.md and the first page."""
    tokens, block = 1024, 32
    order = masks.order.tiles((32, 32), (4, 8))
    figure = drawn(
        {
            "causal window": masks.local(tokens, window=192, causal=True, block=block),
            "butterfly": masks.butterfly(tokens, block=block),
            "BigBird": masks.bigbird(tokens, block=block),
            "packed documents": masks.documents([300, 84, 512, 128], causal=True, block=block),
            "an image in tiles": masks.neighborhood((32, 32), window=9, order=order, block=block),
            "a rule of your own": BlockMask.from_function(
                lambda q, k: ((q - k).abs() < 64) | ((q + k - tokens).abs() < 64), tokens, block=block
            ),
        },
        columns=6,
        elements=True,
    )  # fmt: skip
    figure.set_size_inches(10.2, 2.1)
    return figure


def reach() -> Figure:
    """Who has influenced whom after one, two, ... layers of a window and of a butterfly."""
    tokens, block = 2048, 64
    panels = {}
    for name, mask in {"local": masks.local(tokens, window=256, block=block),
                       "butterfly": masks.butterfly(tokens, block=block)}.items():  # fmt: skip
        for layers in (1, 2, 3, 5):
            panels[f"{name}, {layers} layer{'s' * (layers > 1)}"] = analysis.reach(mask, layers)
    return drawn(panels, share="reached")


FIGURES: dict[str, Callable[[], Figure]] = {
    "masks.png": six,
    "pattern-dilated.png": dilated,
    "pattern-combined.png": combined,
    "pattern-families.png": families,
    "pattern-reach.png": reach,
}
