"""The files of tar archives, read without unpacking them."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from experiments.training.reading import reading


def members(path: Path, what: str) -> Iterator[tuple[tuple[str, ...], bytes]]:
    with reading(path, what):
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    file = archive.extractfile(member)
                    if file is not None:
                        yield tuple(member.name.split("/")), file.read()
        except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError) as error:
            raise ValueError(error) from error
