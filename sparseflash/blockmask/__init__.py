"""The mask type: which scores of an attention are live, as data. `mask.py` has the class, the other files its parts.

May import `cuda_driver`, and is imported by everything else. The only circular imports are those of `mask.py`: methods
of `BlockMask` call the operations of `ops` and the pictures of `draw`, and import them when they are called.
"""

from sparseflash.blockmask.mask import BlockMask as BlockMask

__all__ = ["BlockMask"]
