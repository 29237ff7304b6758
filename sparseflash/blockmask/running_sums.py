"""The bounds of sequences that lie one behind the other, as running sums of their lengths."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from sparseflash.blockmask.arguments import integers
from sparseflash.blockmask.cache import BoundedDict

_sums = BoundedDict(32)


def running_sums(values: Any, name: str) -> tuple[int, ...]:
    """Running sums as Python integers, checked. A tensor on a GPU is read again only after it was written to."""
    remembered = isinstance(values, Tensor) and values.device.type != "cpu" and not values.is_inference()
    if remembered and (found := _sums.get(id(values))) is not None and found[1] == values._version:
        return found[2]  # type: ignore[no-any-return]
    sums = tuple(integers(values, name).tolist())
    if not sums or sums[0] != 0 or any(a > b for a, b in pairwise(sums)):
        shown = str(list(sums)) if len(sums) <= 8 else f"{str(list(sums[:8]))[:-1]}, ...]"
        raise ValueError(f"{name} must be running sums that begin with 0 and do not decrease; got {shown}.")
    if remembered:
        _sums.put(id(values), (values, values._version, sums))  # the id is not reused while the tensor is kept
    return sums
