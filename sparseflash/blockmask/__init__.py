"""The mask type: which scores of an attention exist, as data. `mask.py` has the class, each other file one part of it.

May import nothing else of sparseflash; `BlockMask`'s methods load `draw` when they are called.
"""

from sparseflash.blockmask.mask import BlockMask as BlockMask

__all__ = ["BlockMask"]
