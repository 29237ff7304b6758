"""`python -m experiments.benchmarks.scores`: the time of changed scores over that of plain attention."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(width=120)


@app.command()
def main(
    case: Annotated[list[str] | None, typer.Option(help="May be repeated.", show_default="all")] = None,
    flex: Annotated[bool, typer.Option("--flex", help="Time FlexAttention with the same score_mod, too.")] = False,
    length: Annotated[int, typer.Option(help="Tokens.")] = 8192,
    heads: Annotated[int, typer.Option(help="Heads of one batch element.")] = 16,
    dim: Annotated[int, typer.Option(help="Head dim.")] = 128,
    rounds: Annotated[int, typer.Option(help="Series of each implementation, in turns.")] = 5,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the interpreter, a test of the experiment.")] = "cuda",
    out: Annotated[Path, typer.Option(help="Where scores.csv goes.")] = Path("runs/scores"),
) -> None:
    """Time causal attention in bf16 with each change of scores, forward and with the backward.

    over plain: the time relative to that of the same kernels with unchanged scores. Flex: how many times as long
    FlexAttention takes with the same score_mod. With all cases about a minute on an H100, most of it compiling; --flex
    adds about another.
    """
    # Triton reads it when it is imported, which is below.
    if device == "cuda":
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from experiments.benchmarks.scores.cases import TARGETS, calls, cases
    from experiments.benchmarks.timing import Timed, in_turns
    from sparseflash import attention, masks

    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device; --device cpu with a small --length tests the experiment")
    unknown = set(case or ()) - set(TARGETS)
    if unknown:
        raise typer.BadParameter(f"case must be of {', '.join(TARGETS)}; got {', '.join(sorted(unknown))}")
    place, dtype = torch.device(device), torch.bfloat16 if device == "cuda" else torch.float16
    generator = torch.Generator(place).manual_seed(0)
    shape = 1, heads, length, dim
    q, k, v, dout = (torch.randn(shape, generator=generator, device=place, dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = masks.causal(length).to(place)
    timed: dict[tuple[str, str, str], Callable[[], object]] = {}

    def add(name: str, library: str, run: Callable[[], torch.Tensor], learned: tuple[torch.Tensor, ...]) -> None:
        for what, call in calls(run, [*leaves, *learned], dout).items():
            timed[name, library, what] = call

    add("plain", "sparseflash", lambda: attention(q, k, v, mask, backend="triton"), ())
    chosen = cases(heads, length, place, dtype, case or list(TARGETS))
    for each in chosen:
        add(each.name, "sparseflash", _ours(attention, q, k, v, mask, each.changes), each.learned)
    if flex:
        from torch.nn.attention.flex_attention import flex_attention

        from sparseflash import interop

        compiled = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
        flex_mask = interop.to_flex(mask)
        add("plain", "flex", lambda: compiled(q, k, v, block_mask=flex_mask), ())
        for each in chosen:
            if each.score_mod is not None:
                add(each.name, "flex", _flex(compiled, q, k, v, flex_mask, each.score_mod), each.learned)
    found = in_turns(
        {" ".join(key): Timed(call, nullcontext) for key, call in timed.items()}, place, rounds=rounds, round_ms=30.0
    )
    rows = []
    for (name, library, what), timing in zip(timed, found.values(), strict=True):
        if timing.failure is not None:
            console.print(f"{name} {library} {what}: {type(timing.failure).__name__}: {timing.failure}", soft_wrap=True)
        rows.append({"case": name, "library": library, "pass": what, "ms": timing.ms, "spread": timing.spread})
    _print(rows, TARGETS)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "scores.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _ours(attention: Any, q: Any, k: Any, v: Any, mask: Any, changes: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: attention(q, k, v, mask, scores=changes(), backend="triton")


def _flex(compiled: Any, q: Any, k: Any, v: Any, mask: Any, score_mod: Any) -> Callable[[], Any]:
    return lambda: compiled(q, k, v, score_mod=score_mod, block_mask=mask)


def _print(rows: list[dict[str, Any]], targets: dict[str, float]) -> None:
    table = Table(box=box.SIMPLE)
    for column in ("case", "pass", "ms", "over plain", "wanted", "Flex"):
        table.add_column(column, justify="left" if column in ("case", "pass") else "right")
    ms = {(row["case"], row["library"], row["pass"]): row["ms"] for row in rows}
    for (name, library, what), time in ms.items():
        if library == "sparseflash":
            flex = ms.get((name, "flex", what))
            table.add_row(
                name, what, f"{time:.3f}", f"{time / ms['plain', library, what]:.3f}",
                f"{targets[name]:.2f}" if name in targets else "", "" if flex is None else f"{flex / time:.2f}",
            )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    app()
