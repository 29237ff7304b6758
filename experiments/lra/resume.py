"""Going on with a run: what of it must be as it was."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from experiments.lra import tensorfile
from experiments.lra.checkpoint import folders, remove

Settings = TypeVar("Settings")


def resumed(saved: Settings, chosen: dict[str, Any], free: Collection[str]) -> Settings:
    """A saved run's settings, a dataclass, with what was chosen now; raises ValueError where that changes the run.

    free: the settings that may be chosen anew.
    """
    for name, value in chosen.items():
        if value != getattr(saved, name) and name not in free:
            raise ValueError(
                f"a resumed run must keep its settings: --{name.replace('_', '-')} was "
                f"{getattr(saved, name)}, got {value}; start another run with another --out"
            )
    return replace(saved, **chosen)  # type: ignore[type-var]


def discard(folder: Path) -> None:
    """Delete the run in a folder, so that nothing of it can be taken for a part of the next one."""
    remove(folder)
    for name in ("config.json", "log.jsonl", "metrics.json"):
        (folder / name).unlink(missing_ok=True)
    tensorfile.remove(folder / "model.safetensors")
    for name in ("tests", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)


def check_unused(folder: Path) -> None:
    """Raises FileExistsError where the folder holds a run, or something of one."""
    if (folder / "config.json").exists() or any(folder.glob("model*.safetensors")) or folders(folder):
        raise FileExistsError(
            f"{folder} holds a run; go on with it by --resume, replace it by --overwrite, or "
            "choose another folder with --out"
        )
