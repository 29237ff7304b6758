"""The pattern library: pure functions from lengths and a few numbers to a `BlockMask`, one family a file.

In the repository this folder stands at the top; it is imported as `sparseflash.masks`.
"""

if __name__ != "sparseflash.masks":
    raise ImportError("import the pattern library as sparseflash.masks, not as masks.")

from sparseflash.masks import order as order
from sparseflash.masks.axial import axial as axial
from sparseflash.masks.bigbird import bigbird as bigbird
from sparseflash.masks.bigbird import deepspeed_bigbird as deepspeed_bigbird
from sparseflash.masks.butterfly import butterfly as butterfly
from sparseflash.masks.causal import causal as causal
from sparseflash.masks.chosen_blocks import mass_blocks as mass_blocks
from sparseflash.masks.chosen_blocks import top_k_blocks as top_k_blocks
from sparseflash.masks.chosen_keys import selected_keys as selected_keys
from sparseflash.masks.chosen_keys import top_k_keys as top_k_keys
from sparseflash.masks.dilated_grid import dilated_grid as dilated_grid
from sparseflash.masks.expander import expander as expander
from sparseflash.masks.local import local as local
from sparseflash.masks.neighborhood import neighborhood as neighborhood
from sparseflash.masks.pooled_scores import pooled_scores as pooled_scores
from sparseflash.masks.random_blocks import random_blocks as random_blocks
from sparseflash.masks.sliding_tiles import sliding_tiles as sliding_tiles
from sparseflash.masks.swin import swin as swin

__all__ = [
    "axial",
    "bigbird",
    "butterfly",
    "causal",
    "deepspeed_bigbird",
    "dilated_grid",
    "expander",
    "local",
    "mass_blocks",
    "neighborhood",
    "order",
    "pooled_scores",
    "random_blocks",
    "selected_keys",
    "sliding_tiles",
    "swin",
    "top_k_blocks",
    "top_k_keys",
]
