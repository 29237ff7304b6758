"""`python -m experiments.benchmarks.io`: operations, bytes and milliseconds of attention, measured and by a model.

The paper (Dao et al., 2022, figure 2; N=1024, D=64, 16 heads, batch 64, forward and backward, A100): standard attention
66.6 GFLOPs, 40.3 GB, 41.7 ms; FlashAttention 75.2 GFLOPs, 4.4 GB, 7.3 ms. `ncu` counts bytes where it is installed.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments.benchmarks.harness import Bench, Commit, Device, Out, Way, chosen, passes
from experiments.training.layers.attention import ElementMask, standard_attention
from experiments.training.options import command_group
from sparseflash import BlockMask, attention, explain, masks
from sparseflash.analysis import bytes_moved, flops

STANDARD, DENSE, BUTTERFLY = "standard", "dense", "butterfly"


@dataclass(frozen=True)
class Case:
    kind: str  # STANDARD: PyTorch's operators; DENSE, BUTTERFLY: ours
    factors: int | None
    batch: int
    heads: int
    length: int  # tokens
    head_dim: int
    block: int  # tokens
    dtype: str = "bfloat16"

    @property
    def way(self) -> str:
        if self.factors is None:
            return self.kind
        return f"{self.kind}-{self.factors}-factor{'s' * (self.factors != 1)}"

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.length}-heads{self.heads}-d{self.head_dim}"

    def mask(self) -> BlockMask:
        if self.kind == BUTTERFLY:
            return masks.butterfly(self.length, factors=self.factors, block=self.block)
        return BlockMask.dense(self.length, block=self.block)

    @property
    def numbers(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def every_density(case: Case) -> list[Case]:
    most = (-(-case.length // case.block) - 1).bit_length()
    first = [replace(case, kind=kind, factors=None) for kind in (STANDARD, DENSE)]
    return first + [replace(case, kind=BUTTERFLY, factors=factors) for factors in range(most, -1, -1)]


def calls_of(case: Case, device: torch.device, seed: int = 0) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.batch, case.heads, case.length, case.head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator, device=device).to(case.numbers) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    if case.kind == STANDARD:
        return passes(partial(standard_attention, *inputs, ElementMask(None)), inputs, dout)
    mask = case.mask().to(device) if case.kind != DENSE else None
    return passes(partial(attention, *inputs, mask), inputs, dout)


def largest_difference(case: Case, device: torch.device) -> float:
    both = [calls_of(replace(case, kind=kind, factors=None), device) for kind in (STANDARD, DENSE)]
    standard, ours = ((each["forward"](), *each["both"]()) for each in both)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(standard, ours, strict=True))


_FP32 = 4  # bytes


@dataclass(frozen=True)
class Cost:
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int

    @property
    def flops(self) -> int:
        return self.forward_flops + self.backward_flops

    @property
    def bytes(self) -> int:
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True)
class Kernels:
    """The names of both passes' kernels, and how many queries (forward, dq) or keys (dk, dv) a program holds.

    fused: one kernel for dk, dv and dq, which holds keys and adds dq in fp32.
    """

    forward: str = "portable"
    backward: str = "portable"
    held: int = 64
    held_backward: int = 64
    fused: bool = False

    def names(self, which: str) -> str:
        return (
            self.forward if which == "forward" or self.forward == self.backward else f"{self.forward}, {self.backward}"
        )


def kernels_of(case: Case, capability: tuple[int, int] | None) -> Kernels:
    if capability is None or case.kind == STANDARD:
        return Kernels()
    q = torch.empty(case.batch, case.heads, case.length, case.head_dim, dtype=case.numbers)
    found = explain(q, q, q, None if case.kind == DENSE else case.mask(), capability=capability)
    assert found.forward is not None and found.backward is not None
    (forward,) = (each for each in found.kernels if each.kernel == "forward")
    (of_keys,) = (each for each in found.kernels if each.kernel.startswith("dk"))
    names = str(found.forward.family), str(found.backward.family)
    return Kernels(*names, forward.block_m, of_keys.block_n, fused=of_keys.kernel.endswith("dq"))


def cost(case: Case, kernels: Kernels | None = None) -> Cost:
    """Ours forward: `sparseflash.analysis.bytes_moved`. Backward, with e bytes per number, N, D and s as there, and m
    queries or keys held:

        delta       out, dout read, delta and lse written and read   2 e N D + 12 N
        dk, dv      k, v read, dk, dv written                        4 e N D
                    q, dout, lse, delta read for each live tile      (2 e D + 8) s N^2 / m
        dq          q, dout read, dq written                         3 e N D + 8 N
                    k, v read for each live tile                     2 e D s N^2 / m
        or, fused   dq read and written in fp32 for each live tile   8 D s N^2 / m
                    dq read in fp32 and written                      (e + 4) N D

    Standard attention writes its matrices out. Forward: write S, read S, write P, read P: `4 e N^2`. Backward: read P
    for dV, write dP, read P and dP, write dS, read dS for dQ and again for dK: `7 e N^2`; and q, k, v, out, dout and
    the gradients once for each product in which they occur.
    """
    mask, e = case.mask(), torch.empty(0, dtype=case.numbers).element_size()
    heads, n, d = case.batch * case.heads, case.length, case.head_dim
    if case.kind == STANDARD:
        product = 2 * n * n * d * heads
        return Cost(2 * product, 4 * product, heads * e * (4 * n * d + 4 * n * n), heads * e * (8 * n * d + 7 * n * n))
    kernels = kernels or Kernels()
    held, held_backward = min(kernels.held, case.block), min(kernels.held_backward, case.block)
    moved = bytes_moved(mask, d, dtype=case.numbers, tile_queries=held, batch=case.batch, heads=case.heads)
    live = live_scores(mask) * heads
    if kernels.fused:
        once = heads * ((7 * e + _FP32) * n * d + 12 * n)
        again = (2 * e * d + 2 * _FP32 * d + 2 * _FP32) * live // held_backward
    else:
        once = heads * (9 * e * n * d + 20 * n)
        again = (4 * e * d + 2 * _FP32) * live // held_backward
    performed = [
        flops(mask, d, backward=backward, batch=case.batch, heads=case.heads, dtype=case.numbers).performed
        for backward in (False, True)
    ]
    return Cost(*performed, moved.total, once + again)


def live_scores(mask: BlockMask) -> int:
    return len(mask.indices) * mask.block_q * mask.block_k


ROOT = Path(__file__).resolve().parents[2]
_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_FROM_L2, _TO_L2 = "lts__t_sectors_op_read.sum", "lts__t_sectors_op_write.sum"
_SECTOR = 32
SECONDS = 120.0


class NoCountersError(RuntimeError):
    """Raised if counters are not available."""


@dataclass(frozen=True)
class Counted:
    hbm: float
    l2: float


def counted(case: Case, which: str) -> Counted:
    tool = shutil.which("ncu")
    if tool is None:
        raise NoCountersError("ncu is not installed")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            tool, "--profile-from-start", "off", "--target-processes", "all", "--cache-control", "none",
            "--clock-control", "none", "--metrics", ",".join((_READ, _WRITTEN, _FROM_L2, _TO_L2)), "--csv",
            "--page", "raw", "--print-units", "base", "--log-file", str(log),
            sys.executable, "-m", "experiments.benchmarks.io", "one", which, json.dumps(asdict(case)),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
        except subprocess.TimeoutExpired:
            raise NoCountersError(f"ncu took longer than {SECONDS:g} s") from None
        text = log.read_text() if log.exists() else ""
        if done.returncode:
            lines = [line for line in (done.stderr + text).splitlines() if line.strip()]
            raise NoCountersError(f"ncu failed: {lines[-1] if lines else done.returncode}")
        return parse(text)


def parse(text: str) -> Counted:
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    if len(rows) < 2:
        raise NoCountersError("ncu saw no kernel")
    units, kernels = rows[0], rows[1:]
    if missing := [name for name in (_READ, _WRITTEN, _FROM_L2, _TO_L2) if name not in units]:
        raise NoCountersError(f"ncu does not count {', '.join(missing)} on this GPU")
    if units[_READ] != "byte" or units[_FROM_L2] != "sector":
        raise NoCountersError(f"ncu counts in {units[_READ]} and {units[_FROM_L2]}, not in byte and sector")

    def total(*names: str) -> float:
        return sum(float(kernel[name].replace(",", "")) for kernel in kernels for name in names)

    return Counted(total(_READ, _WRITTEN), _SECTOR * total(_FROM_L2, _TO_L2))


app = command_group("What attention costs: operations, bytes, milliseconds; the FlashAttention paper's figure 2.")
DTYPES = ("bfloat16", "float16", "float32")
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"batch": 64, "heads": 16, "length": 1024, "dim": [64], "block": 64},
    "theorem": {"batch": 1, "heads": 8, "length": 16_384, "dim": [32, 64, 128], "block": 128},
}


@app.command()
def table(
    preset: Annotated[str, typer.Option(help="paper or theorem: the sizes that are not given.")] = "paper",
    batch: Annotated[int | None, typer.Option(help="Sequences.", min=1)] = None,
    heads: Annotated[int | None, typer.Option(help="Of queries, keys and values.", min=1)] = None,
    length: Annotated[int | None, typer.Option(help="Tokens.", min=16)] = None,
    dim: Annotated[list[int] | None, typer.Option(help="Head dim; may be repeated.", min=16, max=256)] = None,
    block: Annotated[int | None, typer.Option(help="Tokens a tile: the smaller, the lower densities go.")] = None,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bfloat16",
    counters: Annotated[bool, typer.Option(help="Count bytes by ncu where it is installed; seconds a case.")] = True,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = Path("runs/io"),
) -> None:
    """Operations, bytes and milliseconds at every density of blocks, for each head dim."""
    chosen("--preset", [preset], PRESETS)
    chosen("--dtype", [dtype], DTYPES)
    given = {"batch": batch, "heads": heads, "length": length, "dim": dim, "block": block}
    sizes = PRESETS[preset] | {name: value for name, value in given.items() if value}
    dims = sizes.pop("dim")
    if sizes["length"] % sizes["block"]:
        raise typer.BadParameter(
            f"--length must be a multiple of --block, as the model counts; got {sizes['length']} and {sizes['block']}"
        )
    bench = Bench.start("io", device, commit, out)
    for each in dims:
        measure(bench, preset, Case(DENSE, None, head_dim=each, dtype=dtype, **sizes), counters)
    bench.finish()


def measure(bench: Bench, name: str, shape: Case, counters: bool) -> None:
    path, cases = f"{name}/{shape.shape}", every_density(shape)
    bench.add(f"{path}/largest-difference/dense", largest_difference(shape, bench.device), "1")
    for case in cases:
        count(bench, path, case, counters=counters and bench.device.type == "cuda")
    for which in ("forward", "both"):
        bench.time(f"{path}/time/{which}", {case.way: way_of(case, which, bench.device) for case in cases})


@app.command(hidden=True)
def one(which: str, case: str) -> None:
    """Runs one case, so that ncu sees its kernels and no others."""
    call = calls_of(Case(**json.loads(case)), torch.device("cuda"))[which]
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def way_of(case: Case, which: str, device: torch.device) -> Way:
    made = cache(lambda: calls_of(case, device)[which])
    found = cost(case)
    settings = {"flops": found.flops if which == "both" else found.forward_flops, "live": case.mask().density}
    if case.kind != STANDARD and device.type == "cuda":
        settings["kernels"] = kernels_of(case, torch.cuda.get_device_capability(device)).names(which)
    # Standard attention may run out of memory.
    return Way(lambda: made()(), settings=settings, peer=True)


def count(bench: Bench, path: str, case: Case, *, counters: bool) -> None:
    on_gpu = bench.device.type == "cuda"
    model = cost(case, kernels_of(case, torch.cuda.get_device_capability(bench.device) if on_gpu else None))
    bench.add(f"{path}/modelled-bytes/forward/{case.way}", model.forward_bytes / 1e9, "GB")
    bench.add(f"{path}/modelled-bytes/both/{case.way}", model.bytes / 1e9, "GB")
    for which in ("forward", "both") if counters else ():
        try:
            found = counted(case, which)
        except NoCountersError as failure:
            bench.add(f"{path}/hbm-bytes/{which}/{case.way}", None, "GB", failure=str(failure))
            return
        bench.add(f"{path}/hbm-bytes/{which}/{case.way}", found.hbm / 1e9, "GB")
        bench.add(f"{path}/l2-bytes/{which}/{case.way}", found.l2 / 1e9, "GB")


if __name__ == "__main__":
    app()
