"""Examples that are read from an archive into memory, without unpacking it."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from experiments.lra.data.examples import Examples, Row
from experiments.training.reading import reading


def members(path: Path, what: str) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """The files of a tar archive, compressed in any way: the parts of each name, and its bytes.

    Raises ValueError, with `what` the archive must be, if it is no whole archive.
    """
    with reading(path, what):
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    file = archive.extractfile(member)
                    if file is not None:
                        yield tuple(member.name.split("/")), file.read()
        except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError) as error:
            raise ValueError(error) from error


def in_memory(rows: Iterable[Row], *, shift: int) -> Examples:
    """The examples of some rows; see `Examples` for shift.

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
    return Examples(
        symbols,
        starts[:-1].reshape(-1, towers),
        starts[1:].reshape(-1, towers),
        np.array(labels, np.uint8),
        shift,
    )
