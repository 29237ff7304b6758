from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.lm.cases import Case
from experiments.training.reading import read_json

PANELS = (("tokens_per_s", "tokens/s", 1.0), ("mfu", "MFU, %", 100.0), ("peak_gb", "peak memory, GB", 1.0))


def lines(rows: list[dict[str, Any]], number: str) -> dict[str, tuple[list[int], list[float]]]:
    """Contexts and numbers for each model, pattern and implementation.

    >>> row = {"preset": "124M", "pattern": "dense", "attention": "sdpa", "context": 2048, "mfu": 0.25}
    >>> lines([row], "mfu")
    {'124M dense sdpa': ([2048], [0.25])}
    """
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in sorted(rows, key=lambda row: row["context"]):
        if row[number] is not None:
            case = Case(*(row[name] for name in Case._fields[:-1]), row.get("recorded", False))
            name = f"{case.preset} {case.pattern} {case.implementation}"
            contexts, numbers = found.setdefault(name, ([], []))
            contexts.append(row["context"])
            numbers.append(row[number])
    return found


def plot(stored: Path, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = read_json(stored, "what `bench` has measured", "rows")
    panels = [panel for panel in PANELS if lines(found["rows"], panel[0])]
    if not panels:
        raise ValueError(f"{stored} must have a row with numbers; all have failed, as its column failure says")
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4.5), layout="constrained", squeeze=False)
    for axis, (number, title, factor) in zip(axes[0], panels, strict=True):
        for name, (contexts, numbers) in lines(found["rows"], number).items():
            axis.plot(contexts, [factor * each for each in numbers], "o-", ms=4, label=name)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("context, tokens")
        axis.set_ylabel(title)
    axes[0][0].legend(fontsize="x-small")
    figure.suptitle(f"{found['environment']['device']}, torch {found['environment']['torch']}", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
