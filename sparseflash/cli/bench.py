"""Times attention with a mask on this machine, against dense attention and other libraries with the same mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from sparseflash import BlockMask, attention, interop, masks
from sparseflash.cli.mask_mods import mask_mod_of
from sparseflash.cli.names import AS_BITS, PEERS
from sparseflash.interop.mask_mods import Rule
from sparseflash.testing import Inputs

Call = Callable[[Tensor, Tensor, Tensor], Tensor]

OURS = "sparseflash"
DENSE = "sparseflash, dense"
MASK_BYTES = 2**28  # limit for a dense mask in memory, one byte per score
COMPARED, COMPARED_ON_CPU = 16384, 4096  # tokens that are compared with fp64 before timing
SAME = 3e-2  # tolerance relative to the norm of the output: above rounding errors, below the effect of a wrong mask


@dataclass(frozen=True)
class Times:
    """Median times in milliseconds; None if not measured, and then `why`."""

    name: str
    forward: float | None = None
    both: float | None = None  # forward and backward
    why: str = ""


def peers_for(mask: BlockMask) -> list[str]:
    """The peers in PEERS that can run this mask here."""
    fits = mask.shape[0] * mask.shape[1] * mask.q_len * mask.k_len <= MASK_BYTES
    on_gpu = ["flex", *(["fa4"] if has_fa4() else [])] if mask.device.type == "cuda" else []
    return ["sdpa", *(["sdpa-mask"] if fits else []), *on_gpu]


def has_fa4() -> bool:
    """Whether FlashAttention-4 is installed and can be imported."""
    try:
        import flash_attn.cute  # noqa: F401
    except ImportError:
        return False
    return True


def corner(mask: BlockMask) -> BlockMask:
    """The mask, or its last queries and keys, few enough to compare all scores in seconds."""
    most = COMPARED if mask.device.type == "cuda" else COMPARED_ON_CPU
    if max(mask.q_len, mask.k_len) <= most:
        return mask
    return mask.crop(q=(max(0, mask.q_len - most), mask.q_len), k=(max(0, mask.k_len - most), mask.k_len))


def measured(inputs: Inputs, mask: BlockMask, peers: list[str], seconds: float) -> Iterator[Times]:
    """Yields times of ours with the mask, of ours dense, and of each peer; `seconds` is spent on each measurement."""
    expected = attention(inputs.q, inputs.k, inputs.v, mask)
    assert isinstance(expected, Tensor)
    grouped = inputs.q.shape[1] != inputs.k.shape[1]

    def ours(mask: BlockMask | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v, mask)
        assert isinstance(out, Tensor)
        return out

    yield times(OURS, partial(ours, mask), inputs, seconds)
    yield times(DENSE, partial(ours, None), inputs, seconds)
    for peer in peers:
        name = PEERS[peer]
        try:
            if peer == "sdpa":
                yield times(name, partial(F.scaled_dot_product_attention, enable_gqa=grouped), inputs, seconds)
                continue
            if peer == "flex":
                rule = mask_mod_of(mask)
                name = name if rule else f"{name}, {AS_BITS}"
                call = flex(mask, rule, grouped)
            else:
                call = fa4(mask) if peer == "fa4" else masked_sdpa(mask, grouped)
            apart = distance(call(inputs.q, inputs.k, inputs.v), expected)
            if not apart <= SAME:  # also catches NaN
                yield Times(name, why=f"wrong result: relative error {apart:.2g}")
                continue
            yield times(name, call, inputs, seconds)
        except Exception as failure:  # one peer's failure must not lose the times of the others
            words = str(failure).strip().splitlines() or [type(failure).__name__]
            fits = not isinstance(failure, torch.OutOfMemoryError)
            yield Times(name, why=words[0] if fits else "does not fit into memory")


def masked_sdpa(mask: BlockMask, grouped: bool) -> Call:
    """PyTorch's attention with a dense boolean mask in memory."""
    return partial(F.scaled_dot_product_attention, attn_mask=mask.to_dense(), enable_gqa=grouped)


def flex(mask: BlockMask, rule: Rule | None, grouped: bool) -> Call:
    """FlexAttention with the same mask, whose partial tiles are this rule's; without one, it reads the mask's bits."""
    from torch.nn.attention.flex_attention import flex_attention

    block_mask = interop.to_flex(mask, mask_mod=rule)
    return partial(torch.compile(flex_attention), block_mask=block_mask, enable_gqa=grouped)


def fa4(mask: BlockMask) -> Call:
    """FlashAttention-4 with the same mask. Its order of dimensions is [B, N, H, D]."""
    from flash_attn.cute import flash_attn_func

    options = fa4_options(mask)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)[0].transpose(1, 2)
        return out

    return call


def fa4_options(mask: BlockMask) -> dict[str, Any]:
    """The arguments of `flash_attn_func`: its own for causal masks and windows, otherwise lists of full tiles."""
    found = band(mask)
    if found is not None:
        left, right = found
        most = mask.k_len - 1
        if (left, right) == (most, 0):
            return {"causal": True}
        return {"window_size": (None if left == most else left, None if right == most else right)}
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    forward, backward, _ = interop.to_fa4(mask)  # refuses partial tiles: their rule would have to be CuTe code
    return {
        "block_sparse_tensors": BlockSparseTensorsTorch(**forward._asdict()),
        "block_sparse_tensors_bwd": BlockSparseTensorsTorch(**backward._asdict()),
    }


def band(mask: BlockMask) -> tuple[int, int] | None:
    """`(left, right)` if the live keys of every query q are exactly q - left ... q + right; otherwise None."""
    n = mask.q_len
    if n != mask.k_len:
        return None
    ends = []
    for row in (0, n - 1):
        live = mask.crop(q=(row, row + 1)).to_dense().flatten(0, -2).any(0).nonzero()
        if not len(live):
            return None
        ends.append(live)
    left, right = n - 1 - int(ends[1][0]), int(ends[0][-1])
    same = masks.local(n, left=left, right=right, block=(mask.block_q, mask.block_k)).to(mask.device)
    return (left, right) if mask == same else None


def distance(got: Tensor, expected: Tensor) -> float:
    """The relative difference of two outputs, without queries that have no live key: some libraries return NaN for
    those.
    """
    live = expected.any(-1)
    got, expected = got[live].float(), expected[live].float()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))


def times(name: str, call: Call, inputs: Inputs, seconds: float) -> Times:
    """Times a call forward, and forward with backward."""
    leaves = inputs.leaves()

    def forward() -> None:
        with torch.no_grad():
            call(inputs.q, inputs.k, inputs.v)

    def both() -> None:
        torch.autograd.grad(call(*leaves), leaves, inputs.dout)

    return Times(name, milliseconds(forward, seconds), milliseconds(both, seconds))


def milliseconds(run: Callable[[], None], seconds: float) -> float:
    """The median time of a call after a warm-up call, including the GPU's work."""
    run()
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return float(1e3 * timer.blocked_autorange(min_run_time=seconds).median)


def table(measured: Sequence[Times]) -> Table:
    """The times, each with its ratio to the first."""
    made, ours = Table(), measured[0]
    for column in ("", "forward", "times", "and backward", "times"):
        made.add_column(column, justify="right" if column else "left")
    for times in measured:
        cells = [*_cells(times.forward, ours.forward), *_cells(times.both, ours.both)]
        made.add_row(Text(times.name + (f" ({times.why})" if times.why else "")), *cells)
    return made


def _cells(ms: float | None, ours: float | None) -> tuple[str, str]:
    """The table cells of a time and of its ratio to ours."""
    if ms is None or ours is None:
        return "-", "-"
    return f"{ms:.3f}", f"{ms / ours:.2f}"
