"""The mask type: which scores of an attention are live, as data. `mask.py` has the class, the other files its parts.

It may import `cuda_driver` and nothing else of the library. Its one circle of imports is in `mask.py`: methods of
`BlockMask` import the operations of `ops` and the pictures of `draw` when they are called.
"""

from sparseflash.blockmask.mask import BlockMask as BlockMask

__all__ = ["BlockMask"]
