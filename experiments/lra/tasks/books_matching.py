"""Books-matching: whether two passages of 4,000 bytes are of the same book.

The passages are drawn from archives of whole works, in the form of the arena's retrieval. Training, validation and test
have different authors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.lra.data.examples import Examples
from experiments.lra.tasks.task import Data, Kinds, Task
from experiments.training import books

TASK = Task("books-matching", 258, 2, towers=2, longest=4000)

ADVICE = f"{books.ADVICE}; the stored figures are of 504 works of Project Gutenberg (www.gutenberg.org) by 127 authors"
PAIRS = {"train": 100_000, "val": 5_000, "test": 10_000}
KINDS = ("same book", "another book by the author", "another author")
EDGE = 0.05  # of a book at either end has no passages: title pages, tables of contents, advertisements


@dataclass(frozen=True)
class Span:
    author: str
    begin: int
    end: int


def load(folder: Path) -> Data:
    """100,000 pairs for training, 5,000 for validation, by a tenth of the authors in `train`, and 10,000 for testing.

    Half of the pairs are of one book; the others are half of two books by one author, if it has two, and half of two
    authors. Authors are equally frequent. White space is one blank, because line breaks would tell editions apart.
    """
    spans, symbols = placed(books.read(books.archives_in(folder)))
    splits, kinds = {}, {}
    for number, (split, pairs) in enumerate(PAIRS.items()):
        if (authors := len({span.author for span in spans[split]})) < 2:
            raise ValueError(
                f"{folder} must hold books of at least two authors for {split}; got {authors}; {books.ADVICE}"
            )
        splits[split], kinds[split] = drawn(spans[split], symbols, pairs, seed=number)
    by_kind = Kinds("pair", KINDS, kinds["test"], {})
    return Data(TASK, folder.resolve(), "passages of books", False, *splits.values(), kinds=lambda: by_kind)


def placed(found: Sequence[books.Book]) -> tuple[dict[str, list[Span]], np.ndarray]:
    spans: dict[str, list[Span]] = {split: [] for split in PAIRS}
    texts, begin = [], 0
    for book in found:
        text = b" ".join(book.text.split())
        if (1 - 2 * EDGE) * len(text) < 4 * TASK.longest:
            raise ValueError(f"a book must have room for passages; got {len(text):,} bytes of {book.title}")
        spans[book.split].append(Span(book.author, begin, begin + len(text)))
        texts.append(text)
        begin += len(text)
    return spans, np.frombuffer(b"".join(texts), np.uint8)


def drawn(spans: list[Span], symbols: np.ndarray, pairs: int, *, seed: int) -> tuple[Examples, np.ndarray]:
    random = np.random.default_rng(seed)
    by_author: dict[str, list[Span]] = {}
    for span in spans:
        by_author.setdefault(span.author, []).append(span)
    authors = list(by_author.values())
    begins, kinds = np.zeros((pairs, 2), np.int64), np.zeros(pairs, np.int64)
    for pair in range(pairs):
        number = int(random.integers(len(authors)))
        own = authors[number]
        first = second = own[int(random.integers(len(own)))]
        if pair % 2:  # alternating, so that the first pairs of any number are balanced
            kinds[pair] = 1 if len(own) > 1 and random.random() < 0.5 else 2
            another = authors[(number + 1 + int(random.integers(len(authors) - 1))) % len(authors)]
            others = [span for span in (own if kinds[pair] == 1 else another) if span is not first]
            second = others[int(random.integers(len(others)))]
        begins[pair] = places(first, second, random)
    labels = (kinds == 0).astype(np.uint8)
    return Examples(symbols, begins, begins + TASK.longest, labels, 1), kinds


def places(first: Span, second: Span, random: np.random.Generator) -> tuple[int, int]:
    while True:
        one, other = (place_in(span, random) for span in (first, second))
        if first is not second or abs(one - other) >= TASK.longest:
            return one, other


def place_in(span: Span, random: np.random.Generator) -> int:
    edge = int((span.end - span.begin) * EDGE)
    return int(random.integers(span.begin + edge, span.end - edge - TASK.longest + 1))
