"""The losses of complete runs after equal minutes, after equal tokens, and by position in the context.

<out>/compare.csv, compare.json, compare.md, compare.png   the runs, their settings, environments and losses
<out>/losses.csv                                            every validation of all runs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from experiments.lm import show
from experiments.lm.compare import ENVIRONMENT
from experiments.lm.data.store import Store
from experiments.lm.show import Finished, Validation
from experiments.training.atomic_files import write_csv, write_json, write_text
from experiments.training.reading import read_json

# Of the shortest run. With "trapezoid" no learning rate has fallen yet.
SHARES = (0.25, 0.5, 0.75)

RESULTS = ("parameters", "steps", "tokens", "seconds", "tokens_per_s", "val_loss", "val_tokens", "mfu")
SHOWN = (
    "parameters", "pattern", "window", "attention", "context", "initial", "batch_tokens", "micro_tokens", "lr",
    "schedule", "seed", "precision", "compiled", "device", "torch", "triton", "commit", "date",
)  # fmt: skip


def loss_at(found: Sequence[Validation], unit: str, amount: float) -> float | None:
    """After an amount of "tokens" or "seconds", interpolated between validations.

    >>> found = [Validation(10, 1.0, 4.0), Validation(20, 2.0, 3.0)]
    >>> loss_at(found, "tokens", 15), loss_at(found, "tokens", 20), loss_at(found, "tokens", 5)
    (3.5, 3.0, None)

    None before the first validation and after the last.
    """
    for before, after in pairwise(found):
        begin, end = getattr(before, unit), getattr(after, unit)
        if begin <= amount <= end:
            return before.loss + float((amount - begin) / (end - begin)) * (after.loss - before.loss)
    return None


def amounts(runs: Sequence[Finished], unit: str) -> list[float]:
    return [share * min(getattr(run.validations()[-1], unit) for run in runs) for share in SHARES]


def summary(runs: Sequence[Finished], environments: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    seconds, tokens = amounts(runs, "seconds"), amounts(runs, "tokens")
    made = []
    for run, environment in zip(runs, environments, strict=True):
        if run.metrics is None:
            raise ValueError(f"runs that are compared must be complete; got {run.name}, which has no metrics.json")
        metrics = {**run.metrics, "tokens_per_s": run.metrics["tokens"] / run.metrics["seconds"]}
        found = run.validations()
        made.append({
            "run": run.name,
            **metrics["config"],
            **{name: value for name, value in environment.items() if name != "run"},
            **{name: metrics[name] for name in RESULTS},
            "initial": begun_with(metrics.get("initial")),
            "at_seconds": {f"{amount:.0f}": loss_at(found, "seconds", amount) for amount in seconds},
            "at_tokens": {f"{amount:.0f}": loss_at(found, "tokens", amount) for amount in tokens},
            "by_position": run.positions,
        })  # fmt: skip
    return made


def begun_with(initial: Mapping[str, Any] | None) -> str:
    if initial is None:
        return ""
    time = "minutes unknown" if initial["seconds"] is None else f"{initial['seconds'] / 60:.1f} min"
    last = f"{initial['pattern']}, {initial['context']}: {initial['tokens'] / 1e6:.1f}M tokens, {time}"
    return "; ".join(filter(None, (begun_with(initial["before"]), last)))


def markdown(records: Sequence[Mapping[str, Any]], corpus: Mapping[str, Any]) -> str:
    first = records[0]
    minutes = [f"{float(seconds) / 60:.3g} min" for seconds in first["at_seconds"]]
    tokens = [f"{float(count) / 1e6:.3g}M tokens" for count in first["at_tokens"]]
    results = [
        [
            each["run"], f"{each['tokens_per_s']:,.0f}", f"{each['seconds'] / 60:.2f}", f"{each['tokens'] / 1e6:.2f}M",
            f"{each['tokens'] / corpus['tokens']['train']:.2f}", f"{each['val_loss']:.4f}",
            *(_number(loss) for loss in (*each["at_seconds"].values(), *each["at_tokens"].values())),
        ]
        for each in records
    ]  # fmt: skip
    bounds = max((each["by_position"] for each in records), key=len)
    positions = [
        [f"{begin:,} to {end - 1:,}", *(_number(_at_position(each, begin, end)) for each in records)]
        for begin, end, _ in bounds
    ]
    unknown = any(None in each[at].values() for each in records for at in ("at_seconds", "at_tokens"))
    given = [[each["run"], *(_cell(each[name]) for name in SHOWN)] for each in records]
    return "\n".join([
        f"Text: {corpus['tokens']['train']:,} tokens to train on and {corpus['tokens']['val']:,} held out, of which "
        f"{first['val_tokens']:,} validate; SHA-256 of the tokens {corpus['hash']}.",
        "Losses are in nats on held-out text. Minutes are of training, without compilation and validation.",
        "",
        *_table(["run", "tokens/s", "minutes", "tokens", "epochs", "loss", *minutes, *tokens], results),
        *_of_cases(records),
        *(["", "Empty: a run had not been validated before; a smaller --validate-every tells."] if unknown else []),
        "",
        "Loss of the complete runs by position in the context:",
        "",
        *_table(["position", *(each["run"] for each in records)], positions),
        "",
        "What each run was given; all settings are in compare.csv:",
        "",
        *_table(["run", *(name.replace("_", " ") for name in SHOWN)], given),
        "",
        *(f"{command}\n" for command in dict.fromkeys(f"    {each['command']}" for each in records)),
    ])  # fmt: skip


def _of_cases(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of all losses of each case by learning rate, where there are several of either; else nothing."""
    cases: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for each in records:
        cases.setdefault((each["context"], each["pattern"], each["attention"], each["lr"]), []).append(each)
    if len(cases) == len(records) == len({case[:3] for case in cases}):
        return []
    lines = []
    for (context, pattern, attention, rate), runs in cases.items():
        losses = [run["val_loss"] for run in runs]
        spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
        of_seeds = " ".join(f"{loss:.4f}" for loss in losses)
        case = f"{context:,}, {_cell(pattern)}, {attention}"
        lines.append(
            [case, f"{rate:g}", " ".join(str(run["seed"]) for run in runs), of_seeds, f"{fmean(losses):.4f}{spread}"]
        )
    titles = ["case", "learning rate", "seeds", "loss of each", "mean"]
    return ["", "By case and learning rate:", "", *_table(titles, lines)]


def _at_position(record: Mapping[str, Any], begin: int, end: int) -> float | None:
    return next((loss for low, high, loss in record["by_position"] if (low, high) == (begin, end)), None)


def _number(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in titles[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows)]


def write(out: Path, names: Sequence[str], store: Store) -> str:
    runs = [show.read(out / name) for name in names]
    records = summary(runs, [read_json(out / name / ENVIRONMENT, "the environment of a run") for name in names])
    nested = "at_seconds", "at_tokens", "by_position"
    flat = [{name: value for name, value in each.items() if name not in nested} for each in records]
    write_csv(out / "compare.csv", flat)
    losses = [
        {"run": run.name, "tokens": each.tokens, "seconds": f"{each.seconds:.2f}", "loss": f"{each.loss:.5f}"}
        for run in runs
        for each in run.validations()
    ]
    write_csv(out / "losses.csv", losses)
    write_json(out / "compare.json", {"corpus": store.about, "runs": records, "losses": losses})
    page = markdown(records, store.about)
    write_text(out / "compare.md", page)
    if find_spec("matplotlib") is not None:
        show.plot(runs, out / "compare.png")
    return page
