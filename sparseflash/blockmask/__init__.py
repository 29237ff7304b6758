"""The mask type: which scores of an attention exist, as data. `mask.py` has the class, each other file one part of it.

May import `cuda_driver`, and is imported by everything else. Only `mask.py` has a circle of imports: methods of
`BlockMask` call the operations of `ops` and the pictures of `draw`, and import them when they are called.
"""

from sparseflash.blockmask.mask import BlockMask as BlockMask

__all__ = ["BlockMask"]
