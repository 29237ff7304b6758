"""Reads Pathfinder images in the release's layout, which `python -m experiments.pathfinder export` also writes.

<folder>/pathfinder<R>/<fold>/imgs/<batch>/sample_<i>.png   8-bit grey, R x R
<folder>/pathfinder<R>/<fold>/metadata/<batch>.npy          a line an image, as text or as a NumPy array of strings
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from experiments.pathfinder.parameters import LABEL, UNFINISHED
from experiments.training.reading import reading

SHUFFLE_SEED = 42  # of S4 and others
RELEASE = Path("lra_release")


class Sample(NamedTuple):
    image: Path
    label: int


def find(name: str, folder: Path, fold: str) -> Path:
    """One fold of pathfinder<R>: in `folder`, or in the nested folders of the released archive.

    The archive holds two different folders pathfinder128. Published results use the innermost; the outer one is easier
    (Long Range Arena, issue 38).
    """
    advice = (
        f"place {name}/{fold}, with its folders imgs and metadata, of the Long Range Arena release there (the "
        "archive holds two folders pathfinder128: take that of lra_release/lra_release), or write generated "
        "images so with `python -m experiments.pathfinder generate` and `export`"
    )
    if not folder.is_dir():
        raise FileNotFoundError(f"the data folder {folder} does not exist; {advice}")
    inside = Path(name) / fold
    places = (inside, Path(fold), Path(), RELEASE / inside, RELEASE / RELEASE / inside)
    found = {
        (folder / place).resolve(): place
        for place in places
        if all((folder / place / part).is_dir() for part in ("imgs", "metadata"))
        and (folder / place).resolve().name == fold
    }
    if not found:
        raise FileNotFoundError(f"the data folder {folder} holds no {inside}; {advice}")
    chosen = list(found)[-1]
    released = [place.parts[:1] == RELEASE.parts or folder.resolve().name == RELEASE.name for place in found.values()]
    if len(found) > 1 and not all(released):
        raise ValueError(
            f"the data folder {folder} must hold one {inside}; got {' and '.join(map(str, found))}: name one of them"
        )
    if (chosen / UNFINISHED).exists() and not (chosen / LABEL).exists():
        raise ValueError(
            f"{chosen} holds only a part of the generated images that were being written there; write them again with "
            "`python -m experiments.pathfinder export`"
        )
    if not any((chosen / "metadata").glob("*.npy")):
        raise FileNotFoundError(f"{chosen / 'metadata'} holds no .npy file; {advice}")
    return chosen


def number_of(metadata: Path) -> int:
    if not metadata.stem.isdecimal():
        raise ValueError(f"a file of metadata must be called <number>.npy; got {metadata}")
    return int(metadata.stem)


def read_metadata(path: Path, place: Path) -> Iterator[Sample]:
    with open(path, "rb") as file:
        is_array = file.read(6) == b"\x93NUMPY"
    if is_array:
        with reading(path, "an array of strings [images, columns]"):
            array = np.load(path, mmap_mode="r", allow_pickle=False)  # a header may state any size
            if array.ndim != 2 or array.dtype.kind not in "US":
                raise ValueError(f"{array.dtype} {list(array.shape)}")
            lines = [" ".join(row) for row in array.astype(str)]
    else:
        lines = path.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) < 4 or fields[3] not in ("0", "1"):
            raise ValueError(
                f"line {number} of {path} must begin with folder, file, number and label (0 or 1); got {line[:60]!r}"
            )
        image = Path(fields[0], fields[1])
        if image.is_absolute() or ".." in image.parts:
            raise ValueError(f"line {number} of {path} names a file outside {place}: {line[:60]!r}")
        yield Sample(place / image, int(fields[3]))


def samples_in(place: Path) -> list[Sample]:
    metadata = sorted((place / "metadata").glob("*.npy"), key=number_of)
    return [sample for path in metadata for sample in read_metadata(path, place)]


def is_empty(sample: Sample) -> bool:
    """The release has one empty file; raises FileNotFoundError if it is missing."""
    if not sample.image.is_file():
        raise FileNotFoundError(f"the metadata names {sample.image}, which does not exist; unpack the archive again")
    return sample.image.stat().st_size == 0


def split_rows(images: int, *, shuffled: bool = True) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """shuffled: by `torch.utils.data.random_split` with seed 42, as in S4 and MEGA; otherwise in file order."""
    import torch

    tenth = images // 10
    if tenth == 0:
        raise ValueError(f"three splits need at least 10 images; got {images}")
    rows = np.arange(images)
    if shuffled:
        rows = torch.randperm(images, generator=torch.Generator().manual_seed(SHUFFLE_SEED)).numpy()
    last = images - 2 * tenth
    return rows[:last], rows[last : last + tenth], rows[last + tenth :]


def grey_pixels(path: Path, pixels: int) -> NDArray[np.uint8]:
    side = int(pixels**0.5)
    return grey_png(path, side, side).reshape(-1)


def grey_png(path: Path, width: int, height: int) -> NDArray[np.uint8]:
    wanted = f"{path} must be an 8-bit grey PNG image of {width} x {height}"
    try:
        with Image.open(path, formats=["PNG"]) as image:
            # A few bytes can expand to more pixels than memory holds.
            if image.mode != "L" or image.size != (width, height):
                raise ValueError(f"{wanted}; got {image.mode} {list(image.size)}")
            return np.asarray(image)
    except (OSError, SyntaxError, Image.DecompressionBombError, struct.error) as error:
        raise ValueError(f"{wanted}; got {type(error).__name__}: {error}") from None
