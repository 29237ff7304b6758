"""The folder of a run: what it holds of a run, and what of that a resumed run must keep.

<run>/config.json         the settings
<run>/log.jsonl           loss, accuracy and speed over the steps; see run_log.py
<run>/checkpoint-*        the newest state; see checkpoint.py
<run>/model.safetensors   the weights when the run is complete; in parts if they are large; see tensor_files.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from experiments.training import checkpoint, tensor_files

SETTINGS = "config.json"
LOG = "log.jsonl"

Settings = TypeVar("Settings")


def saved_settings(path: Path) -> dict[str, Any]:
    """What a run has written into its file of settings; raises FileNotFoundError where there is none."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no run to resume in {path.parent}")
    saved: dict[str, Any] = json.loads(path.read_text())
    return saved


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


def holds_run(folder: Path) -> bool:
    """Whether the folder holds a run, or something of one."""
    files = any((folder / name).exists() for name in (SETTINGS, LOG)) or any(folder.glob("model*.safetensors"))
    return files or bool(checkpoint.folders(folder))


def check_unused(folder: Path) -> None:
    """Raises FileExistsError where the folder holds a run, or something of one."""
    if holds_run(folder):
        raise FileExistsError(
            f"{folder} holds a run; go on with it by --resume, replace it by --overwrite, or "
            "choose another folder with --out"
        )


def discard(folder: Path) -> None:
    """Delete the run in a folder, so that nothing of it can be taken for a part of the next one."""
    if not holds_run(folder):
        return  # --out may be any folder, and its files of the names below are not a run's
    for name in ("tests", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)
    checkpoint.remove(folder)
    tensor_files.remove(folder / "model.safetensors")
    for name in ("metrics.json", "model.json", LOG, SETTINGS):  # the last one, by which the rest is found to be a run's
        (folder / name).unlink(missing_ok=True)
