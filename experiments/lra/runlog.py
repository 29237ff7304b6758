"""A run's log: one JSON object a line, on disk as soon as it is written, so that a killed run has its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.lra.files import replace_text

Record = dict[str, Any]  # kind ("train", "val" or "test"), step, and the numbers of that kind


class RunLog:
    """Appends records; a resumed run first drops those that lie after its checkpoint and will come again.

    path: None keeps the records in memory alone.
    """

    def __init__(self, path: Path | None, resumed_at: int | None) -> None:
        self.path = path
        self.records: list[Record] = []
        if path is None:
            return
        kept = [] if resumed_at is None else [record for record in read(path) if record["step"] <= resumed_at]
        replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        self.records = kept

    def write(self, record: Record) -> None:
        if self.path is not None:
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")
        self.records.append(record)

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]


def read(path: Path) -> list[Record]:
    """The records of a log; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]  # what follows the last line end is incomplete
    return [json.loads(line) for line in lines]
