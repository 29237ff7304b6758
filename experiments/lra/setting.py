"""Fields of a dataclass of settings, with what the command line says of them."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any


def setting(default: Any, text: str, shown: str | None = None) -> Any:
    """A field with the help text that the command line shows, and what it calls the default."""
    return field(default=default, metadata={"help": text, "shown": shown or str(default)})


def helps(settings: type) -> dict[str, str]:
    """The help texts of a class by field; a field that is no `setting` has none."""
    return {each.name: each.metadata["help"] for each in fields(settings) if each.metadata}


def shown_defaults(settings: type) -> dict[str, str]:
    """What the command line calls the defaults of a class, by field."""
    return {each.name: each.metadata["shown"] for each in fields(settings) if each.metadata}
