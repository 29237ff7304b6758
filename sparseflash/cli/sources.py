"""Python of the user's own: a file, or a module that can be imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


class Missing(ValueError):
    """There is no such file or module."""


def module_of(source: str) -> ModuleType:
    """Import a module by its name, or run a file whose name ends with .py as one.

    Raises Missing where there is none; what a module that exists lacks, or raises, is left as it is.
    """
    if source.endswith(".py"):
        return _run(Path(source))
    if not all(part.isidentifier() for part in source.split(".")):
        raise Missing(f"there is no module {source}; a file of Python ends with .py")
    if "" not in sys.path:
        sys.path.insert(0, "")  # an installed command does not look where it is called
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        # A module that exists and itself lacks something is the user's own error, shown as it is.
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise
        raise Missing(f"there is no module {source}; a file of Python ends with .py") from None


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mask_file_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise Missing(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look a module up by its name
    spec.loader.exec_module(module)
    return module
