"""Whole novels as documents, split by author."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from experiments.training.books import SPLITS, Book, archives_in, read


@dataclass(frozen=True)
class Novel:
    book: Book
    digest: bytes

    @property
    def name(self) -> str:
        return f"{self.book.author}: {self.book.title}"

    def texts(self) -> list[str]:
        return [decoded(self.book.text)]


def novels(folder: Path, most: int | None = None) -> dict[str, list[Novel]]:
    """The novels of training, validation and test, in the order of their digests; no author is in two parts.

    folder: of the archives, or an archive. most: bytes of the training text; which novels stay does not depend on it.
    """
    found = [Novel(book, hashlib.sha256(book.text.strip()).digest()) for book in read(archives_in(folder))]
    ordered = sorted(found, key=lambda novel: novel.digest)
    parts = {split: [novel for novel in ordered if novel.book.split == split] for split in SPLITS}
    if most is not None:
        kept = []
        for novel in parts["train"]:
            most -= len(novel.book.text)
            if most < 0:
                break
            kept.append(novel)
        parts["train"] = kept
    return parts


def decoded(text: bytes) -> str:
    """The text of a file in UTF-8 or, as some older files are, in Latin-1.

    >>> decoded("£".encode("latin-1")) == decoded("£".encode())
    True
    """
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError:
        return text.decode("latin-1")
