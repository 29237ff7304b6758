"""Small files that are whole at every moment, even if the run is killed while it writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def replace_text(path: Path, text: str) -> None:
    """Write a file beside its old version and put it in its place."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def write_json(path: Path, value: Any) -> None:
    """Write plain values for people and programs to read."""
    replace_text(path, json.dumps(value, indent=2) + "\n")
