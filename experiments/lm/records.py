from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lm import compare
from experiments.lm.bench import Row
from experiments.lm.config import Config
from experiments.lm.generate import Speed
from experiments.measurements import Measurement, Run, add_seed, slug, write

OURS = "sparseflash"


def measurements_of(metrics: Mapping[str, Any]) -> list[Measurement]:
    """A complete run: lm/LENGTH/WHAT/CONTEXT-PATTERN, with the implementation if it is not ours."""
    config = metrics["config"]
    length = f"{config['minutes']:g}-minutes" if config["steps"] is None else f"{config['steps']}-steps"
    other = "" if config["attention"] == OURS else f"-{config['attention']}"
    way = f"{config['context']}-{compare.slug(config['pattern'])}{other}"
    values = {
        "loss": (metrics["val_loss"], "nats"),
        "tokens": (metrics["tokens"] / 1e6, "million tokens"),
        "speed": (metrics["tokens"] / metrics["seconds"], "tokens/s"),
        "mfu": (None if metrics["mfu"] is None else 100 * metrics["mfu"], "% MFU"),
    }
    settings = {"parameters": metrics["parameters"]}
    return [
        Measurement(f"lm/{length}/{what}/{way}", value, None, unit, settings)
        for what, (value, unit) in values.items()
        if value is not None
    ]


def record(path: Path | None, run: Run, metrics: Mapping[str, Any]) -> None:
    if path is not None:
        add_seed(path, run, measurements_of(metrics))


def record_generation(path: Path | None, run: Run, config: Config, found: Sequence[Speed]) -> None:
    """lm/generate/BATCHxPROMPT/WHAT/CONTEXT-PATTERN."""
    if path is None:
        return
    measurements = []
    for each in found:
        name = f"lm/generate/{each.batch}x{each.prompt}/{{}}/{config.context}-{compare.slug(config.pattern)}"
        settings = {"token_ms": 1000 * each.token_seconds}
        speed = each.batch / each.token_seconds
        measurements.append(Measurement(name.format("tokens"), speed, each.spread, "tokens/s", settings))
        prompt = each.prompt / each.prompt_seconds
        measurements.append(Measurement(name.format("prompt-tokens"), prompt, None, "tokens/s"))
    write(path, run, measurements)


def record_steps(path: Path | None, run: Run, rows: Sequence[Row]) -> None:
    if path is None:
        return
    found = []
    for row in rows:
        case = row.case
        where, way = (
            f"lm-speed/{slug(case.preset)}/{case.context}/{compare.slug(case.pattern)}",
            slug(case.implementation),
        )
        if not row.rounds:
            found.append(Measurement(f"{where}/tokens/{way}", None, None, "tokens/s", failure=row.failure or "not run"))
            continue
        settings = {"step_ms": row.seconds * 1e3} | ({"peak_gb": row.peak_bytes / 1e9} if row.peak_bytes else {})
        found.append(Measurement(f"{where}/tokens/{way}", row.tokens_per_s, row.spread, "tokens/s", settings))
        if row.mfu is not None:
            found.append(Measurement(f"{where}/mfu/{way}", 100 * row.mfu, row.spread, "% MFU"))
    write(path, run, found)
