"""Pictures of a mask: a matplotlib figure, HTML for notebooks, text for terminals.

All three are made of the same two things: `panels`, which finds the different pictures that the heads and batch
elements need, and `shares`, the live share of each cell of a coarse grid, computed from the list of live tiles.

May import `blockmask`, whose methods import it.
"""

from sparseflash.draw.cells import Shares as Shares
from sparseflash.draw.cells import shares as shares
from sparseflash.draw.figure import plot as plot
from sparseflash.draw.html import to_html as to_html
from sparseflash.draw.panels import Panel as Panel
from sparseflash.draw.panels import panels as panels
from sparseflash.draw.scores import MEANINGS as MEANINGS
from sparseflash.draw.scores import kinds as kinds
from sparseflash.draw.text import to_string as to_string

__all__ = ["MEANINGS", "Panel", "Shares", "kinds", "panels", "plot", "shares", "to_html", "to_string"]
