"""Memory-mapped token files, made once from a folder of text.

<store>/train.bin, val.bin          all tokens of a part, uint16 or uint32, each document ended by the last token
<store>/test.bin, ...               the same of texts that neither train nor choose settings, if the corpus has them
<store>/train.starts.npy, ...       the first token of each document, int64, and the number of tokens
<store>/tokenizer.json              the vocabulary; none for bytes
<store>/about.json                  counts, hashes and the sources, written last: a folder without it is not complete

A packed store is one file, an archive of these, to be carried to another machine.
"""

from __future__ import annotations

import hashlib
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from experiments.lm.data.files import VALIDATION_SHARE, Found, find
from experiments.lm.data.tokenizer import BYTES, FILE, BytePairs, Bytes, Tokenizer, load
from experiments.training.archives import members
from experiments.training.atomic_files import write_json
from experiments.training.reading import read_json, reading

ABOUT = "about.json"
PARTS = ("train", "val")
TEST = "test"
VOCABULARY_BYTES = 200 * 2**20  # of training texts, to learn a vocabulary from
_TOGETHER = 4 * 2**20  # characters tokenised at once, because the package needs a hundred bytes for each
# LZMA on numbers of two bytes: the state depends on which of the two is next.
_PACKED = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1, "dict_size": 2**26}]

Progress = Callable[[str], None]


class Text(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> bytes: ...
    def texts(self) -> list[str]: ...


@dataclass(frozen=True)
class Part:
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
    test: Part | None = None

    @property
    def vocabulary(self) -> int:
        return int(self.about["vocabulary"])

    @property
    def tokenizer(self) -> Tokenizer:
        return load(self.folder)


def opened(folder: Path) -> Store:
    path = folder / ABOUT
    if not path.is_file():
        raise FileNotFoundError(f"there are no tokens in {folder}")
    about = read_json(path, "what `corpus` writes about tokens", "dtype", "vocabulary")
    with reading(folder, "a folder of tokens that `corpus` has made"):
        if about["dtype"] not in ("uint16", "uint32") or type(about["vocabulary"]) is not int:
            raise ValueError(f"tokens of type {about['dtype']!r} and a vocabulary of {about['vocabulary']!r}")
        train, val = (_part(folder, name, about["dtype"]) for name in PARTS)
        test = _part(folder, TEST, about["dtype"]) if (folder / f"{TEST}.bin").is_file() else None
    return Store(folder, train, val, about, test)


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
    """The tokens of a folder, stored or made from its text files in a hidden subfolder, or unpacked beside a packed
    store.

    vocabulary: the maximum number of tokens; at most 257 means bytes. Tokens are made again if the texts have changed.
    """
    if data.is_file() or (data / ABOUT).is_file():
        return opened_or_unpacked(data)
    found = find([data])
    target = data / f".tokens-{vocabulary}"
    if (target / ABOUT).is_file():
        store = opened(target)
        if store.about["texts"] == _digest(found.documents):
            return store
    return make(found, target, vocabulary, say)


def make(found: Found, target: Path, vocabulary: int, say: Progress, share: float = VALIDATION_SHARE) -> Store:
    training, validation = found.split(share)
    if not training or not validation:
        raise ValueError(
            f"there must be texts to train on and to validate on; got {len(training)} and {len(validation)}: "
            f"give more files (about {share:.0%} of them validate), or a larger share: `corpus --validation 0.2`"
        )
    packages = {
        name: {document.name: document.digest.hex() for document in documents if document.name}
        for name, documents in zip(PARTS, (training, validation), strict=True)
    }
    facts = {"skipped": found.skipped, "duplicates": found.duplicates, "packages": packages}
    parts = dict(zip(PARTS, (training, validation), strict=True))
    return make_parts(parts, target, vocabulary, say, {**facts, "texts": _digest(found.documents)})


def make_parts(
    parts: Mapping[str, Sequence[Text]], target: Path, vocabulary: int, say: Progress, facts: Mapping[str, Any]
) -> Store:
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tokenizer: Tokenizer = Bytes()
    if vocabulary > BYTES + 1:
        say(f"Learning a vocabulary of {vocabulary:,} tokens")
        pairs = BytePairs.trained(_texts(parts["train"], VOCABULARY_BYTES), vocabulary)
        pairs.save(unfinished / FILE)
        tokenizer = pairs
    dtype = np.dtype("uint16" if tokenizer.size <= 2**16 else "uint32")
    counts, hashes = {}, {}
    for name, documents in parts.items():
        counts[name], hashes[name] = _write(unfinished, name, documents, tokenizer, dtype, say)
    about = {
        "vocabulary": tokenizer.size,
        "kind": "bytes" if isinstance(tokenizer, Bytes) else "byte pairs",
        "dtype": dtype.name,
        "tokens": counts,
        "documents": {name: len(documents) for name, documents in parts.items()},
        **facts,
        "hash": hashlib.sha256("".join(hashes.values()).encode()).hexdigest(),
    }
    write_json(unfinished / ABOUT, about)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    say(f"{counts['train']:,} tokens to train on, {counts['val']:,} to validate on, in {target}")
    return opened(target)


def pack(store: Store, path: Path) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    with lzma.open(unfinished, "wb", filters=_PACKED) as compressed, tarfile.open(fileobj=compressed, mode="w") as made:
        for file in sorted(each for each in store.folder.iterdir() if each.is_file()):
            made.add(file, file.name)
    unfinished.replace(path)


def opened_or_unpacked(data: Path) -> Store:
    return unpacked(data) if data.is_file() else opened(data)


def unpacked(path: Path) -> Store:
    """The tokens of a packed store, in a hidden folder beside it that the first call makes."""
    key = f"{path.stat().st_size}-{path.stat().st_mtime_ns}"
    target = path.with_name(f".tokens-{path.name.partition('.')[0]}-{key}")
    if not (target / ABOUT).is_file():
        with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=path.parent) as folder:  # of this process alone
            made = Path(folder) / "tokens"
            made.mkdir()
            for name, contents in members(path, "tokens that `corpus --pack` has written"):
                (made / name[-1]).write_bytes(contents)
            if not (made / ABOUT).is_file():
                raise ValueError(f"{path} must be tokens that `corpus --pack` has written; it has no {ABOUT}")
            if not (target / ABOUT).is_file():  # otherwise another process has unpacked it meanwhile
                shutil.rmtree(target, ignore_errors=True)
            try:
                made.rename(target)
            except OSError:
                if not (target / ABOUT).is_file():
                    raise
    return opened(target)


def check_replaceable(folder: Path) -> None:
    if folder.exists() and not (folder / ABOUT).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} must be empty, or hold tokens that are replaced; choose another --out")


def _digest(documents: Sequence[Text]) -> str:
    return hashlib.sha256(b"".join(document.digest for document in documents)).hexdigest()


def _texts(documents: Sequence[Text], most: int) -> Iterator[str]:
    for document in documents:
        for text in document.texts():
            most -= len(text)
            if most < 0:
                return
            yield text


def _write(
    folder: Path, name: str, documents: Sequence[Text], tokenizer: Tokenizer, dtype: np.dtype, say: Progress
) -> tuple[int, str]:
    starts, digest = [0], hashlib.sha256()
    end = np.array([tokenizer.size - 1], dtype)
    count = 0
    with open(folder / f"{name}.bin", "wb") as file:
        for pieces in _together(documents):
            say(f"Cutting {name}: {len(starts) - 1:,} of {len(documents):,} documents")
            cut = tokenizer.encode([text for text, _ in pieces])
            for tokens, (_, is_last) in zip(cut, pieces, strict=True):
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


def _together(documents: Sequence[Text]) -> Iterator[list[tuple[str, bool]]]:
    some: list[tuple[str, bool]] = []
    size = 0
    for document in documents:
        *first, last = document.texts()
        for piece in (*((text, False) for text in first), (last, True)):
            some.append(piece)
            size += len(piece[0])
            if size >= _TOGETHER:
                yield some
                some, size = [], 0
    if some:
        yield some
