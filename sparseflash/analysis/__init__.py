"""The cost and the reach of a mask, computed without running attention.

>>> from sparseflash import analysis, masks
>>> print(analysis.density(masks.causal(256, block=64)))
32,896 of 65,536 scores live (50.2 %), in 10 of 16 tiles (62.5 %): 6 full, 4 partial (50.8 % live)

Counts (`density`, `flops`, `bytes_moved`, `coarsening`, `balance`), the graph of tokens (`reach`,
`layers_to_full_reach`, `diameter`) and a check for common mistakes (`lint`). They run on the CPU, in time and memory
proportional to the live tiles (for reach, to the tile graph as a bit matrix).
"""

from sparseflash.analysis.balance import Balance, Load, Spread, balance
from sparseflash.analysis.coarsening import Coarsening, coarsening
from sparseflash.analysis.density import Density, density
from sparseflash.analysis.flops import Flops, flops
from sparseflash.analysis.lint import Finding, lint
from sparseflash.analysis.reach import diameter, layers_to_full_reach, reach
from sparseflash.analysis.traffic import Traffic, bytes_moved

__all__ = [
    "Balance", "Coarsening", "Density", "Finding", "Flops", "Load", "Spread", "Traffic", "balance", "bytes_moved",
    "coarsening", "density", "diameter", "flops", "layers_to_full_reach", "lint", "reach",
]  # fmt: skip
