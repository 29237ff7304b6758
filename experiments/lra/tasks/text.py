"""Text: whether a film review is positive, from its bytes. The Large Movie Review Dataset (Maas et al., 2011)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from experiments.lra.data.examples import Examples, Row, cached
from experiments.lra.tasks.task import Data, Task, need

TASK = Task("text", 258, 2, longest=4096)

CLASSES = ("neg", "pos")
ADVICE = (
    "unpack aclImdb_v1.tar.gz (the Large Movie Review Dataset, ai.stanford.edu/~amaas/data/sentiment) and pass its "
    "folder aclImdb, which has train/neg, train/pos, test/neg and test/pos"
)


def load(folder: Path) -> Data:
    """25,000 reviews for training; the test split is also the validation split, as in the Long Range Arena."""
    need(folder, ADVICE)
    place = (folder / "aclImdb" if (folder / "aclImdb").is_dir() else folder).resolve()
    missing = [
        f"{split}/{name}" for split in ("train", "test") for name in CLASSES if not (place / split / name).is_dir()
    ]
    if missing:
        raise FileNotFoundError(f"{place} lacks {', '.join(missing)}; {ADVICE}")
    train, test = (open_split(place, split) for split in ("train", "test"))
    return Data(TASK, place, "Large Movie Review Dataset", False, train, test, test)


def open_split(place: Path, split: str) -> Examples:
    folders = [place / split / name for name in CLASSES]
    return cached(place, f"text-{split}", folders, lambda: read(folders), shift=1)


def read(folders: list[Path]) -> Iterator[Row]:
    """A row for each review, alternating classes, so that the first rows of any number are balanced."""
    files = [(number_of(path), label, path) for label, folder in enumerate(folders) for path in folder.glob("*.txt")]
    for _, label, path in sorted(files):
        yield label, (path.read_bytes(),)


def number_of(path: Path) -> int:
    """A review's number: files are named `<number>_<stars>.txt`."""
    number = path.stem.partition("_")[0]
    if not number.isdigit():
        raise ValueError(f"a review must be called <number>_<stars>.txt; got {path}")
    return int(number)
