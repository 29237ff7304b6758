"""What a mask costs and what it reaches, before anything runs.

Counts (`density`, `flops`, `bytes_moved`, `coarsening`, `balance`), the graph of tokens (`reach`,
`layers_to_full_reach`, `diameter`) and a check for common mistakes (`lint`). All of it is exact, takes time and memory
of the live tiles (reach: of the tile graph as bits), runs on the CPU wherever the mask lies, and honours heads, batch
elements and lengths.

May import `blockmask` alone: nothing here runs attention.
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
