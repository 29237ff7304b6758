"""Tokenised examples on disk: parsed once, then memory-mapped by every run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from experiments.training.reading import reading

FORMAT = 2  # increase it when symbols or arrays change

Row = tuple[int, tuple[bytes, ...]]


@dataclass(frozen=True)
class Examples:
    """Examples of different lengths, T sequences each.

    symbols  uint8 [total]   sequence t of example i is symbols[begins[i, t]:ends[i, t]]
    begins   int64 [n, T]
    ends     int64 [n, T]
    labels   uint8 [n]       classes
    shift    added to a symbol to make an id: 1 if symbols begin at 0, because id 0 is padding
    """

    symbols: NDArray[np.uint8]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    labels: NDArray[np.uint8]
    shift: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def towers(self) -> int:
        return self.begins.shape[1]

    def sequence(self, index: int, tower: int = 0) -> NDArray[np.uint8]:
        return self.symbols[self.begins[index, tower] : self.ends[index, tower]]

    @property
    def first_symbols(self) -> NDArray[np.uint8]:
        """uint8 [n]; in ListOps the root operator."""
        return self.symbols[self.begins[:, 0]]

    def take(self, rows: NDArray[np.int64]) -> Examples:
        return Examples(self.symbols, self.begins[rows], self.ends[rows], self.labels[rows], self.shift)


def in_memory(rows: Iterable[Row], *, shift: int) -> Examples:
    """The examples of some rows, which are not stored.

    >>> in_memory([(1, (b"ab",)), (0, (b"c",))], shift=1).sequence(0).tobytes()
    b'ab'
    """
    labels, sequences = [], []
    for label, row in rows:
        labels.append(label)
        sequences.append(row)
    starts = np.cumsum([0, *(len(each) for row in sequences for each in row)], dtype=np.int64)
    symbols = np.frombuffer(b"".join(each for row in sequences for each in row), np.uint8)
    towers = len(sequences[0])
    begins, ends = starts[:-1].reshape(-1, towers), starts[1:].reshape(-1, towers)
    return Examples(symbols, begins, ends, np.array(labels, np.uint8), shift)


def cached(
    place: Path,
    name: str,
    sources: Iterable[Path],
    rows: Callable[[], Iterator[Row]],
    *,
    shift: int,
    total: int | None = None,
) -> Examples:
    """Memory-mapped from `<place>/tokens/`, which is written if missing."""
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    key = blake2b(f"{FORMAT} {name} {states}".encode(), digest_size=8).hexdigest()
    folder = place / "tokens" / f"{name}-{key}"
    if not folder.exists():
        _write(rows(), folder, name, total)
    with reading(folder, "a folder of examples that an earlier run has made; delete it to make it again"):
        starts, labels = (np.load(folder / f"{array}.npy", mmap_mode="r") for array in ("starts", "labels"))
        symbols = np.memmap(folder / "symbols.u8", np.uint8, mode="r")
        if (starts.dtype, labels.dtype) != (np.int64, np.uint8) or starts.ndim != 1 or labels.ndim != 1:
            raise ValueError(
                f"starts {starts.dtype} {list(starts.shape)} and labels {labels.dtype} {list(labels.shape)}"
            )
        towers, rest = divmod(len(starts) - 1, len(labels))
        if towers < 1 or rest or starts[0] != 0 or starts[-1] != len(symbols) or (np.diff(starts) < 1).any():
            raise ValueError(f"{len(labels)} labels, {len(starts)} starts and {len(symbols)} symbols")
    return Examples(symbols, starts[:-1].reshape(-1, towers), starts[1:].reshape(-1, towers), labels, shift)


def _write(rows: Iterator[Row], folder: Path, name: str, total: int | None) -> None:
    try:
        folder.parent.mkdir(exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ValueError(
            f"what is read from {folder.parent.parent} is kept there, in its folder tokens, which cannot be written "
            f"({error.strerror}); pass a copy of the data in a folder that can"
        ) from None
    starts, labels = [0], []
    console = Console(stderr=True)
    try:
        with open(unfinished / "symbols.u8", "wb") as file:
            shown = track(
                rows, f"Reading {name}", total, console=console, disable=not console.is_terminal, transient=True
            )
            for label, sequences in shown:
                labels.append(label)
                for sequence in sequences:
                    if not sequence:
                        raise ValueError(f"example {len(labels)} of {name} must have at least one token; it is empty")
                    file.write(sequence)
                    starts.append(starts[-1] + len(sequence))
        if not labels:
            raise ValueError(f"{name} must hold at least one example; there is none")
        np.save(unfinished / "starts.npy", np.array(starts, np.int64))
        np.save(unfinished / "labels.npy", np.array(labels, np.uint8))
        unfinished.chmod(0o755)
        try:
            os.replace(unfinished, folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
