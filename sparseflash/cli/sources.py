"""Imports the user's own code: a Python file or a module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class Missing(ValueError):
    """The file or module does not exist, or is not Python."""


def module_of(source: str) -> ModuleType:
    """Raises Missing if the file or module does not exist, or is not Python. Errors raised inside an existing module,
    also for imports that it lacks, propagate unchanged.
    """
    if source.endswith(".py"):
        return _run(Path(source))
    if not all(part.isidentifier() for part in source.split(".")):
        raise Missing(f"there is no module {source}; a Python file ends with .py")
    if "" not in sys.path:
        sys.path.insert(0, "")  # an installed command does not search the current folder
    names = source.split(".")
    for depth in range(1, len(names) + 1):  # a package runs when its parts are looked for, so it is read before
        name = ".".join(names[:depth])
        if name in sys.modules:
            continue
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            # If an existing module lacks a module that it imports, the user's own error is shown unchanged.
            if error.name != name:
                raise
            spec = None
        if name in sys.modules:
            continue
        if spec is None:
            raise Missing(f"there is no module {source}; a Python file ends with .py")
        _check_python(spec, source)
    return importlib.import_module(source)


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mask_file_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise Missing(f"there is no file {path}")
    _check_python(spec, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look the module up by name
    spec.loader.exec_module(module)
    return module


def _check_python(spec: ModuleSpec, source: str | Path) -> None:
    """Raises Missing for a source that cannot be parsed; errors in its imports are the user's own."""
    get_code = getattr(spec.loader, "get_code", None)  # a folder without __init__.py has none
    try:
        if get_code is not None:
            get_code(spec.name)
    except (SyntaxError, ValueError) as error:
        raise Missing(f"{source} must be Python source; got {error}") from None
