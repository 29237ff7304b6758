"""Compiles the kernels as a launch would, for an architecture that need not be here, and asks ptxas what came out."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sparseflash import masks
from sparseflash.backends.triton import launch
from sparseflash.backends.triton.configs import Kernel
from sparseflash.backends.triton.schedule import retiling, splits
from sparseflash.backends.triton.schedule.plan import plan_of
from sparseflash.backends.triton.schedule.tilings import Tiling

TOKENS = 1024


@dataclass(frozen=True)
class Report:
    """One compiled kernel."""

    arch: int  # 90 for compute capability 9.0
    kernel: str
    arithmetic: str
    dim: int
    value_dim: int
    block: int
    descriptors: bool
    lengths: bool
    dropout: bool
    split: bool  # for a mask with rows and columns that are cut into chunks
    gathered: bool  # tiles are gathered from the blocks of the mask
    registers: int  # a thread
    spilled: int  # bytes a thread writes to memory for want of registers
    shared: int  # bytes of shared memory a program
    wgmma: int  # Hopper's asynchronous matrix instructions in the code
    serialised: bool  # ptxas could not keep those asynchronous
    two_layouts: bool  # some place in shared memory is read under two layouts, which ptxas 12.8 gets wrong


class _NoDevice:
    """Stands in for the CUDA driver: answers what a compilation asks."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_all(
    arch: int,
    arithmetic: str,
    dim: int,
    *,
    value_dim: int | None = None,
    block: int = 128,
    descriptors: bool = False,
    lengths: bool = False,
    dropout: bool = False,
    split: bool = False,
    gathered: bool = False,
    only: Kernel | None = None,
) -> list[Report]:
    """Forward, dK/dV and dQ for `arithmetic` ("bfloat16", "float16", "tf32", "float32") and head dim `dim`.

    For float32 also what makes pieces, and dQ in two forms. Each kernel once.
    `value_dim`: that of the values, if it is another. `descriptors`: the launcher is to use them where it can. `split`:
    with rows and columns that are cut into chunks, and so with the kernels that merge them. `gathered`: the mask has
    small blocks, and tiles are gathered from as many as they have room for; without it they are those of the mask.
    `only`: compile nothing else.
    """
    at_least = mock.patch.object(launch, "_PRODUCTS_FOR_DESCRIPTORS", 0 if descriptors else 1 << 62)
    with compiling_for(arch, only) as compiled, at_least, _cutting(split), _gathering(gathered):
        _launch_all(arithmetic, dim, value_dim or dim, block, lengths, dropout)
    asked = {
        "arch": arch, "arithmetic": arithmetic, "dim": dim, "value_dim": value_dim or dim, "block": block,
        "lengths": lengths, "dropout": dropout, "split": split, "gathered": gathered,
    }  # fmt: skip
    different = {(name, kernel.hash): (name, kernel) for name, kernel in compiled}
    return [_report(name, kernel, asked) for name, kernel in different.values()]


@contextmanager
def compiling_for(arch: int, only: Kernel | None = None) -> Iterator[list[tuple[str, Any]]]:
    """Launches compile for that architecture and run nothing; yields `(name, compiled kernel)` as they come."""
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if only is not None and self.fn.__name__ != f"{only}_kernel":
            return None
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, kernel))
        return None

    with (
        mock.patch.object(driver, "_active", _NoDevice(arch)),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(launch, "capability_of", lambda device: divmod(arch, 10)),
    ):
        yield compiled


@contextmanager
def _cutting(split: bool) -> Iterator[None]:
    """Whether plans cut all rows and columns of more than one tile, or none."""
    rule = splits.Rule(multiprocessors=1 << 40, fewest=1, far=0.0, worth=1.0) if split else splits.NEVER
    with mock.patch.object(splits, "RULE", rule):
        yield


@contextmanager
def _gathering(gathered: bool) -> Iterator[None]:
    """Whether plans take the gathered tiles that hold most, or the tiles of the mask."""

    def choose(tilings: Sequence[Tiling], *asked: Any) -> Tiling:
        found = [tiling for tiling in tilings if tiling.gathered]
        if not found:
            raise ValueError(f"blocks of {tilings[0].streamed} tokens are too large to be gathered")
        return max(found)

    with (
        mock.patch.object(launch, "_PRODUCTS_FOR_TILINGS", 0 if gathered else 1 << 62),
        mock.patch.object(retiling, "choose", choose),
    ):
        yield


def _launch_all(arithmetic: str, dim: int, value_dim: int, block: int, lengths: bool, dropout: bool) -> None:
    dtype = torch.float32 if arithmetic in ("tf32", "float32") else getattr(torch, arithmetic)
    q, k, dq, dk, v, out, dout, dv = (torch.empty(1, 2, TOKENS, d, dtype=dtype) for d in [dim] * 4 + [value_dim] * 4)
    lse, dlse = torch.empty(1, 2, TOKENS), torch.empty(1, 2, TOKENS)
    kept = torch.empty((2, 1, 2, TOKENS) if dtype == torch.float32 else (0,))
    mask = masks.causal(TOKENS, block=block)
    arrays = mask.indptr, mask.indices, mask.tile, mask.words, mask.pattern
    plan = plan_of(*arrays, (1, 2), 2, (TOKENS, TOKENS), (block, block))
    stops = torch.tensor([100], dtype=torch.int32) if lengths else None
    seed = torch.tensor([0]) if dropout else None
    problem = launch.Problem(plan, stops, (block, block), dim**-0.5, arithmetic == "tf32", seed, 26 if dropout else 0)
    q, k, v, dout = launch.operands(problem, q, k, v, dout)
    launch.forward(problem, q, k, v, out, lse, kept)
    launch.backward(problem, q, k, v, out, lse, kept, dout, dlse, dq, dk, dv)


def _report(name: str, kernel: Any, asked: dict[str, Any]) -> Report:
    ptx = kernel.asm["ptx"]
    output = _ptxas(ptx, asked["arch"])
    registers = re.search(r"Used (\d+) registers", output)
    spilled = re.search(r"(\d+) bytes spill stores", output)
    if registers is None or spilled is None:
        raise RuntimeError(f"ptxas did not say what {name} uses: {output}")
    return Report(
        kernel=name.removesuffix("_kernel"),
        descriptors="cp.async.bulk.tensor" in ptx,  # what the launcher chose; it may decline
        registers=int(registers[1]),
        spilled=int(spilled[1]),
        shared=kernel.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        serialised=re.search(r"C75\d\d", output) is not None,
        two_layouts=has_two_layouts(ptx),
        **asked,
    )


def has_two_layouts(ptx: str) -> bool:
    """Whether tiles that matrix instructions read under different layouts take turns at one address.

    A descriptor is the address, in 14 bits, and the layout, in the upper half of 64; the compiler adds or ors them.

    >>> one = "or.b64 %rd5, %rd1, 4611686293305294848; add.s64 %rd6, %rd1, 4611686293305294850;"  # 0x40000040...
    >>> has_two_layouts(one), has_two_layouts(one + "add.s64 %rd7, %rd1, -4611685949707911136;")  # 0xc0000010...
    (False, True)
    """
    layouts: dict[str, set[int]] = {}
    for address, number in re.findall(r"(?:or|add)\.[bs]64\s+%rd\d+, (%rd\d+), (-?\d+);", ptx):
        layout = int(number) % 2**64 >> 32
        if layout >> 30 and not layout & 0x3FFFFF00:  # one of three shuffles, and a stride below 256 x 16 bytes
            layouts.setdefault(address, set()).add(layout)
    return any(len(each) > 1 for each in layouts.values())


def _ptxas(ptx: str, arch: int) -> str:
    target = re.search(r"\.target (\w+)", ptx)
    if target is None:
        raise RuntimeError("the PTX names no target")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            get_ptxas(arch).path,
            "-v",
            "--gpu-name",
            target[1],
            str(source),
            "-o",
            str(Path(scratch) / "kernel.cubin"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ptxas refused the kernel: {done.stderr}")
    return done.stderr
