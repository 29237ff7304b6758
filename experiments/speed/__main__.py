"""Times sparseflash beside its peers, after checking that it is right.

python -m experiments.speed                              every case, one GPU, under six minutes
python -m experiments.speed --quick                      the main cases, under three minutes
python -m experiments.speed --cases 'd64-*,call-*'       some cases
python -m experiments.speed --device cpu --length 256    the same on a CPU, tiny: a test of the benchmark itself
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.speed import report
from experiments.speed.cases import CASES, select
from experiments.speed.peers import DEFAULT_PEERS, PEERS, ours
from experiments.speed.run import Options, run_cases


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    described = argparse.ArgumentParser(
        "python -m experiments.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = described.add_argument
    add("--cases", default="*", help="comma-separated globs over the names of the cases")
    add("--list", action="store_true", help="print the cases and stop")
    add("--quick", action="store_true", help="the six masks at D=64 and D=128 only, fewer repeats")
    add("--peers", help=f"comma-separated, from {', '.join(PEERS)}; 'none' for ours alone")
    add(
        "--flex-autotune",
        action="store_true",
        help="FlexAttention tuned too: over a minute a case, raise --minutes",
    )
    add("--out", type=Path, default=Path("experiments/results/speed"), help="where speed.csv and speed.md go")
    add("--device", default="cuda", help="cuda or cpu")
    add("--length", type=int, help="tokens, instead of every case's own, with one sequence and two heads")
    add("--block", type=int, help="tokens a mask block, with --length")
    add("--check-heads", type=int, default=3, help="heads whose outputs and gradients are compared with fp64")
    add("--minutes", type=float, default=5.5, help="no case begins later than this")
    add("--seed", type=int, default=0)
    add("--commit", help="what to call the code measured, where git cannot tell")
    return described


def command(arguments: Sequence[str]) -> str:
    """The command to repeat, without where its files went."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join(["python", "-m", "experiments.speed", *kept])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if ours was wrong or failed somewhere, 2 for options that cannot be served."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    given = parser().parse_args(arguments)
    if given.list:
        for case in CASES:
            print(case)
        return 0
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("No CUDA device; --device cpu runs the same on tiny lengths.", file=sys.stderr)
        return 2
    names = list(DEFAULT_PEERS[device.type]) if given.peers is None else given.peers.split(",")
    names = [name for name in names if name != "none"] + ["flex-autotune"] * given.flex_autotune
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        print(f"--peers must be from {', '.join(PEERS)}; got {', '.join(unknown)}.", file=sys.stderr)
        return 2
    try:
        cases = select(given.cases, quick=given.quick)
    except ValueError as failure:
        print(failure, file=sys.stderr)
        return 2
    options = Options(device, heads=given.check_heads, seed=given.seed)
    if given.quick:
        options = Options(device, rounds=2, round_ms=40.0, heads=given.check_heads, seed=given.seed)
    if device.type == "cpu":
        options = Options(device, rounds=1, round_ms=0.0, heads=given.check_heads, calls=2, seed=given.seed)
    if given.length is not None or device.type == "cpu":
        block = given.block or (32 if device.type == "cpu" else 128)
        cases = [case.shrunk(given.length or 256, block) for case in cases]
    facts = report.environment(device, command(arguments), given.commit)
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)

    def write(rows: list[report.Row]) -> None:
        # After every case: a run that is cut short keeps what it measured.
        report.write_csv(rows, given.out / "speed.csv")
        report.write_markdown(rows, facts, given.out / "speed.md")

    rows = run_cases(
        cases,
        ours,
        {name: PEERS[name] for name in dict.fromkeys(names)},
        options,
        minutes=given.minutes,
        done=write,
    )
    print("\n" + report.short_table(rows), flush=True)
    bad = [row for row in rows if row.peer == report.OURS and row.status in (report.WRONG, report.FAILED)]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
