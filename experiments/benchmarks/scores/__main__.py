"""`python -m experiments.benchmarks.scores`: the time of changed scores over that of plain attention."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.interpreter import run_kernels_on

if TYPE_CHECKING:
    import torch

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(width=120)

_BACKENDS = {"auto": None, "triton": "triton", "hopper": "hopper"}


@app.command()
def main(
    case: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="all")] = None,
    flex: Annotated[bool, typer.Option("--flex", help="Time FlexAttention with the same score_mod, too.")] = False,
    length: Annotated[int, typer.Option(help="Tokens.")] = 8192,
    heads: Annotated[int, typer.Option(help="Heads of one batch element.")] = 16,
    dim: Annotated[int, typer.Option(help="Head dim.")] = 128,
    backend: Annotated[
        str, typer.Option(help="auto: the kernels that attention() takes; triton: the portable ones; hopper: those.")
    ] = "auto",
    rounds: Annotated[int, typer.Option(help="Series of each implementation, in turns.")] = 5,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the interpreter, a test of the experiment.")] = "cuda",
    out: Annotated[Path, typer.Option(help="Where scores.csv goes.")] = Path("runs/scores"),
) -> None:
    """Time causal attention in bf16 with each change of scores, forward and with the backward.

    over plain: the time relative to that of unchanged scores with the same --backend, whose kernels may be others:
    explain() tells. Flex: how many times as long FlexAttention takes with the same score_mod. With all cases about a
    minute on an H100, most of it compiling; with --flex about four on an H200.
    """
    run_kernels_on(device)
    import torch

    from experiments.benchmarks.scores.cases import NAMES, TARGETS, calls, cases
    from experiments.benchmarks.timing import Timed, in_turns
    from sparseflash import attention, masks

    unknown = set(case or ()) - set(NAMES)
    if unknown:
        raise typer.BadParameter(f"case must be of {', '.join(NAMES)}; got {', '.join(sorted(unknown))}")
    if backend not in _BACKENDS:
        raise typer.BadParameter(f"backend must be {', '.join(_BACKENDS)}; got {backend}")
    # A backend of "auto" is the interpreted kernels on a CPU, where attention() would take another.
    ours = "triton" if device == "cpu" else _BACKENDS[backend]
    place, dtype = torch.device(device), torch.bfloat16 if device == "cuda" else torch.float16
    generator = torch.Generator(place).manual_seed(0)
    shape = 1, heads, length, dim
    q, k, v, dout = (torch.randn(shape, generator=generator, device=place, dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = masks.causal(length).to(place)
    plain = {"sparseflash": _Way(lambda: attention(q, k, v, mask, backend=ours), leaves)}
    groups: list[dict[str, dict[str, _Way]]] = []
    if flex:
        from experiments.benchmarks.speed.peers.flexattention import compiled
        from sparseflash import interop

        flex_attention = compiled(None) if device == "cuda" else _eager_flex()
        flex_mask = interop.to_flex(mask, mask_mod=lambda b, h, q, k: k <= q)
        groups.append({"plain": plain | {"flex": _Way(lambda: flex_attention(q, k, v, block_mask=flex_mask), leaves)}})
    for each in cases(heads, mask, dtype, case or NAMES):
        wanted = [*leaves, *each.learned]
        ways = {"sparseflash": _Way(_ours(attention, q, k, v, mask, each.changes, ours), wanted)}
        if flex and each.score_mod is not None:
            ways["flex"] = _Way(_flex(flex_attention, q, k, v, flex_mask, each.score_mod), wanted)
        groups.append({"plain": plain, each.name: ways})

    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number, group in enumerate(groups):  # of what is compared, so that a run that is cut short has compared some
        timed = {
            (name, library, what): call
            for name, ways in group.items()
            for library, way in ways.items()
            for what, call in calls(way.run, way.wanted, dout).items()
        }
        found = in_turns(
            {" ".join(key): Timed(call, nullcontext) for key, call in timed.items()},
            place,
            rounds=rounds,
            round_ms=30.0,
        )
        for (name, library, what), timing in zip(timed, found.values(), strict=True):
            if timing.failure is not None:
                failure = f"{type(timing.failure).__name__}: {timing.failure}"
                console.print(f"{name} {library} {what}: {failure}", soft_wrap=True)
            row = {"group": number, "case": name, "library": library, "pass": what, "ms": timing.ms}
            rows.append(row | {"spread": timing.spread})
        with (out / "scores.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        console.print(f"{number + 1} of {len(groups)}: {', '.join(group)}")
    _print(rows, TARGETS)


class _Way(NamedTuple):
    """A forward to time, and the tensors whose gradients its backward computes."""

    run: Callable[[], torch.Tensor]
    wanted: Sequence[torch.Tensor]


def _eager_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


def _ours(
    attention: Any, q: Any, k: Any, v: Any, mask: Any, changes: Callable[[], Any], backend: str | None
) -> Callable[[], Any]:
    return lambda: attention(q, k, v, mask, scores=changes(), backend=backend)


def _flex(compiled: Any, q: Any, k: Any, v: Any, mask: Any, score_mod: Any) -> Callable[[], Any]:
    return lambda: compiled(q, k, v, score_mod=score_mod, block_mask=mask)


def _print(rows: list[dict[str, Any]], targets: dict[str, float]) -> None:
    table = Table(box=box.SIMPLE)
    for column in ("case", "pass", "ms", "over plain", "wanted", "Flex"):
        table.add_column(column, justify="left" if column in ("case", "pass") else "right")
    ms = {(row["group"], row["case"], row["library"], row["pass"]): row["ms"] for row in rows}
    for (group, name, library, what), time in ms.items():
        if library == "sparseflash" and (name != "plain" or (group, name, "flex", what) in ms):
            flex = ms.get((group, name, "flex", what))
            table.add_row(
                name, what, f"{time:.3f}", f"{time / ms[group, 'plain', library, what]:.3f}",
                f"{targets[name]:.2f}" if name in targets else "", "" if flex is None else f"{flex / time:.2f}",
            )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    app()
