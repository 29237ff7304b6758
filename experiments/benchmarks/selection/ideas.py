"""`python -m experiments.benchmarks selection ideas`: published shapes, choice included, beside dense attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from experiments.benchmarks.harness import Bench, Commit, Device, Minutes, Out, Way, chosen, deadline, reason
from experiments.benchmarks.selection import dense
from experiments.benchmarks.selection.shapes import LENGTHS, PUBLISHED, SMALL, Shape
from experiments.benchmarks.selection.ways import Case, case_of, dense_ways, flex_ways, own_ways
from experiments.measurements import Measurement

FLEX = "flex-given-the-choice"
# What is measured first, if the time is short.
STAGES = (("sparseflash", "sdpa", "fa4"), (FLEX,))
WAYS = [name for stage in STAGES for name in stage]
LONG = 32_768  # tokens; from here on one round, because dense attention takes seconds


def ideas(
    out: Out = Path("runs/selection-ideas"),
    device: Device = "cuda",
    idea: Annotated[list[str] | None, typer.Option(help=f"From {', '.join(PUBLISHED)}.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Lengths, in this order.")] = None,
    way: Annotated[list[str] | None, typer.Option(help=f"From {', '.join(WAYS)}.")] = None,
    minutes: Minutes = None,
    small: Annotated[bool, typer.Option("--small", help="Small layers of 128 tokens, to try it.")] = False,
    commit: Commit = None,
) -> None:
    """Measure NSA, MoBA, MSA, DSA, QSA and VSA, choice included, beside dense attention of the same heads.

    Run it again with the same --out to continue: what the file has is not measured again.
    """
    shapes = SMALL if small else PUBLISHED
    named, wanted = chosen("--idea", idea, shapes), chosen("--way", way, WAYS)
    lengths = tokens or ([128] if small else list(LENGTHS))
    bench = Bench.start("selection", device, commit, out, round_ms=0.0 if small else 60.0)
    bench.resume()
    bench.measurements = [each for each in bench.measurements if "/faster-from/" not in each.name]
    late, left = deadline(minutes), []
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    for stage in STAGES:
        for length in lengths:
            for name in named:
                missing = [each for each in stage if each in wanted and not has(bench, f"{name}/{length}", each)]
                if not missing:
                    continue
                if late():
                    left.append(f"{name} at {length} tokens ({', '.join(missing)})")
                else:
                    measure(bench, f"{name}/{length}", shapes[name], length, missing, dtype)
    if left:
        print(
            f"no time for {len(left)} more, from {left[0]} to {left[-1]}: run it again with the same --out", flush=True
        )
    for each in crossings(bench.measurements):
        bench.add(*each[:3], failure=each[3])
    bench.finish()


def has(bench: Bench, case: str, way: str) -> bool:
    return any(each.name == f"{bench.name}/{case}/forward/{way}" for each in bench.measurements)


def measure(bench: Bench, path: str, shape: Shape, tokens: int, names: Sequence[str], dtype: torch.dtype) -> None:
    bench.rounds = 1 if tokens >= LONG else 3
    ways: dict[str, Way] = {}
    case = case_of(shape, tokens, bench.device, dtype)
    for name in names:
        try:
            ways |= _ways(case, name)
        except Exception as failure:
            for which in ("forward", "both"):
                bench.add(f"{path}/{which}/{name}", None, "ms", failure=reason(failure))
    bench.time(path, ways)
    del case, ways
    bench.timed = {}
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def _ways(case: Case, name: str) -> Mapping[str, Way]:
    if name == "sparseflash":
        return own_ways(case)
    if name == FLEX:
        return flex_ways(case, name)
    return dense_ways(case, name, {"sdpa": dense.sdpa, "fa4": dense.fa4}[name])


def crossings(measurements: Sequence[Measurement]) -> Iterator[tuple[str, int | None, str, str]]:
    """For each idea the smallest length at which, as at all longer ones, it is faster than every dense attention.

    Yields path, tokens, unit and the reason if no length qualifies, of the lengths at which all were measured.
    """
    found: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for each in measurements:
        _, idea, length, which, way = each.name.split("/")
        if each.value is not None and which != "choice":
            found.setdefault((idea, which), {}).setdefault(int(length), {})[way] = each.value
    for (idea, which), lengths in found.items():
        first, most = None, 0
        for length, ms in sorted(lengths.items(), reverse=True):
            own = [value for way, value in ms.items() if way in ("sparseflash", "sparseflash-recorded")]
            peers = [value for way, value in ms.items() if way in ("sdpa", "fa4")]
            if not own or not peers:
                continue
            most = most or length
            if min(own) >= min(peers):
                break
            first = length
        if most:
            why = "" if first else f"not up to {most} tokens"
            yield f"{idea}/faster-from/{which}/sparseflash", first, "tokens", why
