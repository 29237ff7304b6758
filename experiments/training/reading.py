from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# RuntimeError: PyTorch's, and RecursionError. MemoryError: sizes in a header. ArithmeticError: large numbers.
_OF_CONTENTS = (
    OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, MemoryError, ArithmeticError,
)  # fmt: skip


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Inside the context, errors name the file and its expected contents.

    >>> with reading(Path("nowhere.json"), "a JSON list"):
    ...     json.loads(Path("nowhere.json").read_text())
    Traceback (most recent call last):
    ValueError: nowhere.json must be a JSON list; there is no such file
    """
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"{path} must be {what}; there is no such file") from error
    except IsADirectoryError as error:
        raise ValueError(f"{path} must be {what}; it is a folder") from error
    except _OF_CONTENTS as error:
        first, *_ = str(error).splitlines() or [""]
        raise ValueError(f"{path} must be {what}; got {type(error).__name__}: {first}") from error


def read_json(path: Path, what: str, *names: str) -> dict[str, Any]:
    with reading(path, what):
        values = json.loads(path.read_text(encoding="utf-8"))
    return checked(path, what, values, *names)


def checked(path: Path, what: str, values: Any, *names: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be {what}; it is no JSON object")
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"{path} must be {what}; it has no {', '.join(missing)}")
    return values
