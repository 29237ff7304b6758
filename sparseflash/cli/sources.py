"""Imports the user's own code: a Python file or a module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


class Missing(ValueError):
    """There is no such file or module, or it is not Python."""


def module_of(source: str) -> ModuleType:
    """Imports a module by name, or runs a file whose name ends in .py as one.

    Raises Missing if there is no such file or module, or if it is not Python. Errors raised inside an existing module,
    also for imports that it lacks, propagate unchanged.
    """
    if source.endswith(".py"):
        return _run(Path(source))
    if not all(part.isidentifier() for part in source.split(".")):
        raise Missing(f"there is no module {source}; a Python file ends with .py")
    if "" not in sys.path:
        sys.path.insert(0, "")  # an installed command does not search the current folder
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        # If an existing module lacks something it imports, that is the user's own error and is shown unchanged.
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise
        raise Missing(f"there is no module {source}; a Python file ends with .py") from None
    except SyntaxError as error:
        raise _not_python(source, error) from None


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mask_file_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise Missing(f"there is no file {path}")
    try:
        spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    except (SyntaxError, ValueError) as error:  # ValueError: Python 3.10, of null bytes
        raise _not_python(path, error) from None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look the module up by name
    spec.loader.exec_module(module)
    return module


def _not_python(source: str | Path, error: Exception) -> Missing:
    return Missing(f"{source} must be Python source; got {error}")
