"""Memory-mapped token files, made once from a folder of text.

<store>/train.bin, val.bin          all tokens of a part, uint16 or uint32, each document ended by the last token
<store>/train.starts.npy, ...       the first token of each document, int64, and the number of tokens
<store>/tokenizer.json              the vocabulary; none for bytes
<store>/about.json                  counts, hashes and the sources, written last: a folder without it is not complete
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lm.data.files import VALIDATION_SHARE, Document, Found, find, text_of
from experiments.lm.data.tokenizer import BYTES, FILE, BytePairs, Bytes, Tokenizer, load
from experiments.training.atomic_files import write_json
from experiments.training.reading import read_json, reading

ABOUT = "about.json"
PARTS = ("train", "val")
VOCABULARY_BYTES = 200 * 2**20  # of training texts, to learn a vocabulary from
_TOGETHER = 512  # files tokenised at once

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """starts: the first token of each document, followed by the number of tokens."""

    tokens: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Store:
    folder: Path
    train: Part
    val: Part
    about: dict[str, Any]

    @property
    def vocabulary(self) -> int:
        return int(self.about["vocabulary"])

    @property
    def tokenizer(self) -> Tokenizer:
        return load(self.folder)


def opened(folder: Path) -> Store:
    """Raises FileNotFoundError if the folder holds none."""
    path = folder / ABOUT
    if not path.is_file():
        raise FileNotFoundError(f"there are no tokens in {folder}")
    about = read_json(path, "what `corpus` writes about tokens", "dtype", "vocabulary")
    with reading(folder, "a folder of tokens that `corpus` has made"):
        if about["dtype"] not in ("uint16", "uint32") or type(about["vocabulary"]) is not int:
            raise ValueError(f"tokens of type {about['dtype']!r} and a vocabulary of {about['vocabulary']!r}")
        train, val = (_part(folder, name, about["dtype"]) for name in PARTS)
    return Store(folder, train, val, about)


def _part(folder: Path, name: str, dtype: str) -> Part:
    tokens = np.memmap(folder / f"{name}.bin", np.dtype(dtype), mode="r")
    # A header may state any size.
    starts = np.array(np.load(folder / f"{name}.starts.npy", mmap_mode="r"))
    if starts.dtype != np.int64 or starts.ndim != 1 or starts[0] != 0 or starts[-1] != len(tokens):
        raise ValueError(f"{name}.starts.npy of {starts.dtype} {list(starts.shape)} for {len(tokens)} tokens")
    if (np.diff(starts) < 0).any():
        raise ValueError(f"{name}.starts.npy that does not ascend")
    return Part(tokens, starts)


def tokens_of(data: Path, vocabulary: int, say: Progress) -> Store:
    """The tokens of a folder: its stored tokens, or tokens made from its text files, in a hidden subfolder.

    vocabulary: the maximum number of tokens; at most 257 means bytes. Tokens are made again if the texts have changed.
    """
    if (data / ABOUT).is_file():
        return opened(data)
    found = find([data])
    target = data / f".tokens-{vocabulary}"
    if (target / ABOUT).is_file():
        store = opened(target)
        if store.about["texts"] == _digest(found.documents):
            return store
    return make(found, target, vocabulary, say)


def make(found: Found, target: Path, vocabulary: int, say: Progress, share: float = VALIDATION_SHARE) -> Store:
    """The folder is replaced."""
    training, validation = found.split(share)
    if not training or not validation:
        raise ValueError(
            f"there must be texts to train on and to validate on; got {len(training)} and {len(validation)}: "
            f"give more files (about {share:.0%} of them validate), or a larger share: `corpus --validation 0.2`"
        )
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tokenizer: Tokenizer = Bytes()
    if vocabulary > BYTES + 1:
        say(f"Learning a vocabulary of {vocabulary:,} tokens")
        pairs = BytePairs.trained(_texts(training, VOCABULARY_BYTES), vocabulary)
        pairs.save(unfinished / FILE)
        tokenizer = pairs
    dtype = np.dtype("uint16" if tokenizer.size <= 2**16 else "uint32")
    counts, hashes = {}, {}
    for name, documents in zip(PARTS, (training, validation), strict=True):
        counts[name], hashes[name] = _write(unfinished, name, documents, tokenizer, dtype, say)
    about = {
        "vocabulary": tokenizer.size,
        "kind": "bytes" if isinstance(tokenizer, Bytes) else "byte pairs",
        "dtype": dtype.name,
        "tokens": counts,
        "documents": {"train": len(training), "val": len(validation)},
        "skipped": found.skipped,
        "duplicates": found.duplicates,
        "texts": _digest(found.documents),
        "packages": {
            name: {document.name: document.digest.hex() for document in documents if document.name}
            for name, documents in zip(PARTS, (training, validation), strict=True)
        },
        "hash": hashlib.sha256("".join(hashes.values()).encode()).hexdigest(),
    }
    write_json(unfinished / ABOUT, about)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    say(f"{counts['train']:,} tokens to train on, {counts['val']:,} to validate on, in {target}")
    return opened(target)


def check_replaceable(folder: Path) -> None:
    """Raises FileExistsError for no folder, or one with anything but tokens."""
    if folder.exists() and not (folder / ABOUT).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} must be empty, or hold tokens that are replaced; choose another --out")


def _digest(documents: Sequence[Document]) -> str:
    return hashlib.sha256(b"".join(document.digest for document in documents)).hexdigest()


def _texts(documents: Sequence[Document], most: int) -> Iterator[str]:
    """Texts of at most `most` bytes together. The order of the documents is random enough for a fair sample."""
    for document in documents:
        for text in document.texts():
            most -= len(text)
            if most < 0:
                return
            yield text


def _write(
    folder: Path, name: str, documents: Sequence[Document], tokenizer: Tokenizer, dtype: np.dtype, say: Progress
) -> tuple[int, str]:
    """Write one part; returns its number of tokens and the hash of its file."""
    starts, digest = [0], hashlib.sha256()
    end = np.array([tokenizer.size - 1], dtype)
    files = [(path, path == document.paths[-1]) for document in documents for path in document.paths]
    count = 0
    with open(folder / f"{name}.bin", "wb") as file:
        for first in range(0, len(files), _TOGETHER):
            say(f"Cutting {name}: {first:,} of {len(files):,} files")
            some = files[first : first + _TOGETHER]
            cut = tokenizer.encode([text_of(path.read_bytes()) or "" for path, _ in some])
            for tokens, (_, is_last) in zip(cut, some, strict=True):
                data = tokens.astype(dtype)
                if is_last:
                    data = np.concatenate([data, end])
                file.write(data.tobytes())
                digest.update(data.tobytes())
                count += len(data)
                if is_last:
                    starts.append(count)
    np.save(folder / f"{name}.starts.npy", np.array(starts, np.int64))
    return count, digest.hexdigest()
