"""The folder of a run: its files, and the settings that a resumed run must keep.

<run>/config.json         the settings
<run>/log.jsonl           loss, accuracy and speed over the steps; see run_log.py
<run>/checkpoint-*        the newest state; see checkpoint.py
<run>/model.safetensors   the weights when the run is complete; in parts if they are large; see tensor_files.py
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from experiments.training import checkpoint, tensor_files
from experiments.training.reading import read_json, reading

SETTINGS = "config.json"
LOG = "log.jsonl"
_WHAT = "the settings of a run"

Settings = TypeVar("Settings")


def saved_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no run to resume in {path.parent}")
    return read_json(path, _WHAT, "config")


def settings_as(path: Path, made: Callable[[dict[str, Any]], Settings]) -> Settings:
    saved = saved_settings(path)
    with reading(path, _WHAT):
        return made(saved)


def resumed(saved: Settings, chosen: dict[str, Any], free: Collection[str]) -> Settings:
    for name, value in chosen.items():
        if value != getattr(saved, name) and name not in free:
            raise ValueError(
                f"a resumed run must keep its settings: --{name.replace('_', '-')} was "
                f"{getattr(saved, name)}, got {value}; start another run with another --out"
            )
    return replace(saved, **chosen)  # type: ignore[type-var]


def holds_run(folder: Path) -> bool:
    files = any((folder / name).exists() for name in (SETTINGS, LOG)) or any(folder.glob("model*.safetensors"))
    return files or bool(checkpoint.folders(folder))


def check_replaceable(folder: Path, *, overwrite: bool, initial: str | None) -> None:
    if not holds_run(folder):
        return
    if not overwrite:
        raise FileExistsError(
            f"{folder} holds a run; go on with it by --resume, replace it by --overwrite, or "
            "choose another folder with --out"
        )
    if initial is not None and Path(initial).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"--initial {initial} lies in {folder}, which --overwrite deletes: move it away")


def discard(folder: Path) -> None:
    if not holds_run(folder):
        return  # files with these names may not belong to a run
    shutil.rmtree(folder / "tests", ignore_errors=True)
    checkpoint.remove(folder)
    tensor_files.remove(folder / "model.safetensors")
    for name in ("metrics.json", "model.json", LOG, SETTINGS):
        (folder / name).unlink(missing_ok=True)
