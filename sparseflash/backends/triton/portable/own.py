"""Makes Triton functions from one's own changes of scores, `scores.function`.

The kernels call up to three: OWN computes the changed scores, their derivative and everything that the gradients need;
OWN_SUMS adds up gradients of what is indexed by queries or by keys; OWN_STORES writes those of pairs and tables.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.portable import arithmetic
from sparseflash.backends.triton.portable.biases import store_pair_gradients
from sparseflash.backends.triton.portable.own_source import HEADER, Load, Source
from sparseflash.backends.triton.portable.position_tables import add_table_gradients
from sparseflash.backends.triton.portable.scores import tanh
from sparseflash.blockmask.cache import BoundedDict
from sparseflash.scores.function import Function

_ARITHMETIC = {
    each.__name__: each
    for each in (arithmetic.floor_divide, arithmetic.log1p, arithmetic.product, arithmetic.sigmoid, arithmetic.sign)
}


class _Made(BoundedDict):
    """The functions of each text. The texts are in `linecache`, which nothing else removes them from."""

    def clear(self) -> None:
        """Forgets the functions; those still in use stay valid."""
        for found in self.values():
            linecache.cache.pop(found["__name__"], None)
        super().clear()


_made = _Made(256)


class Own:
    """The Triton functions of one's own change, and the arguments with which the kernels call them."""

    def __init__(self, change: Function, sizes: dict[str, int], device: torch.device, wanted: Sequence[bool]) -> None:
        """sizes: the attention's, of b, h, q and k. wanted: which of the function's tensors get a gradient."""
        self.loads: list[Load] = []
        if change.kernel is not None:
            self._of_kernel(change, wanted)
            return
        found, slope = change.recorded(device)
        source = Source(found.expression, found.tensors, sizes)
        self.loads = source.written(found.output, slope, [at for at, wants in enumerate(wanted) if wants])
        self._take(source.text, source.numbers, {})

    def _of_kernel(self, change: Function, wanted: Sequence[bool]) -> None:
        if any(wanted):
            raise ValueError(
                "scores.function must be without kernel= if its tensors are learned; got a kernel and tensor "
                f"{list(wanted).index(True)}, which requires gradients."
            )
        pointers = "".join(f", pointers[{number}]" for number in range(len(change.given)))
        slope = "1.0" if change.kernel_derivative is None else f"kernel_derivative(score, b, h, q, k{pointers})"
        code = [getattr(each, "cache_key", "") for each in (change.kernel, change.kernel_derivative)]
        text = (
            f"# {' '.join(code)}\n@triton.jit\ndef {HEADER}:\n"
            f"    return kernel(score, b, h, q, k{pointers}), {slope}, ()\n"
        )
        self._take(text, [], {"kernel": change.kernel, "kernel_derivative": change.kernel_derivative})

    def _take(self, text: str, numbers: Sequence[int], others: dict[str, Any]) -> None:
        made = _functions(text, others)
        self.numbers = tuple(numbers)
        self.changed = made["changed"]
        self.sums = {way: made.get(f"sums_of_{way}") for way in ("queries", "keys")}
        self.stores = made.get("stores")

    @staticmethod
    def tensors(change: Function, device: torch.device) -> tuple[Tensor, ...]:
        """The tensors whose addresses the kernels take."""
        if change.kernel is not None:
            return tuple(x.contiguous() for x in change.given)
        return change.recorded(device)[0].tensors


def _functions(text: str, others: dict[str, Any]) -> dict[str, Any]:
    """The functions of a text, the same objects for the same text, which Triton compiles once."""
    found: dict[str, Any] | None = _made.get(text)
    if found is None:
        # Triton reads the source, and its cache on disk tells functions apart by names too.
        name = f"sparseflash_own_{hashlib.sha256(text.encode()).hexdigest()[:20]}"
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        found = {
            "__name__": name, "triton": triton, "tl": tl, "tanh": tanh, "store_pair_gradients": store_pair_gradients,
            "add_table_gradients": add_table_gradients, **_ARITHMETIC, **others,
        }  # fmt: skip
        exec(compile(text, name, "exec"), found)
        for each in list(found.values()):
            if hasattr(each, "rewrite"):  # the interpreter reads the source at the first call, and it may be gone then
                each.rewrite()
        _made.put(text, found)
    return found
