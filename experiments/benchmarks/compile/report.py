"""Compiles the kernels as a launch would, for an architecture that need not be present, and reads ptxas's reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.compile.resources import said_by_ptxas
from experiments.benchmarks.compile.without_gpu import compiling_for
from sparseflash import BlockMask, masks
from sparseflash.backends.problem import Problem
from sparseflash.backends.saved import Saved
from sparseflash.backends.triton.configs import Config, Kernel
from sparseflash.backends.triton.direct_start import parameters_of_compiled
from sparseflash.backends.triton.launcher import BoundLaunch
from sparseflash.backends.triton.overrides import NEVER_SPLIT, always_split, override
from sparseflash.backends.triton.portable.backward_pass import Backward, BackwardLayout
from sparseflash.backends.triton.portable.forward_pass import Forward, ForwardLayout
from sparseflash.backends.triton.prepared_call import setting_of
from sparseflash.backends.triton.schedule.tilings import Tiling
from sparseflash.backends.triton.versions import is_measured, triton_version
from sparseflash.dropout import GROUP, Dropout
from sparseflash.scores.change import Scores, Sizes

HEADS, TOKENS = 2, 1024


@dataclass(frozen=True)
class Report:
    kernel: str
    descriptors: bool
    stages: int  # fewer than configured if those do not fit
    registers: int  # per thread
    spilled: int  # bytes a thread
    shared: int  # bytes a program
    wgmma: int  # asynchronous matrix instructions
    serialised: bool  # ptxas could not keep them asynchronous
    direct: bool  # launches may bypass Triton's launcher
    two_layouts: bool  # one address in two layouts, which ptxas 12.8 miscompiles


def compile_all(arch: int, arithmetic: str, dim: int, **options: Any) -> list[Report]:
    """Forward, dK/dV and dQ for `arithmetic` ("bfloat16", "float16", "tf32", "float32") and head dim `dim`.

    For float32 also the kernel that splits numbers into pieces, and dQ in two forms. options: see `launched`.
    """
    return [_report(name, kernel) for name, kernel in launched(arch, arithmetic, dim, **options)]


def launched(
    arch: int, arithmetic: str, dim: int, *, value_dim: int | None = None, block: int = 128, descriptors: bool = False,
    split: bool = False, gathered: bool = False, only: Kernel | None = None, config: Config | None = None,
    assemble: bool = False, **passes: Any,
) -> list[tuple[str, Any]]:  # fmt: skip
    """descriptors: where possible. split: rows and columns are cut into chunks. gathered: each tile is gathered from
    small blocks. config: of the kernel `only`. assemble: leave the kernels in Triton's cache for a launch. passes: see
    `launch_all`.
    """
    choices = {
        "descriptors": descriptors, "splits": always_split(1) if split else NEVER_SPLIT,
        "tiling": _gathered if gathered else lambda tilings: tilings[0],
        "configs": {} if only is None or config is None else {only: config},
    }  # fmt: skip
    with override(**choices), compiling_for(arch, only, assemble=assemble) as compiled:
        launch_all(arch, arithmetic, dim, value_dim or dim, block, **passes)
    return list({(name, kernel.hash): (name, kernel) for name, kernel in compiled}.values())


def _gathered(tilings: Sequence[Tiling]) -> Tiling:
    found = [tiling for tiling in tilings if tiling.gathered]
    if not found:
        raise ValueError(f"blocks of {tilings[0].streamed} tokens are too large to be gathered")
    return max(found)


def launch_all(
    arch: int, arithmetic: str, dim: int, value_dim: int, block: int, *, lengths: bool = False, dropout: bool = False,
    positions: bool = False, changes: Scores | None = None,
) -> list[BoundLaunch]:  # fmt: skip
    """A forward and a backward, with a gradient of lse.

    positions: dropout as in a call on some of a sequence's tokens. changes: for 2 heads and TOKENS tokens; all their
    tensors require gradients.
    """
    mask, dims = masks.causal(TOKENS, block=block), (dim, value_dim)
    placed = "positions" if positions else "places"
    problem = problem_of(mask, dim, lengths=lengths, dropout=placed if dropout else "")
    prepared, forward, backward, (q, k, v, dout) = both_passes(arch, arithmetic, dims, mask, problem, changes)
    out, lse, kept = forward(q, k, v, problem.lengths, problem.dropout, prepared)
    arguments = dout, torch.empty_like(lse), Saved(q, k, v, out, lse, kept), problem.lengths, problem.dropout
    if prepared is None:
        backward(*arguments)
    else:
        backward.with_learned(*arguments, prepared)
    return [*forward.launches(), *backward.launches()]


def problem_of(mask: BlockMask, dim: int, *, lengths: bool, dropout: str) -> Problem:
    dropping = Dropout(torch.tensor([0]), 26) if dropout else None
    if dropping is not None and dropout == "positions":
        counts = mask.q_len, -(-mask.k_len // GROUP)
        queries, groups = (torch.arange(count, dtype=torch.int32) for count in counts)
        dropping = dropping._replace(queries=queries, groups=groups)
    return Problem.of(mask.with_lengths(torch.tensor([100])) if lengths else mask, scale=dim**-0.5, dropout=dropping)


def both_passes(
    arch: int, arithmetic: str, dims: tuple[int, int], mask: BlockMask, problem: Problem, changes: Scores | None,
    learned: bool = True,
) -> tuple[Scores | None, Forward, Backward, list[Tensor]]:  # fmt: skip
    """The changes as the passes take them, the passes of HEADS heads, and q, k, v and dout. Nothing is compiled yet."""
    dtype = torch.float32 if arithmetic in ("tf32", "float32") else getattr(torch, arithmetic)
    q, k, v, dout = (torch.empty(1, HEADS, mask.q_len, d, dtype=dtype) for d in (dims[0], *dims, dims[1]))
    setting = setting_of(q, k, problem, divmod(arch, 10))._replace(tf32=arithmetic == "tf32")
    numbers = problem.scale, problem.dropped
    wanted: list[bool] = []
    if changes is not None:
        changes = changes.prepared(Sizes(1, HEADS, mask.q_len, mask.k_len, q.device, mask))
        wanted = [learned and x.is_floating_point() for x in changes.tensors()]
    forward = Forward(ForwardLayout(setting, q, k, v, *numbers, changes), setting.plan)
    layout = BackwardLayout(setting, q, k, v, dout, dout, *numbers, dlse=True, changes=changes, wanted=wanted)
    return changes, forward, Backward(layout, setting.plan), [q, k, v, dout]


def _report(name: str, kernel: Any) -> Report:
    ptx = kernel.asm["ptx"]
    said, _ = said_by_ptxas(kernel)
    return Report(
        kernel=name.removesuffix("_kernel"),
        descriptors="cp.async.bulk.tensor" in ptx,  # the launcher may decline them
        stages=kernel.metadata.num_stages,
        registers=said.registers,
        spilled=said.spilled,
        shared=kernel.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        serialised=bool(said.serialised),
        direct=is_measured(triton_version()) and parameters_of_compiled(kernel, kernel.src.fn.arg_names) is not None,
        two_layouts=has_two_layouts(ptx),
    )


def has_two_layouts(ptx: str) -> bool:
    """Whether one address holds, at different times, tiles that matrix instructions read in different layouts.

    A descriptor holds the address in 14 bits and the layout in the upper half of its 64.

    >>> one = "or.b64 %rd5, %rd1, 4611686293305294848; add.s64 %rd6, %rd1, 4611686293305294850;"  # 0x40000040...
    >>> has_two_layouts(one), has_two_layouts(one + "add.s64 %rd7, %rd1, -4611685949707911136;")  # 0xc0000010...
    (False, True)
    """
    layouts: dict[str, set[int]] = {}
    for address, number in re.findall(r"(?:or|add)\.[bs]64\s+%rd\d+, (%rd\d+), (-?\d+);", ptx):
        layout = int(number) % 2**64 >> 32
        if layout >> 30 and not layout & 0x3FFFFF00:
            layouts.setdefault(address, set()).add(layout)
    return any(len(each) > 1 for each in layouts.values())
