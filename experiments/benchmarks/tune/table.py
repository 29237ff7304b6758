"""Writes a configuration into the shipped table, `sparseflash/backends/triton/configs.py`."""

from __future__ import annotations

import re
from pathlib import Path

from experiments.benchmarks.tune.space import Target
from sparseflash.backends.triton import configs
from sparseflash.backends.triton.architecture import architecture_of
from sparseflash.backends.triton.configs import Config

SOURCE = Path(configs.__file__)


def table_name(capability: tuple[int, int], descriptors: bool) -> str:
    """The name of the table that a launch on this architecture reads."""
    table = architecture_of(capability).tables.of(descriptors)
    return next(name for name, value in vars(configs).items() if value is table)


def shipped(target: Target, capability: tuple[int, int]) -> Config:
    """The shipped configuration."""
    return architecture_of(capability).tables.of(target.descriptors)[target.kernel, target.arithmetic, target.dim]


def with_entry(source: str, table: str, target: Target, config: Config) -> str:
    """The source with this entry in this table, which replaces an old entry or is added at the end.

    If the table inherits the entry from another table, that other table keeps it.
    """
    found = re.search(rf"^{table}: _Table = \{{\n(.*?)^\}}", source, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{SOURCE.name} has no table {table}")
    body = found[1]
    key = f'("{target.kernel}", "{target.arithmetic}", {target.dim})'
    entry = f"    {key}: Config({', '.join(map(str, config))}),\n"
    old = re.compile(rf"^    {re.escape(key)}: .*\n", re.MULTILINE)
    body = old.sub(entry, body) if old.search(body) else body + entry
    return source[: found.start(1)] + body + source[found.end(1) :]


def write_entry(capability: tuple[int, int], target: Target, config: Config) -> str:
    """Changes the file and returns the table's name."""
    name = table_name(capability, target.descriptors)
    SOURCE.write_text(with_entry(SOURCE.read_text(), name, target, config))
    return name
