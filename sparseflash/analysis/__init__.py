"""The cost and the reach of a mask, computed without running attention.

>>> from sparseflash import analysis, masks
>>> print(analysis.density(masks.causal(256, block=64)))
32,896 of 65,536 scores live (50.2 %), in 10 of 16 tiles (62.5 %): 6 full, 4 partial (50.8 % live)

Counts (`density`, `flops`, `bytes_moved`, `coarsening`, `balance`), the graph of tokens (`reach`,
`layers_to_full_reach`, `diameter`) and a check for common mistakes (`lint`). All are exact for heads, batch elements
and lengths, and run on the CPU, in time and memory proportional to the live tiles; for reach, to the tile graph as a
bit matrix.
"""

from sparseflash.analysis.balance import Balance as Balance
from sparseflash.analysis.balance import Load as Load
from sparseflash.analysis.balance import Spread as Spread
from sparseflash.analysis.balance import balance as balance
from sparseflash.analysis.coarsening import Coarsening as Coarsening
from sparseflash.analysis.coarsening import coarsening as coarsening
from sparseflash.analysis.density import Density as Density
from sparseflash.analysis.density import density as density
from sparseflash.analysis.flops import Flops as Flops
from sparseflash.analysis.flops import flops as flops
from sparseflash.analysis.lint import Finding as Finding
from sparseflash.analysis.lint import lint as lint
from sparseflash.analysis.reach import diameter as diameter
from sparseflash.analysis.reach import layers_to_full_reach as layers_to_full_reach
from sparseflash.analysis.reach import reach as reach
from sparseflash.analysis.traffic import Traffic as Traffic
from sparseflash.analysis.traffic import bytes_moved as bytes_moved

__all__ = [
    "Balance",
    "Coarsening",
    "Density",
    "Finding",
    "Flops",
    "Load",
    "Spread",
    "Traffic",
    "balance",
    "bytes_moved",
    "coarsening",
    "density",
    "diameter",
    "flops",
    "layers_to_full_reach",
    "lint",
    "reach",
]
