from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.pathx.analyse import percent
from experiments.pathx.config import Stage
from experiments.pathx.supervision import described
from experiments.pathx.train import StagedState
from experiments.training.run_log import Record
from experiments.training.session import print_resuming


def announcing(console: Console, stages: tuple[Stage, ...]) -> Callable[[Record], None]:
    begun: set[int] = set()

    def listen(record: Record) -> None:
        if record["stage"] not in begun:
            begun.add(record["stage"])
            console.print(f"Stage {record['stage'] + 1} of {len(stages)}: {stages[record['stage']].name}")

    return listen


def print_paused(console: Console, state: StagedState, stage: Stage, folder: Path) -> None:
    console.print(
        f"Paused at step {state.step}, in stage {state.stage + 1} ({stage.name}), after "
        f"{state.images:,} images and {state.seconds / 60:.1f} minutes"
    )
    print_resuming(console, "experiments.pathx", folder)


def print_trained(console: Console, note: dict[str, Any], folder: Path) -> None:
    cost = note["cost"]
    console.print(
        f"{note['parameters']:,} parameters, {cost['images']:,} images in {cost['minutes']:.1f} minutes, besides "
        f"{cost.get('startup_minutes', 0.0):.1f} of starting up; validation accuracy "
        f"{percent(note['validation']['accuracy'])}. Test it: python -m "
        f"experiments.pathx evaluate {folder / 'model.safetensors'}",
        soft_wrap=True,
    )


def print_evaluated(console: Console, found: dict[str, Any], baselines: str) -> None:
    console.print(
        f"{found['task']}, background {found['background']}: accuracy {percent(found['accuracy'])} ± "
        f"{100 * found['error']:.2f} on {found['images']:,} test images ({percent(found['connected'])} connected)"
        + (f"; trained with {supervision}" if (supervision := described(found["helped"])) else ""),
        soft_wrap=True,
    )
    if baselines:
        console.print(f"Baselines: {baselines}", soft_wrap=True)


def print_stored(console: Console, stored: dict[str, Any], *, same: bool) -> None:
    console.print(
        f"Stored: {percent(stored['accuracy'])} on {stored['images']:,}; "
        + ("the same within the error." if same else "[red]they differ.[/red]")
    )
