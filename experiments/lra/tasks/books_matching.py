"""Books-matching: whether two passages of 4,000 bytes are of the same book. It has the form of the arena's retrieval,
and is none of its tasks.

The passages are drawn from archives of whole works. Training, validation and test have different authors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from experiments.lra.data.archives import members
from experiments.lra.data.examples import Examples
from experiments.lra.tasks.task import Data, Kinds, Task

TASK = Task("books-matching", 258, 2, towers=2, longest=4000)

PAIRS = {"train": 100_000, "val": 5_000, "test": 10_000}
KINDS = ("same book", "another book by the author", "another author")
EDGE = 0.05  # of a book at either end has no passages: title pages, tables of contents, advertisements
VALIDATION = 10  # one author of this many validates
ADVICE = (
    "pass an archive, or a folder of archives books*.tar.xz, of files books/{train,test}/AUTHOR___TITLE.txt, with "
    "other authors in test than in train"
)


@dataclass(frozen=True)
class Book:
    author: str
    title: str
    begin: int  # of its text in the symbols of all books
    end: int


def load(folder: Path) -> Data:
    """100,000 pairs for training, 5,000 for validation, by a tenth of the authors in `train`, and 10,000 for testing.

    Half of the pairs are of one book; the others are half of two books by one author, if it has two, and half of two
    authors. Authors are equally frequent. White space is one blank, because line breaks would tell editions apart.
    """
    books, symbols = read_archives(archives_in(folder))
    splits, kinds = {}, {}
    for number, (split, pairs) in enumerate(PAIRS.items()):
        if (authors := len({book.author for book in books[split]})) < 2:
            raise ValueError(f"{folder} must hold books of two authors at least for {split}; got {authors}; {ADVICE}")
        splits[split], kinds[split] = drawn(books[split], symbols, pairs, seed=number)
    by_kind = Kinds("pair", KINDS, kinds["test"], {})
    origin = "passages of books"
    return Data(TASK, folder.resolve(), origin, False, *splits.values(), kinds=lambda: by_kind)


def archives_in(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    found = sorted(folder.glob("books*.tar*"))
    if not found:
        raise FileNotFoundError(f"the data folder {folder} holds no archives of books; {ADVICE}")
    return found


def read_archives(paths: Sequence[Path]) -> tuple[dict[str, list[Book]], np.ndarray]:
    """The books of each split, sorted by author and title, and the bytes of all texts."""
    texts: dict[tuple[str, str, str], bytes] = {}
    for path in paths:
        for name, contents in members(path, "an archive of books"):
            folder, file = ("", *name)[-2:]
            author, apart, title = file.removesuffix(".txt").partition("___")
            if folder not in ("train", "test") or not apart:
                raise ValueError(
                    f"{path} must hold files {{train,test}}/AUTHOR___TITLE.txt alone; got {'/'.join(name)}"
                )
            text = b" ".join(contents.split())
            if (1 - 2 * EDGE) * len(text) < 4 * TASK.longest:
                raise ValueError(f"a book must have room for passages; got {len(text):,} bytes of {'/'.join(name)}")
            split = folder if folder == "test" or not validates(author) else "val"
            texts[split, author, title] = text
    if both := {author for split, author, _ in texts if split == "test"} & {
        author for split, author, _ in texts if split != "test"
    }:
        raise ValueError(f"the authors of train and test must be different; got {min(both)} in both; {ADVICE}")
    books: dict[str, list[Book]] = {split: [] for split in PAIRS}
    begin = 0
    for (split, author, title), text in (ordered := sorted(texts.items())):
        books[split].append(Book(author, title, begin, begin + len(text)))
        begin += len(text)
    return books, np.frombuffer(b"".join(text for _, text in ordered), np.uint8)


def validates(author: str) -> bool:
    """Whether an author of `train` is for validation: by the name alone, so that every archive says the same."""
    return blake2b(author.encode(), digest_size=8).digest()[0] % VALIDATION == 0


def drawn(books: list[Book], symbols: np.ndarray, pairs: int, *, seed: int) -> tuple[Examples, np.ndarray]:
    """Pairs of passages of these books, the same for equal books and seed, and the kind of each pair."""
    random = np.random.default_rng(seed)
    by_author: dict[str, list[Book]] = {}
    for book in books:
        by_author.setdefault(book.author, []).append(book)
    authors = list(by_author.values())
    begins, kinds = np.zeros((pairs, 2), np.int64), np.zeros(pairs, np.int64)
    for pair in range(pairs):
        number = int(random.integers(len(authors)))
        own = authors[number]
        first = second = own[int(random.integers(len(own)))]
        if pair % 2:  # alternating, so that the first pairs of any number are balanced
            kinds[pair] = 1 if len(own) > 1 and random.random() < 0.5 else 2
            others = (
                own
                if kinds[pair] == 1
                else authors[(number + 1 + int(random.integers(len(authors) - 1))) % len(authors)]
            )
            others = [book for book in others if book is not first]
            second = others[int(random.integers(len(others)))]
        begins[pair] = places(first, second, random)
    labels = (kinds == 0).astype(np.uint8)
    return Examples(symbols, begins, begins + TASK.longest, labels, 1), kinds


def places(first: Book, second: Book, random: np.random.Generator) -> tuple[int, int]:
    """Where the two passages begin; passages of one book do not overlap."""
    while True:
        one, other = (place_in(book, random) for book in (first, second))
        if first is not second or abs(one - other) >= TASK.longest:
            return one, other


def place_in(book: Book, random: np.random.Generator) -> int:
    edge = int((book.end - book.begin) * EDGE)
    return int(random.integers(book.begin + edge, book.end - edge - TASK.longest + 1))
