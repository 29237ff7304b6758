"""`python -m experiments.benchmarks tune`: tile sizes of the portable kernels, compiled, timed and checked.

A configuration is queries x keys x warps x stages, then x registers if they are limited, and q if the queries are
multiplied from registers: 64x64x4x3x168, 64x64x4x3q. It goes into `configs.py` by hand if it is exact and takes at most
98 % of the time; then run `pytest -m gpu` and the benchmark `speed`. No kernel is tuned at run time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any, NamedTuple

import torch
import typer

from experiments.benchmarks.harness import Bench, Commit, Out, Rounds, chosen
from experiments.benchmarks.speed.patterns import PLAIN_KINDS, block_mask
from experiments.benchmarks.speed.precision import products_in_tf32
from experiments.benchmarks.timing import Timed, in_turns
from experiments.training.workers import available_cores, worker_pool
from sparseflash import attention, testing
from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.backends.triton.configs import Arithmetic, Config, Kernel
from sparseflash.backends.triton.overrides import override
from sparseflash.backends.triton.portable.fitting import held_and_streamed, results_and_scores

KERNELS: tuple[Kernel, ...] = ("forward", "dk_dv", "dq")
ARITHMETICS: tuple[Arithmetic, ...] = ("half", "tf32", "fp32")
DIMS = (32, 64, 128, 256)
LOADS = ("descriptors", "pointers")
MASKS = ("dense", "causal", "butterfly", "local", "bigbird", "random12")
SHIPPED = "of the shipped configuration's time"  # the unit of a candidate's time, its mean over the masks
CHECKED = 3  # of the fastest candidates
_TILES = (16, 32, 64, 128)
_LIMITS = (128, 168)  # leave a multiprocessor room for 16 warps, or 12
_REGISTERS = 65_536  # of 32 bits, per multiprocessor
_SHARED = 232_448  # bytes per program, the most of any architecture
_CHANNELS = 2048  # all heads together
# Spills outside the loop over full tiles, because registers are limited; times show the effect.
_SPILLED_FOR_A_PROGRAM = 180


class Target(NamedTuple):
    kernel: Kernel
    arithmetic: Arithmetic
    dim: int  # padded to a power of two
    descriptors: bool  # or by pointers

    def __str__(self) -> str:
        return f"{self.kernel}/{self.arithmetic}/{self.dim}"


def parse(text: str) -> Config:
    """
    >>> parse("64x64x4x3x128q")
    Config(block_m=64, block_n=64, num_warps=4, num_stages=3, registers=128, q_in_registers=True)
    """
    parts = text.removesuffix("q").split("x")
    if len(parts) not in (4, 5) or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"--config must be as 64x128x8x2, 64x64x4x3x168 or 64x64x4x3q; got {text!r}.")
    config = Config(*map(int, parts))._replace(q_in_registers=text.endswith("q"))
    if any(number < 1 or number & (number - 1) for number in config[:3]):
        raise typer.BadParameter(f"--config must have powers of two as tiles and warps; got {text!r}.")
    return config


def candidates(target: Target) -> list[Config]:
    half = target.arithmetic == "half"
    limits = (0, *_LIMITS) if half else (0,)
    in_registers = (False, True) if half and target.kernel == "forward" else (False,)
    every = product(_TILES, _TILES, (4, 8), (1, 2, 3, 4), limits, in_registers)
    return [config for config in (Config(*numbers) for numbers in every) if _fits(target, config)]


def _fits(target: Target, config: Config) -> bool:
    size = {"half": 2, "tf32": 4, "fp32": 6}[target.arithmetic]
    m, n, dim = config.block_m, config.block_n, target.dim
    held, other = held_and_streamed(target.kernel, (m, n))
    kept, streamed = held * dim * (1 if target.kernel == "forward" else 2), 2 * other * dim
    threads = 32 * config.num_warps
    if results_and_scores(target.kernel, m, n, dim) > min(0.9 * (config.registers or 255) * threads, _REGISTERS):
        return False
    # Every warp must have work. In fp32 several warps may share the columns of a few tokens.
    if (held * dim if target.arithmetic == "fp32" else m * n) < 16 * 16 * config.num_warps:
        return False
    shared = size * (kept + config.num_stages * streamed)
    if config.registers:
        # A limit makes room for one more program, which must fit in shared memory, too.
        programs = _REGISTERS // (threads * config.registers)
        return config.num_warps == 4 and not config.q_in_registers and programs * shared <= _SHARED
    return shared <= _SHARED


class Compiled(NamedTuple):
    config: Config
    settings: dict[str, Any]
    why: str  # it must not be timed; empty if it may


def compiled(config: Config, target: Target, arch: int, shared_limit: int, spills: bool = False) -> Compiled:
    """Compiles without the GPU. `spills`: keep a configuration that spills or serialises."""
    from experiments.benchmarks.compile.report import compile_all

    arithmetic = {"half": "bfloat16", "tf32": "tf32", "fp32": "float32"}[target.arithmetic]
    options = {"descriptors": target.descriptors, "only": target.kernel, "config": config, "assemble": True}
    try:
        reports = compile_all(arch, arithmetic, target.dim, **options)
    except Exception as error:
        return Compiled(config, {}, f"does not compile: {str(error).splitlines()[0][:120] or type(error)}")
    spilled, shared = (max(getattr(each, name) for each in reports) for name in ("spilled", "shared"))
    # For wide heads in fp32, pieces and results fill the registers; times show what that costs.
    allowed = _SPILLED_FOR_A_PROGRAM if config.registers else 0 if target.arithmetic != "fp32" else spilled
    reasons = {
        "the launcher takes no descriptors here": reports[-1].descriptors != target.descriptors,
        "its number of stages does not fit in shared memory": any(each.stages < config.num_stages for each in reports),
        f"{shared} bytes of shared memory": shared > shared_limit,
        f"spills {spilled} bytes": spilled > allowed and not spills,
        "its matrix instructions wait for one another": any(each.serialised for each in reports) and not spills,
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    return Compiled(config, {"registers": reports[-1].registers, "spilled": reports[-1].spilled}, why)


class Candidates:
    def __init__(self, target: Target, length: int, device: torch.device, kinds: Sequence[str] = MASKS) -> None:
        self.target, self.device = target, device
        heads = max(1, _CHANNELS // target.dim) if device.type == "cuda" else 1
        half = torch.bfloat16 if device.type == "cuda" else torch.float16
        dtype = half if target.arithmetic == "half" else torch.float32
        self.masks = {kind: block_mask(kind, length, 128 if length >= 1024 else 32).to(device) for kind in kinds}
        generator = torch.Generator(device).manual_seed(0)
        shape = (1, heads, length, target.dim)
        *self.leaves, self.dout = (
            torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4)
        )
        for leaf in self.leaves:
            leaf.requires_grad_()

    @contextmanager
    def using(self, config: Config | None) -> Iterator[None]:
        configs = {} if config is None else {self.target.kernel: config}
        descriptors, is_tf32 = self.target.descriptors, self.target.arithmetic == "tf32"
        with override(configs=configs, descriptors=descriptors), products_in_tf32(is_tf32):
            yield

    def timed(self, kind: str, config: Config | None) -> Timed:
        attend = partial(attention, *self.leaves, self.masks[kind], backend="triton")
        with self.using(config):
            if self.target.kernel == "forward":
                call = torch.no_grad()(attend)
            else:
                call = partial(torch.autograd.grad, attend(), self.leaves, self.dout, retain_graph=True)
        return Timed(call, partial(self.using, config))

    def ratios(self, configs: Sequence[Config], *, rounds: int, round_ms: float) -> dict[Config, dict[str, float]]:
        found: dict[Config, dict[str, float]] = {config: {} for config in configs}
        for kind in self.masks:
            calls = {"shipped": self.timed(kind, None)}
            for config in configs:
                with suppress(RuntimeError, ValueError):
                    calls[str(config)] = self.timed(kind, config)
            timings = in_turns(calls, self.device, rounds=rounds, round_ms=round_ms)
            if (failure := timings["shipped"].failure) is not None:
                raise RuntimeError(f"the shipped configuration fails on {kind}") from failure
            for config in configs:
                if str(config) in timings and timings[str(config)].failure is None:
                    found[config][kind] = timings[str(config)].ms / timings["shipped"].ms
        whole = {config: ratios for config, ratios in found.items() if len(ratios) == len(self.masks)}
        return dict(sorted(whole.items(), key=lambda each: geometric_mean(each[1].values())))

    def error(self, config: Config) -> float:
        with self.using(config):
            return max(
                testing.compare(
                    partial(attention, mask=mask, backend="triton"), *self.leaves, mask, dout=self.dout, heads=1,
                    every_draw=False,
                ).worst
                for mask in self.masks.values()
            )  # fmt: skip


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Repeated = Annotated[list[str] | None, typer.Option(help="May be repeated.")]


@app.command()
def tune(
    kernel: Repeated = None,
    arithmetic: Repeated = None,
    dim: Annotated[list[int] | None, typer.Option(help="Head dim, padded to a power of two; may be repeated.")] = None,
    loads: Repeated = None,
    config: Annotated[list[str] | None, typer.Option(help="Only this one, even if it spills; may be repeated.")] = None,
    mask: Repeated = None,
    length: Annotated[int, typer.Option(help="Tokens of the timed masks.")] = 16384,
    rounds: Rounds = 3,
    commit: Commit = None,
    out: Out = Path("runs/tune"),
) -> None:
    """Find tile sizes for the kernels, of the GPU here.

    Candidates are compiled; those that spill registers or serialise their matrix instructions are dropped; the others
    are timed in turns with the shipped configuration. The fastest are compared with fp64. Minutes an entry.
    """
    kernels, arithmetics = (
        chosen("--kernel", kernel, KERNELS),
        chosen("--arithmetic", arithmetic or ["half"], ARITHMETICS),
    )
    dims, ways, kinds = chosen("--dim", dim or [64, 128], DIMS), chosen("--loads", loads, LOADS), mask or MASKS
    chosen("--mask", mask, PLAIN_KINDS)
    named = [parse(each) for each in config or ()]
    bench = Bench.start("tune", "cuda", commit, out, rounds=rounds, round_ms=30.0)
    capability = torch.cuda.get_device_capability()
    ways = [way for way in ways if way == "pointers" or architecture_of(capability).has_tma]
    for target in (Target(*each[:3], each[3] == "descriptors") for each in product(kernels, arithmetics, dims, ways)):
        limits = 10 * capability[0] + capability[1], architecture_of(capability).shared_memory
        compiling = partial(compiled, target=target, arch=limits[0], shared_limit=limits[1], spills=bool(named))
        with worker_pool(available_cores()) as pool:
            found = list(pool.map(compiling, named or candidates(target)))
        measure(bench, target, found, kinds, length)
    bench.finish()


def measure(bench: Bench, target: Target, found: Sequence[Compiled], kinds: Sequence[str], length: int) -> None:
    path = f"{target}/{{}}-{'descriptors' if target.descriptors else 'pointers'}"
    for each in found:
        if each.why:
            bench.add(path.format(each.config), None, SHIPPED, failure=each.why, **each.settings)
    good = {each.config: each.settings for each in found if not each.why}
    timing = Candidates(target, length, bench.device, kinds)
    ratios = timing.ratios(list(good), rounds=bench.rounds, round_ms=bench.round_ms)
    for number, (config, by_mask) in enumerate(ratios.items()):
        settings = good[config] | {"ratios": by_mask}
        if number < CHECKED:
            settings["error"] = timing.error(config)
        bench.add(path.format(config), geometric_mean(by_mask.values()), SHIPPED, **settings)
    bench.save()


if __name__ == "__main__":
    app()
