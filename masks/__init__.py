"""The pattern library: pure functions from lengths and a few numbers to a `BlockMask`, one family a file.

In the repository this folder stands at the top; it is imported as `sparseflash.masks`.
"""

if __name__ != "sparseflash.masks":
    raise ImportError("import the pattern library as sparseflash.masks, not as masks.")

from sparseflash.masks import order as order
from sparseflash.masks.butterfly import butterfly as butterfly
from sparseflash.masks.causal import causal as causal
from sparseflash.masks.local import local as local
from sparseflash.masks.neighborhood import neighborhood as neighborhood
from sparseflash.masks.sliding_tiles import sliding_tiles as sliding_tiles
from sparseflash.masks.swin import swin as swin

__all__ = ["butterfly", "causal", "local", "neighborhood", "order", "sliding_tiles", "swin"]
