"""The text files of a folder: found, deduplicated, and split into training and validation.

The hash of a document's contents decides its part: two copies of a folder give the same parts. A document may also be a
package, whose name decides.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

VALIDATION_SHARE = 0.02
LEAST_BYTES = 64  # shorter: licence stubs and empty packages
MOST_BYTES = 4 * 2**20  # longer: data rather than text


@dataclass(frozen=True)
class Document:
    """Consecutive text files.

    name: of a package; empty for a file. digest: the SHA-256 of the text without white space at both ends; for a
    package, of its files' digests.
    """

    paths: tuple[Path, ...]
    digest: bytes
    name: str = ""

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def texts(self) -> list[str]:
        return [text_of(path.read_bytes()) or "" for path in self.paths]


@dataclass(frozen=True)
class Found:
    documents: tuple[Document, ...]
    skipped: int
    duplicates: int

    @property
    def files(self) -> int:
        return sum(len(document.paths) for document in self.documents)

    def limited(self, most: int) -> Found:
        kept = []
        for document in sorted(self.documents, key=lambda document: document.digest[::-1]):
            most -= document.bytes
            if most < 0:
                break
            kept.append(document)
        return Found(tuple(sorted(kept, key=_by_digest)), self.skipped, self.duplicates)

    def split(self, share: float = VALIDATION_SHARE) -> tuple[list[Document], list[Document]]:
        training = [document for document in self.documents if not is_validation(document, share)]
        validation = [document for document in self.documents if is_validation(document, share)]
        return training, validation


def find(
    folders: Sequence[Path], suffixes: Sequence[str] = (), excluded: Sequence[str] = (), packages: bool = False
) -> Found:
    """Each text once; near copies are kept.

    suffixes: such as .py; empty: all. excluded: folders. packages: join the files below each folder inside `folders`.
    """
    known: dict[bytes, Document] = {}
    skipped = duplicates = 0
    for path in paths(folders, suffixes, excluded):
        size = path.stat().st_size
        text = text_of(path.read_bytes()) if LEAST_BYTES <= size <= MOST_BYTES else None
        if text is None:
            skipped += 1
            continue
        digest = hashlib.sha256(text.strip().encode()).digest()
        duplicates += digest in known
        known.setdefault(digest, Document((path,), digest))
    if not known:
        wanted = f" with {', '.join(suffixes)}" if suffixes else ""
        raise ValueError(
            f"there must be UTF-8 files{wanted} of {LEAST_BYTES} bytes to {MOST_BYTES // 2**20} MiB below "
            f"{', '.join(map(str, folders))}; got none: choose another folder, or make one with `corpus`"
        )
    documents = joined(known.values(), folders) if packages else known.values()
    return Found(tuple(sorted(documents, key=_by_digest)), skipped, duplicates)


def joined(files: Iterable[Document], folders: Sequence[Path]) -> list[Document]:
    """A package: the files below a folder inside `folders`, or a single file there."""
    groups: dict[str, list[Document]] = defaultdict(list)
    for file in files:
        (path,) = file.paths
        inside = next(path.relative_to(folder) for folder in folders if path.is_relative_to(folder))
        groups[inside.parts[0]].append(file)
    return [
        Document(
            tuple(path for file in group for path in file.paths),
            hashlib.sha256(b"".join(file.digest for file in group)).digest(),
            name,
        )
        for name, group in groups.items()
    ]


def paths(folders: Sequence[Path], suffixes: Sequence[str], excluded: Sequence[str] = ()) -> Iterator[Path]:
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder).parts
            wanted = not suffixes or path.suffix in suffixes
            hidden = any(part.startswith(".") or part in excluded for part in inside)
            if wanted and not hidden and not path.is_symlink() and path.is_file():
                yield path


def text_of(data: bytes) -> str | None:
    """None if it is not UTF-8 or holds a zero byte."""
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _by_digest(document: Document) -> bytes:
    return document.digest


def is_validation(document: Document, share: float) -> bool:
    """By name or text alone, so the same in every corpus."""
    decides = hashlib.sha256(document.name.encode()).digest() if document.name else document.digest
    return int.from_bytes(decides[:8], "big") < share * 2**64
