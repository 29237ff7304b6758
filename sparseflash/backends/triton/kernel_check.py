"""Checks a kind of Hopper kernel on a GPU: reads the report of ptxas and tests whether the results are exact.

    python -m sparseflash.backends.triton.kernel_check KIND DEVICE

`gate.py` runs this with a `Kind` as JSON, and reads the last line of the output: the fault found, or "", and whether
the result is certain.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash import scores, testing
from sparseflash.attention import attention
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton.gate import TRYING, Kind, opened
from sparseflash.backends.triton.hopper.choices import BackwardForm, backward_form
from sparseflash.backends.triton.hopper.configs import (
    BLOCK,
    SMALL,
    backward_config_for,
    config_for,
    dkdv_config_for,
    dq_config_for,
    tile_for,
)
from sparseflash.backends.triton.prepared_call import setting_of
from sparseflash.blockmask import BlockMask
from sparseflash.scores.change import PAIRS, Scores

# Spilled bytes per thread. Where dispatch chooses them, the measured kernels spill up to 136. A tile of scores takes
# 64 registers of 4 bytes, so a kernel that spills 256 bytes spills a whole tile in its loop. The backward with a soft
# cap at D=64 spills 296 under Triton 3.6 and 3.7, and is slower than the portable kernel.
MOST_SPILLED = 256
_LENGTH = 1000  # tokens: full, partial and dead tiles, and a ragged end
# With this many tokens, a row or column that is far longer than the others is split, and another kernel merges
# partial sums, which compiles to different code.
_CUT_LENGTH = 6400


class Example(NamedTuple):
    """The inputs of an attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: BlockMask
    changes: Scores | None


def example(kind: Kind, device: torch.device, *, cut: bool) -> Example:
    """Random inputs that these kernels serve. cut: inputs whose long rows are split."""
    block = 64 if kind.small else 128
    batch, heads, kv_heads, tokens = (1, 1, 1, _CUT_LENGTH) if cut else (2, 4, 2, _LENGTH)
    if cut:
        layout = torch.eye(tokens // block, dtype=torch.bool)
        layout[0] = layout[:, 0] = True
        mask = BlockMask.from_layout(layout, q_len=tokens, k_len=tokens, block=block)
    else:
        mask = BlockMask.from_function(lambda q, k: (k <= q) & (q - k < 600) | (k < 9), tokens, tokens, block=block)
    if kind.lengths:
        ends = [5, tokens - 250]
        mask = mask.with_lengths(
            q_lengths=[max(tokens - end, 20) for end in ends[:batch]], k_lengths=[tokens - end for end in ends[:batch]]
        )
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    dtype = getattr(torch, kind.dtype)
    sizes = (heads, tokens, kind.dim), (kv_heads, tokens, kind.dim), (kv_heads, tokens, kind.v_dim or kind.dim)
    q, k, v = (drawn(batch, *each).to(device, dtype) for each in sizes)
    pairs = (batch, heads, *((len(mask.indices), block, block) if "tile_bias" in kind.changes else (tokens, tokens)))
    shapes = {
        "alibi": (heads,), "log_decay": (heads,), "sink": (heads,), "relative": (heads, 32),
        "key_bias": (batch, heads, tokens), "bias": pairs, "tile_bias": pairs,
    }  # fmt: skip
    mask = mask.to(device)
    changes = Scores(())
    for name in kind.changes:
        if name == "softcap":
            changes += scores.softcap(5.0)
            continue
        values = drawn(*shapes[name]) / 8
        values = (values.abs() if name in ("alibi", "log_decay") else values).to(device)
        values = values.to(dtype) if name in PAIRS else values
        changes += _CHANGES[name](values.requires_grad_(name in kind.learned), mask)
    return Example(q, k, v, mask, changes if kind.changes else None)


_CHANGES = {
    "alibi": lambda values, mask: scores.alibi(values),
    "log_decay": lambda values, mask: scores.log_decay(values),
    "sink": lambda values, mask: scores.sink(values),
    "relative": lambda values, mask: scores.relative(values, scores.t5_buckets()),
    "key_bias": lambda values, mask: scores.key_bias(values),
    "bias": lambda values, mask: scores.bias(values),
    "tile_bias": scores.tile_bias,
}


def fault(kind: Kind, examples: Sequence[Example]) -> str:
    """The fault of the kernels that serve these inputs; "" if none."""
    from triton import knobs

    # Triton does not store the report of ptxas, but prints it with this knob.
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    report = io.StringIO()
    ratios: list[tuple[str, float]] = []
    with redirect_stdout(report), torch.set_grad_enabled(kind.backward):
        for each in examples:
            found = testing.compare(
                partial(_ours, each), *each[:4], scores=each.changes, gradients=kind.backward, every_draw=False
            )
            ratios += found.ratios.items()
    dims = kind.dim, kind.v_dim or kind.dim
    tile = tile_for(SMALL if kind.small else BLOCK, dims)
    expected = {"forward_kernel": config_for(dims[0], tile, dims[1]).start_registers}
    if kind.backward:
        for tile, in_two in {_backward_form(kind, each) for each in examples}:
            if in_two:
                of_keys = dkdv_config_for(*dims, tile)
                expected["wide_apart_kernel" if of_keys.apart else "wide_dkdv_kernel"] = of_keys.start_registers
                expected["wide_dq_kernel"] = dq_config_for(*dims, tile).start_registers
            else:
                expected["backward_kernel"] = backward_config_for(*dims).start_registers
    wrong = ", ".join(f"{name} {ratio:.3g}" for name, ratio in ratios if not ratio <= 1)
    if wrong:
        return f"their results are wrong; errors as multiples of the allowed error: {wrong}"
    return fault_in(report.getvalue(), expected)


def _backward_form(kind: Kind, given: Example) -> BackwardForm:
    """In blocks of 64 both kinds serve, one of them where most blocks are live."""
    asked = Problem.of(given.mask, scale=1.0, batch=len(given.q))
    setting = setting_of(given.q, given.k, asked, (9, 0))
    return backward_form(setting.plan, setting.block, (kind.dim, kind.v_dim or kind.dim), kind.changes)


def _ours(given: Example, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return attention(q, k, v, given.mask, return_lse=True, scores=given.changes, backend="hopper")


def fault_in(report: str, expected: Mapping[str, int]) -> str:
    """The fault that a report of ptxas shows; "" if none. expected: registers by kernel name.

    >>> kernel = "Compiling entry function 'f' for 'sm_90a' ... 8 bytes stack frame, ... Used {} registers"
    >>> fault_in(kernel.format(168), {"f": 168}), fault_in(kernel.format(160), {"f": 168})
    ('', 'f has 160 registers a thread; it needs 168')
    """
    if found := re.search(r"\(C751[0-7]\)[^\n]*", report):
        return f"the assembler serialises matrix products: {found[0].strip()}"
    missing = set(expected)
    for text in report.split("Compiling entry function")[1:]:
        found = re.search(r"'(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers", text, re.DOTALL)
        if found is None or found[1] not in expected:
            continue
        name, spilled, used = found[1], int(found[2]), int(found[3])
        missing.discard(name)
        if used != expected[name]:
            return f"{name} has {used} registers a thread; it needs {expected[name]}"
        if spilled > MOST_SPILLED:
            return f"{name} spills {spilled} bytes a thread; it may spill {MOST_SPILLED}"
    return f"the assembler reports nothing about {', '.join(sorted(missing))}" if missing else ""


def main(kind: str, device: str) -> None:
    """Prints the fault of the kernels, as JSON."""
    dtype, dim, small, lengths, changes, learned, *rest = json.loads(kind)
    asked, gpu = Kind(dtype, dim, small, lengths, tuple(changes), tuple(learned), *rest), torch.device(device)
    torch.cuda.set_device(gpu)
    examples = [example(asked, gpu, cut=cut) for cut in (False, True)]
    print(TRYING, flush=True)
    why, certain = "", True
    try:
        with opened():
            why = fault(asked, examples)
    except Exception as error:  # Triton, the driver and our own code may raise anything
        why = f"they do not run: {type(error).__name__}: {_first_line(error)}"
        if _lacks_memory(error):
            why, certain = f"there is too little memory to check them: {_first_line(error)}", False
        elif isinstance(error, OSError):  # a fault of files or processes, not of the kernels
            certain = False
    print(json.dumps({"why": why, "certain": certain}), flush=True)


def _lacks_memory(error: Exception) -> bool:
    said = str(error).lower()
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or any(
        words in said for words in ("out of memory", "alloc_failed")
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


if __name__ == "__main__":
    main(*sys.argv[1:])
