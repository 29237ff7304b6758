"""The mask type: which scores of an attention are live, as data. `mask.py` has the class, the other files its parts.

It may import `cuda_driver` and `limits`, and nothing else of the library. Its one circle of imports is in `mask.py`:
methods of `BlockMask` import the operations of `ops` and the pictures of `draw` when they are called.
"""

import sys

# Of a folder that has the package's name and no __init__.py, as that of a clone, Python makes a package, too, and finds
# it before an editable install. Checked here because every other part of the library imports this one first.
if getattr(sys.modules["sparseflash"], "__file__", None) is None:
    raise ImportError(
        f"sparseflash must be the installed package; got the folder {next(iter(sys.modules['sparseflash'].__path__))}, "
        "because it lies beside the program or where Python was started: start Python in the clone, move the program, "
        "or rename the folder."
    )

from sparseflash.blockmask.mask import BlockMask as BlockMask

__all__ = ["BlockMask"]
