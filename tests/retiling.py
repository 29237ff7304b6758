"""Makes small problems run in other tiles than the mask's, as only long ones would, and returns the tiles."""

from plans import kernels_of
from sparseflash.backends.triton.overrides import override

# The candidate that a kernel takes: the mask's own tiles, the largest, the gathered ones that hold most and fewest.
WAYS = {
    "own": lambda tilings: tilings[0],
    "united": lambda tilings: max((t for t in tilings if not t.gathered), key=lambda t: (t.held, t.streamed)),
    "gathered": lambda tilings: max(tilings, key=lambda t: (t.gathered > 0, t.held)),
    "gathered, few held": lambda tilings: min(tilings, key=lambda t: (t.gathered == 0, t.held)),
}


def tilings_taken_by(way):
    """Every kernel takes one of WAYS; None: the cheapest."""
    return override(products_for_tilings=0) if way is None else override(tiling=WAYS[way])


def tilings_of(mask):
    """`{kernel: Tiling}` of all kernels that the plans of a mask have prepared."""
    return {name: kernel.choice.tiling for name, kernel in kernels_of(mask).items()}
