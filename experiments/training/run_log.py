"""One JSON object on each line, written at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.training.atomic_files import write_text
from experiments.training.reading import reading

Record = dict[str, Any]

MOST_TRAINING = 200  # in a thinned log
LAST = 20  # which tables average


class RunLog:
    """A resumed run first drops the records after its checkpoint. path: None keeps them in memory."""

    def __init__(self, path: Path | None, resumed_at: int | None) -> None:
        self.path = path
        self.records: list[Record] = []
        if path is None:
            return
        self.records = [] if resumed_at is None else [each for each in read(path) if each["step"] <= resumed_at]
        write(path, self.records)

    def write(self, record: Record) -> None:
        if self.path is not None:
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")
        self.records.append(record)

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]


def read(path: Path) -> list[Record]:
    if not path.exists():
        return []
    with reading(path, "the log of a run, a JSON object with its kind and step a line"):
        lines = path.read_text().split("\n")[:-1]  # the last line may be incomplete
        records: list[Record] = [json.loads(line) for line in lines]
        for record in records:
            if not isinstance(record["step"], int) or not isinstance(record["kind"], str):
                raise ValueError(f"the kind {record['kind']!r} and the step {record['step']!r}")
    return records


def write(path: Path, records: Iterable[Record]) -> None:
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def thinned(records: Sequence[Record], most: int = MOST_TRAINING) -> list[Record]:
    """To store with the results, in order.

    >>> log = [{"kind": "train", "step": step} for step in range(1000)] + [{"kind": "val", "step": 999}]
    >>> [record["step"] for record in thinned(log, most=25)][:7], len(thinned(log, most=25))
    ([0, 245, 490, 734, 979, 980, 981], 26)

    All validations and tests, and at most `most` training records: the last 20, and others evenly spaced.
    """
    if most <= LAST:
        raise ValueError(f"most must be more than the {LAST} last training records, which are kept; got {most}")
    training = [number for number, record in enumerate(records) if record["kind"] == "train"]
    if len(training) <= most:
        return list(records)
    early, kept = training[:-LAST], set(training[-LAST:])
    count = most - LAST
    kept.update(early[round(place * (len(early) - 1) / max(1, count - 1))] for place in range(count))
    return [record for number, record in enumerate(records) if record["kind"] != "train" or number in kept]
