"""Image: CIFAR-10 in grey, pixel by pixel in rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.lra.data import plain_pickle
from experiments.lra.data.examples import Examples, Row, cached, in_memory
from experiments.lra.tasks.task import Data, Task, need
from experiments.training.archives import members
from experiments.training.reading import reading

TASK = Task("image", 258, 10, longest=1024, side=32)

PIXELS = 32 * 32
FORMS = {
    "cifar-10-batches-bin": ([f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin"),
    "cifar-10-batches-py": ([f"data_batch_{i}" for i in range(1, 6)], "test_batch"),
}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ADVICE = (
    "unpack cifar-10-binary.tar.gz or cifar-10-python.tar.gz (www.cs.toronto.edu/~kriz/cifar.html) and pass the "
    "folder that holds cifar-10-batches-bin or cifar-10-batches-py; or an archive of JPEG files, "
    "{train,test}/CLASS/NUMBER.jpg"
)


def load(folder: Path) -> Data:
    """50,000 images, the first nine tenths for training and the last tenth for validation; 10,000 for testing."""
    if folder.is_file():
        both, test = from_jpegs(folder)
        return of_splits(folder.resolve(), "CIFAR-10 from JPEG", both, test)
    need(folder, ADVICE)
    for form, (train_names, test_name) in FORMS.items():
        for place in (folder / form, folder):
            if place.name != form or not place.is_dir():
                continue
            missing = [name for name in (*train_names, test_name) if not (place / name).is_file()]
            if missing:
                raise FileNotFoundError(f"{place} lacks {', '.join(missing)}; {ADVICE}")
            place = place.resolve()
            both = open_files([place / name for name in train_names], "image-train")
            test = open_files([place / test_name], "image-test")
            return of_splits(place, "CIFAR-10", both, test)
    raise FileNotFoundError(f"the data folder {folder} holds no CIFAR-10 files; {ADVICE}")


def of_splits(place: Path, origin: str, both: Examples, test: Examples) -> Data:
    rows = np.arange(len(both))
    last = len(both) * 9 // 10
    return Data(TASK, place, origin, False, both.take(rows[:last]), both.take(rows[last:]), test)


def from_jpegs(path: Path) -> list[Examples]:
    from PIL import Image

    rows: dict[str, list[Row]] = {"train": [], "test": []}
    for name, contents in members(path, "an archive of CIFAR-10 as JPEG files"):
        split, label, file = ("", "", *name)[-3:]
        if split not in rows or label not in CLASSES or not file.endswith(".jpg"):
            raise ValueError(f"{path} must hold files {{train,test}}/CLASS/NUMBER.jpg alone; got {'/'.join(name)}")
        with reading(path / "/".join(name), "a JPEG image"), Image.open(BytesIO(contents)) as image:
            colours = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        if colours.shape != (3, 32, 32):
            raise ValueError(f"{'/'.join(name)} in {path} must have 32 x 32 pixels; got {colours.shape[1:]}")
        rows[split].append((CLASSES.index(label), (grey(colours.reshape(1, 3, PIXELS)).tobytes(),)))
    if not all(rows.values()):
        raise ValueError(f"{path} must hold files in train/CLASS and in test/CLASS; {ADVICE}")
    for seed, split in enumerate(rows.values()):
        random.Random(seed).shuffle(split)
    return [in_memory(split, shift=1) for split in rows.values()]


def open_files(paths: list[Path], name: str) -> Examples:
    return cached(paths[0].parent, name, paths, lambda: read(paths), shift=1)


def read(paths: list[Path]) -> Iterator[Row]:
    for path in paths:
        labels, colours = read_binary(path) if path.suffix == ".bin" else read_python(path)
        for label, image in zip(labels.tolist(), grey(colours), strict=True):
            yield label, (image.tobytes(),)


def read_binary(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Classes [n] and colours [n, 3, 1024]: each record has a class and 3,072 bytes (red, green, blue)."""
    data = np.fromfile(path, np.uint8)
    if len(data) == 0 or len(data) % (1 + 3 * PIXELS):
        raise ValueError(f"{path} must hold records of {1 + 3 * PIXELS} bytes; it has {len(data)} bytes")
    records = data.reshape(-1, 1 + 3 * PIXELS)
    return checked(path, records[:, 0], records[:, 1:])


def read_python(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    try:
        batch = plain_pickle.read(path.read_bytes())
        labels, data = batch[b"labels"], batch[b"data"]
        if not isinstance(labels, list) or not all(type(label) is int for label in labels):
            raise ValueError("its labels must be a list of whole numbers")
        if not isinstance(data, np.ndarray):
            raise ValueError(f"its data must be an array; got {type(data).__name__}")
        classes = np.array(labels, np.int64)
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} is not a CIFAR-10 batch: {error}") from None
    if data.shape != (classes.size, 3 * PIXELS) or classes.size == 0:
        raise ValueError(f"{path} must hold uint8 images [n, {3 * PIXELS}]; got {data.dtype} {list(data.shape)}")
    return checked(path, classes, data)


def checked(path: Path, labels: NDArray[Any], data: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    if labels.min() < 0 or labels.max() >= TASK.classes:
        raise ValueError(f"{path} must have classes 0 to 9; got {labels.min()} to {labels.max()}")
    return labels.astype(np.uint8), data.reshape(-1, 3, PIXELS)


def grey(colours: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`[n, 3, 1024]` to `[n, 1024]` like TensorFlow's `rgb_to_grayscale`, which the Long Range Arena uses."""
    weights = np.array([0.2989, 0.5870, 0.1140], np.float32)
    bright = np.einsum("ncp,c->np", colours.astype(np.float32) / 255, weights)
    return (bright * np.float32(255.5)).astype(np.uint8)
