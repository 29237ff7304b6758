"""Tokenised examples on disk: read once from the text, then memory-mapped by every run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.lra import tokens

FORMAT = 1  # raise it when the ids or the arrays change, so that old caches are not read


@dataclass(frozen=True)
class Examples:
    """Examples of different lengths, end to end.

    ids      uint8 [total]   token ids; example i is ids[starts[i]:starts[i + 1]]
    starts   int64 [n + 1]
    labels   uint8 [n]       classes
    """

    ids: NDArray[np.uint8]
    starts: NDArray[np.int64]
    labels: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return self.ids[self.starts[index] : self.starts[index + 1]]

    @property
    def first_ids(self) -> NDArray[np.uint8]:
        """The first token of every example; in ListOps that is the root operator. uint8 [n]"""
        return self.ids[self.starts[:-1]]


def read_tsv(path: Path) -> Iterator[tuple[bytes, int]]:
    """(ids, class) for each line of a file in the released format; raises ValueError naming file and line."""
    with open(path, "rb") as file:
        header = file.readline().rstrip(b"\r\n")
        if header != b"Source\tTarget":
            raise ValueError(f"{path} must begin with the header Source<tab>Target; got {header[:60]!r}")
        for number, line in enumerate(file, start=2):
            try:
                source, target = line.rstrip(b"\r\n").split(b"\t")
                if len(target) != 1 or not target.isdigit():
                    raise ValueError(f"has the class {target!r} where one digit must stand")
                yield tokens.encode(source), int(target)
            except ValueError as error:
                raise ValueError(f"line {number} of {path} is not a ListOps example: {line[:60]!r}: {error}") from None


def tokenise(path: Path) -> Examples:
    """All examples of a file, in memory."""
    ids = bytearray()
    starts, labels = [0], []
    for example, label in read_tsv(path):
        ids += example
        starts.append(len(ids))
        labels.append(label)
    if not labels:
        raise ValueError(f"{path} must hold at least one example; it has only the header")
    return Examples(np.frombuffer(ids, np.uint8), np.array(starts, np.int64), np.array(labels, np.uint8))


def open_examples(path: Path) -> Examples:
    """The examples of a file, memory-mapped from `<its folder>/tokens/`, which is written when it is missing.

    A cache belongs to one state of the file: its name, size and time of change.
    """
    state = path.stat()
    key = blake2b(f"{FORMAT} {path.name} {state.st_size} {state.st_mtime_ns}".encode(), digest_size=8).hexdigest()
    folder = path.parent / "tokens" / f"{path.stem}-{key}"
    if not folder.exists():
        write(tokenise(path), folder)
    return Examples(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "starts", "labels")))


def write(examples: Examples, folder: Path) -> None:
    """Save the arrays so that the folder exists only when it is complete."""
    folder.parent.mkdir(exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name in ("ids", "starts", "labels"):
            np.save(unfinished / f"{name}.npy", getattr(examples, name))
        unfinished.chmod(0o755)  # mkdtemp makes it private
        try:
            os.replace(unfinished, folder)
        except OSError:
            if not folder.exists():  # another run has just written the same
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
