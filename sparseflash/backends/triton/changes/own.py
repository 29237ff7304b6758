"""A user's score modification, `scores.function`, compiled to Triton functions.

Up to four functions are generated: `changed` computes the new scores, their derivative and the inputs of the gradients;
`sums_of_queries` and `sums_of_keys` add up gradients of tensors indexed by queries or keys; `stores` writes those of
pairs and tables.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.alignment import aligned_start
from sparseflash.backends.triton.changes.kind import Kind, Memory, Request
from sparseflash.backends.triton.changes.own_source import HEADER, Load, Source
from sparseflash.backends.triton.changes.pair_bias import are_all_live, store_pair_gradients, strides_of_all_pairs
from sparseflash.backends.triton.changes.softcap import has_hardware_tanh, tanh
from sparseflash.backends.triton.changes.table import add_table_gradients
from sparseflash.backends.triton.device_functions import arithmetic
from sparseflash.backends.triton.device_functions.arithmetic import product
from sparseflash.backends.triton.device_functions.loads import along_keys, along_queries, token_numbers
from sparseflash.backends.triton.launch.launches import SOME_PARTS
from sparseflash.blockmask.cache import BoundedDict
from sparseflash.scores.function import Function

if TYPE_CHECKING:
    from sparseflash.backends.triton.portable.learned import Call
    from sparseflash.backends.triton.schedule.plan import Plan


@triton.jit
def apply(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, read, scores, at, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    q, k = token_numbers(at.first_q, TILE_M), token_numbers(at.first_k, TILE_N)
    q, k = tl.minimum(q, at.q_len - 1), tl.minimum(k, at.k_len - 1)  # the function may index tensors with q and k
    scores, slope, more = CHANGES.kinds[NUMBER].CHANGED(
        scores, at.batch, at.head, along_queries(q, TRANSPOSED), along_keys(k, TRANSPOSED), args.tensors,
        args.numbers[0], CHANGES.kinds[NUMBER].HARDWARE_TANH,
    )  # fmt: skip
    return scores, (slope, more)


@triton.jit
def start_rows(CHANGES: tl.constexpr, NUMBER: tl.constexpr, TILE: tl.constexpr):
    return CHANGES.kinds[NUMBER].SUMS_OF_QUERIES(None, None, None, TILE)


@triton.jit
def start_columns(CHANGES: tl.constexpr, NUMBER: tl.constexpr, TILE: tl.constexpr):
    return CHANGES.kinds[NUMBER].SUMS_OF_KEYS(None, None, None, TILE)


@triton.jit
def gradient_rows(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, ds, kept, at, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Multiplies by the derivative, adds to the sums of queries, and writes the gradients of pairs and tables."""
    slope, more = kept
    if CHANGES.kinds[NUMBER].SUMS_OF_QUERIES is not None:
        sums = CHANGES.kinds[NUMBER].SUMS_OF_QUERIES(sums, ds, more, ds.shape[0])
    if CHANGES.kinds[NUMBER].STORES is not None:
        CHANGES.kinds[NUMBER].STORES(
            ds, more, args.learned, args.numbers[0], args.numbers[1], at.batch, at.head, at.first_q, at.first_k,
            at.q_len, at.k_len, MASKED,
        )  # fmt: skip
    return product(ds, slope), sums


@triton.jit
def gradient_columns(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, ds, kept, at, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    slope, more = kept
    if CHANGES.kinds[NUMBER].SUMS_OF_KEYS is not None:
        sums = CHANGES.kinds[NUMBER].SUMS_OF_KEYS(sums, ds, more, ds.shape[0])
    return product(ds, slope), sums


@triton.jit
def finish(
    CHANGES: tl.constexpr, NUMBER: tl.constexpr, args, sums, place, first, length, TILE: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, TILE)
    for number in tl.static_range(len(sums)):
        found = sums[number]
        if CUT:
            found = tl.where(first + at < length, found, 0.0)
        tl.store(args.learned[number] + place * TILE + at, found)


_ARITHMETIC = {
    each.__name__: each
    for each in (arithmetic.floor_divide, arithmetic.float_remainder, arithmetic.log1p, arithmetic.product,
                 arithmetic.sigmoid, arithmetic.sign)
}  # fmt: skip


class _Functions(BoundedDict):
    """The functions by their source text. `clear` also removes the texts from `linecache`; nothing else would."""

    def clear(self) -> None:
        for found in self.values():
            linecache.cache.pop(found["__name__"], None)
        super().clear()


_made = _Functions(256)


class Made:
    """The Triton functions made from a user's function, and the integers that the kernels pass to them."""

    def __init__(self, change: Function, sizes: dict[str, int], device: torch.device, wanted: Sequence[bool]) -> None:
        """sizes: the numbers of b, h, q and k. wanted: which of the function's tensors need a gradient."""
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
        if change.kernel is not None:
            return tuple(x.contiguous() for x in change.given)
        return change.recorded(device)[0].tensors


class OwnKind(Kind):
    """A user's function. Each read of a learned tensor is one gradient that a kernel writes: dk_dv_kernel if the tensor
    is indexed by keys alone, otherwise dq_kernel.
    """

    def __init__(self, change: Function, request: Request, wanted: Sequence[bool]) -> None:
        super().__init__({"apply": apply})
        self._wanted, self._block = list(wanted), request.block
        made = Made(change, dict(zip("bhqk", request[:4])), _device_of(change, request.device), wanted)
        self._loads = made.loads
        self.numbers = (made.numbers,)
        self.facts |= {
            "CHANGED": made.changed, "HARDWARE_TANH": has_hardware_tanh(request), "STORES": made.stores,
            "SUMS_OF_QUERIES": made.sums["queries"], "SUMS_OF_KEYS": made.sums["keys"],
        }  # fmt: skip
        self.rows, self.columns = {"gradient": gradient_rows}, {"gradient": gradient_columns}
        if made.sums["queries"] is not None:
            self.rows |= {"start": start_rows, "finish": finish}
        if made.sums["keys"] is not None:
            self.columns |= {"start": start_columns, "finish": finish}
        of_keys = [load.way for load in self._loads].count("keys")
        self.learned = Memory((SOME_PARTS,) * (len(self._loads) - of_keys), (SOME_PARTS,) * of_keys)
        self._has_pairs = any(load.way == "pairs" for load in self._loads)
        self.numbers_of_rows = (strides_of_all_pairs(request) if self._has_pairs else (),)

    def tensors(self, change: Function, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(map(aligned_start, Made.tensors(change, _device_of(change, device))))

    def planned(self, plan: Plan) -> bool:
        return are_all_live(plan, self._block) if self._has_pairs else False

    def memory(self, change: Function, call: Call, planned: bool) -> Memory:
        make = {
            "queries": lambda load: call.empty_of_queries(), "keys": lambda load: call.empty_of_keys(),
            "pairs": lambda load: call.empty_of_pairs(torch.float32, all_live=planned),
            "table": lambda load: call.zeros_of_programs(load.entries(change.given[load.tensor])),
        }  # fmt: skip
        rows = tuple(make[load.way](load) for load in self._loads if load.way != "keys")
        return Memory(rows, tuple(make[load.way](load) for load in self._loads if load.way == "keys"))

    def gradients(self, change: Any, call: Call, written: Memory) -> list[Tensor | None]:
        sums = {
            "queries": call.sums_by_query, "keys": call.sums_by_key, "pairs": lambda x: x,
            "table": call.sums_by_batch_and_head,
        }  # fmt: skip
        found: list[Tensor | None] = [None] * len(change.given)
        of_rows, of_columns = map(iter, written)
        for load in self._loads:
            part = next(of_columns if load.way == "keys" else of_rows)
            gradient = load.gradient(sums[load.way](part), change.given[load.tensor])
            before = found[load.tensor]
            found[load.tensor] = gradient if before is None else before + gradient
        return [
            torch.zeros(x.shape, device=x.device) if wants and each is None else each
            for x, wants, each in zip(change.given, self._wanted, found, strict=True)
        ]


def _device_of(change: Function, device: torch.device) -> torch.device:
    if change.given:
        return change.given[0].device
    return device if device.type != "meta" else torch.device("cpu")


def _functions(text: str, others: dict[str, Any]) -> dict[str, Any]:
    """The functions defined by a source text, cached so that Triton compiles each text once."""
    found: dict[str, Any] | None = _made.get(text)
    if found is None:
        # Triton reads a function's source with `inspect`, and its cache on disk also uses the file name.
        name = f"sparseflash_own_{hashlib.sha256(text.encode()).hexdigest()[:20]}"
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        found = {
            "__name__": name, "triton": triton, "tl": tl, "tanh": tanh, "store_pair_gradients": store_pair_gradients,
            "add_table_gradients": add_table_gradients, **_ARITHMETIC, **others,
        }  # fmt: skip
        exec(compile(text, name, "exec"), found)
        for each in list(found.values()):
            if hasattr(each, "rewrite"):  # otherwise the interpreter reads the source at the first call, maybe too late
                each.rewrite()
        _made.put(text, found)
    return found
