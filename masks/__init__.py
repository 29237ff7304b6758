"""The pattern library: pure functions from lengths and a few numbers to a `BlockMask`, one family a file.

In the repository this folder stands at the top; it is imported as `sparseflash.masks`.
"""

if __name__ != "sparseflash.masks":
    raise ImportError("import the pattern library as sparseflash.masks, not as masks.")

from sparseflash.masks.butterfly import butterfly as butterfly
from sparseflash.masks.causal import causal as causal
from sparseflash.masks.chosen_blocks import mass_blocks as mass_blocks
from sparseflash.masks.chosen_blocks import top_k_blocks as top_k_blocks
from sparseflash.masks.chosen_keys import selected_keys as selected_keys
from sparseflash.masks.chosen_keys import top_k_keys as top_k_keys
from sparseflash.masks.local import local as local
from sparseflash.masks.pooled_scores import pooled_scores as pooled_scores

__all__ = [
    "butterfly",
    "causal",
    "local",
    "mass_blocks",
    "pooled_scores",
    "selected_keys",
    "top_k_blocks",
    "top_k_keys",
]
