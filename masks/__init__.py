"""The pattern library: pure functions from lengths and a few numbers to a `BlockMask`, one family a file.

In the repository this folder stands at the top; it is imported as `sparseflash.masks`.
"""

if __name__ != "sparseflash.masks":
    raise ImportError("import the pattern library as sparseflash.masks, not as masks.")

from sparseflash.masks.butterfly import butterfly as butterfly
from sparseflash.masks.causal import causal as causal
from sparseflash.masks.local import local as local
from sparseflash.masks.stack import per_batch as per_batch
from sparseflash.masks.stack import per_head as per_head

__all__ = ["butterfly", "causal", "local", "per_batch", "per_head"]
