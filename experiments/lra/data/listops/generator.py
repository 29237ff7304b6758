"""Generate ListOps data with the published distribution and file format, labelled as generated.

<folder>/listops-generated-500-2000-96000-2000-2000-seed0/
    generated_train.tsv  generated_val.tsv  generated_test.tsv
    generator.json       the settings; its presence says that the folder is complete
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path

from experiments.lra.data.listops import grammar
from experiments.training.workers import available_cores, worker_pool

SPLITS = ("train", "val", "test")
LABEL = "generator.json"
DRAWS_PER_CHUNK = 4000  # about 350 expressions: 0.4 s of work
FRUITLESS_CHUNKS = 50  # then the bounds count as exhausted


@dataclass(frozen=True)
class Settings:
    """Lengths count tokens without parentheses; both bounds are exclusive."""

    longer_than: int = 500
    shorter_than: int = 2000
    train: int = 96000
    val: int = 2000
    test: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.longer_than < 0 or self.shorter_than < self.longer_than + 2:
            raise ValueError(
                "some length must lie strictly between the bounds: "
                f"got longer than {self.longer_than} and shorter than {self.shorter_than}"
            )
        if min(self.sizes) < 1:
            raise ValueError(f"every split must have at least one expression; got {self.sizes}")

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.train, self.val, self.test

    @property
    def folder_name(self) -> str:
        sizes = "-".join(map(str, self.sizes))
        return f"listops-generated-{self.longer_than}-{self.shorter_than}-{sizes}-seed{self.seed}"


def draw_chunk(settings: Settings, chunk: int) -> list[tuple[str, int]]:
    rng = random.Random(f"listops {settings.seed} {chunk}")
    rows = []
    for _ in range(DRAWS_PER_CHUNK):
        tokens = grammar.draw(rng, settings.longer_than, settings.shorter_than)
        if tokens is not None:
            rows.append((grammar.render(tokens), grammar.evaluate(tokens)))
    return rows


def draw_chunks(settings: Settings, workers: int) -> Generator[list[tuple[str, int]], None, None]:
    if workers == 1:
        yield from (draw_chunk(settings, chunk) for chunk in count())
    with worker_pool(workers) as pool:
        ahead: deque[Future[list[tuple[str, int]]]] = deque()
        try:
            for chunk in count():
                ahead.append(pool.submit(draw_chunk, settings, chunk))
                if len(ahead) > 2 * workers:
                    yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def draw_distinct(settings: Settings, workers: int) -> Generator[tuple[str, int], None, None]:
    seen: set[bytes] = set()
    fruitless = 0
    with closing(draw_chunks(settings, workers)) as chunks:
        for rows in chunks:
            found_before = len(seen)
            for source, value in rows:
                digest = blake2b(source.encode(), digest_size=16).digest()  # texts would take 600 MB
                if digest not in seen:
                    seen.add(digest)
                    yield source, value
            fruitless = 0 if len(seen) > found_before else fruitless + 1
            if fruitless == FRUITLESS_CHUNKS:
                raise ValueError(
                    f"found only {len(seen)} distinct expressions longer than {settings.longer_than} and "
                    f"shorter than {settings.shorter_than} tokens; widen the bounds or ask for smaller "
                    f"splits than {settings.sizes}"
                )


def generate(
    settings: Settings,
    parent: Path,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda written: None,
) -> Path:
    """A complete folder is kept; the files do not depend on the workers."""
    folder = parent / settings.folder_name
    if (folder / LABEL).exists():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{settings.folder_name}-", dir=parent))
    try:
        with closing(draw_distinct(settings, workers or available_cores())) as rows:
            write_splits(rows, settings, unfinished, progress)
        label = {"generated": True, "task": "listops", **asdict(settings)}
        (unfinished / LABEL).write_text(json.dumps(label, indent=2) + "\n")
        unfinished.chmod(0o755)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def write_splits(
    rows: Iterator[tuple[str, int]], settings: Settings, folder: Path, progress: Callable[[int], None]
) -> None:
    written = 0
    for split, size in zip(SPLITS, settings.sizes, strict=True):
        with open(folder / f"generated_{split}.tsv", "w", newline="") as file:
            writer = csv.writer(file, delimiter="\t")
            writer.writerow(["Source", "Target"])
            for row in islice(rows, size):
                writer.writerow(row)
                written += 1
                if written % 100 == 0:
                    progress(written)
    progress(written)
