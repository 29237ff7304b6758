"""Pictures of a mask: a matplotlib figure, HTML for notebooks, text for terminals.

>>> from sparseflash import draw, masks
>>> draw.shares(masks.causal(64, block=16), rows=2, cols=2).live.tolist()
[[0.515625, 0.0], [1.0, 0.515625]]
"""

from sparseflash.draw.cells import Shares, shares
from sparseflash.draw.figure import plot
from sparseflash.draw.html import to_html
from sparseflash.draw.panels import Panel, panels
from sparseflash.draw.scores import MEANINGS, kinds
from sparseflash.draw.text import to_string

__all__ = ["MEANINGS", "Panel", "Shares", "kinds", "panels", "plot", "shares", "to_html", "to_string"]
