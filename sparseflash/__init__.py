"""sparseflash: exact block-sparse attention.

`BlockMask` says which scores exist, `attention` computes exactly those, `sparseflash.masks` has ready patterns.
"""

from sparseflash.attention import attention as attention
from sparseflash.blockmask import BlockMask as BlockMask

__version__ = "0.1.0"
__all__ = ["BlockMask", "attention"]
