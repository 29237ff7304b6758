"""`python -m experiments.benchmarks masks`: CPU seconds and memory for making masks on the host.

Each mask is made in a process of its own, which is forked after all imports and runs PyTorch's operations on one
thread. Seconds are those that the process had of a core (`time.process_time`), so that other programs on the machine
hardly count. Peak memory is above that of the process before, the mask included.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments.benchmarks.harness import Bench, Commit, Out, reason, slug
from experiments.benchmarks.patterns.catalogue import LONG, PATTERNS
from experiments.benchmarks.patterns.flex import peak_bytes
from sparseflash import BlockMask, clear_caches, masks
from sparseflash.varlen import varlen_mask

MIB = 2**20
OURS = "sparseflash"
VIDEO, WINDOW = (30, 48, 80), (18, 24, 24)  # HunyuanVideo's 115,200 tokens, and the window of its sliding tiles
IMAGES = ((64, 32), (128, 48), (256, 80))  # FLUX's tokens a side at 1,024, 2,048 and 4,096 pixels, and a window
SEQUENCES = (10, 100, 1000, 3000, 10_000)
LONGEST_SEQUENCE = 600
INDEXED = tuple(1 << power for power in range(16, 21))  # tokens
BLOCK, CHOSEN = 64, 16  # of the lists of blocks
QUADRATIC = 4_000_000  # tiles; smaller masks are made several times


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], BlockMask]
    way: str = OURS


def cases() -> list[Case]:
    found = [Case(f"million/{slug(each.name)}", partial(each.build, LONG, 128)) for each in PATTERNS if not each.chosen]
    return [*found, *_of_videos(), *_of_images(), *_of_sequences(), *_of_lists()]


def _of_videos() -> list[Case]:
    tiles = masks.order.tiles(VIDEO, (6, 8, 8))
    near = partial(masks.neighborhood, VIDEO, window=WINDOW)
    found = {
        "tile-order": partial(near, order=tiles),
        "row-major": near,
        "morton-order": partial(near, order=masks.order.morton(VIDEO)),
        "stride": partial(near, stride=(6, 8, 8), order=tiles),
        "causal-in-time": partial(near, causal=(True, False, False), order=tiles),
        "dilated": partial(masks.neighborhood, VIDEO, window=(9, 12, 12), dilation=2, order=tiles),
        "sliding-tiles": partial(masks.sliding_tiles, VIDEO, window=WINDOW, tile=(6, 8, 8), order=tiles),
    }
    cube = (32, 64, 64)
    found["hilbert-order"] = partial(masks.neighborhood, cube, window=WINDOW, order=masks.order.hilbert(cube))
    return [Case(f"video/{name}", make) for name, make in found.items()]


def _of_images() -> list[Case]:
    found = []
    for side, window in IMAGES:
        shape = (side, side)
        near = partial(masks.neighborhood, shape, window=window)
        orders = {
            "tile-order": masks.order.tiles(shape, (8, 16)),
            "row-major": None,
            "hilbert-order": masks.order.hilbert(shape),
        }
        found += [Case(f"image/{side}x{side}/{name}", partial(near, order=order)) for name, order in orders.items()]
    return found


def _window(tokens: int) -> BlockMask:
    """As a function of the length, of which nothing else is known."""
    return masks.local(tokens, window=65, causal=True)


def _of_sequences() -> list[Case]:
    ways: dict[str, Any] = {
        "causal": masks.causal, "dense": None, "window": partial(masks.local, window=65, causal=True),
        "rule": lambda q, k: (k <= q) & (q - k < 65), "function": _window, "butterfly": masks.butterfly,
    }  # fmt: skip
    found = []
    for count in SEQUENCES:
        generator = torch.Generator().manual_seed(count)
        sizes = torch.randint(1, LONGEST_SEQUENCE, (count,), generator=generator)
        sums = [0, *sizes.cumsum(0).tolist()]
        found.append(Case(f"varlen/{count}", partial(masks.documents, sizes, causal=True), "documents"))
        found += [
            Case(f"varlen/{count}", partial(varlen_mask, sums, pattern=pattern), way) for way, pattern in ways.items()
        ]
    return found


def _of_lists() -> list[Case]:
    return [Case(f"block-index/{tokens}", _of_index(tokens)) for tokens in INDEXED]


def _of_index(tokens: int) -> Callable[[], BlockMask]:
    generator = torch.Generator().manual_seed(1)
    shape = (1, 2, tokens // BLOCK, CHOSEN)
    index = torch.randint(0, tokens // BLOCK, shape, dtype=torch.int32, generator=generator)
    return partial(BlockMask.from_block_index, index, block=BLOCK, q_len=tokens, causal=True)


@dataclass(frozen=True)
class Made:
    seconds: float
    peak: int
    size: int
    tiles: int


def made(make: Callable[[], BlockMask], gigabytes: float) -> Made:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_make, args=(make, gigabytes, theirs))
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        answer = f"the process ended with {process.exitcode}"
    process.join()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return Made(*answer)


def _make(make: Callable[[], BlockMask], gigabytes: float, answers: Connection) -> None:
    _use_libraries()
    gc.collect()
    gc.freeze()
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    allowed = in_use + int(gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    Path("/proc/self/clear_refs").write_text("5")
    before, start = peak_bytes(), time.process_time()
    try:
        mask = make()
        seconds, peak = time.process_time() - start, peak_bytes() - before
        answers.send((seconds, peak, mask.nbytes, len(mask.indices)))
    except (MemoryError, RuntimeError) as failure:
        is_memory = isinstance(failure, MemoryError) or "memory" in str(failure)
        answers.send(f"more than {gigabytes:g} GB" if is_memory else reason(failure))


def _use_libraries() -> None:
    """Reads the pages of the libraries that masks need, which the memory of a forked process does not hold yet."""
    masks.butterfly(4096)
    masks.neighborhood((16, 16), window=3, order=masks.order.tiles((16, 16), (4, 4)), block=16)
    masks.strided(256, stride=16, block=16)
    varlen_mask([0, 50, 70], pattern=_window)
    _of_index(256)()
    clear_caches()
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory, which the mask could take without a trace


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    only: Annotated[str, typer.Option(help="A part of the names to measure.")] = "",
    repeats: Annotated[int, typer.Option(help="Processes for each mask of few tiles.", min=1)] = 3,
    gigabytes: Annotated[float, typer.Option(help="The most memory that a mask may take.", min=0.1)] = 8.0,
    commit: Commit = None,
    out: Out = Path("runs/masks"),
) -> None:
    """CPU seconds, peak memory and size of every pattern at a million tokens, of neighbourhoods, packed sequences and
    lists of blocks. Needs Linux; some four minutes.
    """
    torch.set_num_threads(1)
    bench = Bench.start("masks", "cpu", commit, out)
    import scipy.sparse  # noqa: F401  # a pattern imports it late; no mask's time should have it

    for each in cases():
        if only not in f"{each.name}/{each.way}":
            continue
        name = "{}".join((f"{each.name}/", f"/{each.way}"))
        try:
            found = [made(each.make, gigabytes)]
        except RuntimeError as failure:
            bench.add(name.format("cpu"), None, "s", failure=str(failure))
            continue
        found += [made(each.make, gigabytes) for _ in range(repeats - 1) if found[0].tiles < QUADRATIC]
        seconds = sorted(one.seconds for one in found)
        spread = (seconds[-1] - seconds[0]) / seconds[0] if len(found) > 1 else None
        bench.add(name.format("cpu"), seconds[0], "s", spread=spread, tiles=found[0].tiles)
        bench.add(name.format("peak"), min(one.peak for one in found) / MIB, "MiB")
        bench.add(name.format("size"), found[0].size / MIB, "MiB")
        bench.save()
    bench.save()


if __name__ == "__main__":
    app()
