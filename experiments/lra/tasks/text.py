"""Text: whether a film review is positive, from its bytes. The Large Movie Review Dataset (Maas et al., 2011)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from experiments.lra.data.examples import Examples, Row, cached, in_memory
from experiments.lra.tasks.task import Data, Task, need
from experiments.training.archives import members

TASK = Task("text", 258, 2, longest=4096)

CLASSES = ("neg", "pos")
ADVICE = (
    "pass aclImdb_v1.tar.gz (the Large Movie Review Dataset, ai.stanford.edu/~amaas/data/sentiment), or its folder "
    "aclImdb, which has train/neg, train/pos, test/neg and test/pos"
)
ORIGIN = "Large Movie Review Dataset"


def load(folder: Path) -> Data:
    """25,000 reviews for training; the test split is also the validation split, as in the Long Range Arena.

    folder: the unpacked data set, or its archive, which is read into memory.
    """
    if folder.is_file():
        train, test = from_archive(folder)
        return Data(TASK, folder.resolve(), ORIGIN, False, train, test, test)
    need(folder, ADVICE)
    place = (folder / "aclImdb" if (folder / "aclImdb").is_dir() else folder).resolve()
    missing = [
        f"{split}/{name}" for split in ("train", "test") for name in CLASSES if not (place / split / name).is_dir()
    ]
    if missing:
        raise FileNotFoundError(f"{place} lacks {', '.join(missing)}; {ADVICE}")
    train, test = (open_split(place, split) for split in ("train", "test"))
    return Data(TASK, place, ORIGIN, False, train, test, test)


def from_archive(path: Path) -> list[Examples]:
    rows: dict[str, list[tuple[int, int, bytes]]] = {"train": [], "test": []}
    for name, text in members(path, "an archive of the Large Movie Review Dataset"):
        split, label, file = ("", "", *name)[-3:]
        if split in rows and label in CLASSES and file.endswith(".txt"):
            rows[split].append((number_of(Path(file)), CLASSES.index(label), text))
    if not all(rows.values()):
        raise ValueError(f"{path} must hold reviews in train/neg, train/pos, test/neg and test/pos; {ADVICE}")
    return [in_memory(((label, (text,)) for _, label, text in sorted(split)), shift=1) for split in rows.values()]


def open_split(place: Path, split: str) -> Examples:
    folders = [place / split / name for name in CLASSES]
    return cached(place, f"text-{split}", folders, lambda: read(folders), shift=1)


def read(folders: list[Path]) -> Iterator[Row]:
    """A row for each review, alternating classes, so that the first rows of any number are balanced."""
    files = [(number_of(path), label, path) for label, folder in enumerate(folders) for path in folder.glob("*.txt")]
    for _, label, path in sorted(files):
        yield label, (path.read_bytes(),)


def number_of(path: Path) -> int:
    number = path.stem.partition("_")[0]
    if not number.isdigit():
        raise ValueError(f"a review must be called <number>_<stars>.txt; got {path}")
    return int(number)
