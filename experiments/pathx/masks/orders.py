from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sparseflash.masks import order

BASE = "hilbert"
ORDERS = (BASE, "rows", "columns")


@lru_cache(maxsize=16)
def pixels_in(name: str, side: int) -> NDArray[np.int64]:
    """Pixel (row * side + column) t of the order, int64 [side * side].

    >>> pixels_in("columns", 2).tolist()
    [0, 2, 1, 3]

    "hilbert": any run of tokens is a compact piece of the image, even if many pixels are dropped.
    """
    if name == BASE:
        return order.hilbert((side, side)).numpy()
    places = np.arange(side * side)
    if name == "rows":
        return places
    if name == "columns":
        return places.reshape(side, side).T.flatten()
    raise ValueError(f"the order must be one of {', '.join(ORDERS)}; got {name!r}")
