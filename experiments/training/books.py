"""Whole works of many authors in archives: books/{train,test}/AUTHOR___TITLE.txt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from experiments.training.archives import members

SPLITS = ("train", "val", "test")
VALIDATION = 10  # one author of this many in `train` validates
ADVICE = (
    "pass an archive, or a folder of archives books*.tar.xz, of files books/{train,test}/AUTHOR___TITLE.txt, with "
    "other authors in test than in train"
)


@dataclass(frozen=True)
class Book:
    split: str  # train, val or test; no author is in two
    author: str
    title: str
    text: bytes


def archives_in(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise FileNotFoundError(f"the data folder {folder} does not exist; {ADVICE}")
    found = sorted(folder.glob("books*.tar*"))
    if not found:
        raise FileNotFoundError(f"the data folder {folder} holds no archives of books; {ADVICE}")
    return found


def read(paths: Sequence[Path]) -> list[Book]:
    books = sorted(_books(paths), key=lambda book: (SPLITS.index(book.split), book.author, book.title))
    tested = {book.author for book in books if book.split == "test"}
    if both := tested & {book.author for book in books if book.split != "test"}:
        raise ValueError(f"the authors of train and test must be different; got {min(both)} in both; {ADVICE}")
    return books


def _books(paths: Sequence[Path]) -> Iterator[Book]:
    for path in paths:
        for name, text in members(path, "an archive of books"):
            folder, file = ("", *name)[-2:]
            author, apart, title = file.removesuffix(".txt").partition("___")
            if folder not in ("train", "test") or not apart:
                raise ValueError(
                    f"{path} must hold files {{train,test}}/AUTHOR___TITLE.txt alone; got {'/'.join(name)}"
                )
            yield Book(folder if folder == "test" or not validates(author) else "val", author, title, text)


def validates(author: str) -> bool:
    """Whether an author of `train` is for validation: by the name alone, so that every archive says the same."""
    return blake2b(author.encode(), digest_size=8).digest()[0] % VALIDATION == 0
