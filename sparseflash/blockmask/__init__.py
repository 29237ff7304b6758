"""The mask type: the live scores of an attention, as data.

The `methods` of `BlockMask` import `ops` and `draw` when they are called, the only circle of imports.
"""

import sys

# Python makes a package of any folder with the package's name, such as a clone, and finds it before an editable
# install. Checked here, because all others import this part first.
if getattr(sys.modules["sparseflash"], "__file__", None) is None:
    raise ImportError(
        f"sparseflash must be the installed package; got the folder {next(iter(sys.modules['sparseflash'].__path__))}, "
        "because it lies beside the program or where Python was started: start Python in the clone, move the program, "
        "or rename the folder."
    )

from sparseflash.blockmask.mask import BlockMask as BlockMask

__all__ = ["BlockMask"]
