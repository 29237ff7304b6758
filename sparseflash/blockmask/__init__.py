"""The mask type: which scores of an attention are live, as data. `mask.py` has the class, the other files its parts.

This package must not import the rest of sparseflash; the drawing methods of `BlockMask` import `draw` when called.
"""

from sparseflash.blockmask.mask import BlockMask as BlockMask

__all__ = ["BlockMask"]
