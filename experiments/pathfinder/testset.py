"""The test sets: 20,000 images for each fold, in files with known hashes.

<folder>/pathfinder128-cl14-generated-20000-seed1000000000000000000.safetensors
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from experiments.pathfinder.generate import Settings, generate
from experiments.pathfinder.parameters import parameters_of
from experiments.pathfinder.seeds import TEST_SEED
from experiments.training.atomic_files import write_json
from experiments.training.fingerprint import sha256
from experiments.training.reading import read_json

IMAGES = 20_000
HASHES = Path(__file__).parent / "testsets.json"
NAMES = {(128, 14): "Path-X", (256, 14): "Path-256"}
BEYOND = {(512, 14): "Path-512"}


def title(size: int, contour: int) -> str:
    if (size, contour) in BEYOND:
        return f"extrapolated {BEYOND[size, contour]}"
    name = NAMES.get((size, contour), f"Pathfinder-{size}, contour length {contour}")
    return f"LRA-parameter generated {name}"


def settings_of(size: int, contour: int) -> Settings:
    return Settings(parameters_of(size, contour), IMAGES, TEST_SEED)


def test_set(
    size: int,
    contour: int,
    folder: Path,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
    record: bool = False,
    hashes: Path = HASHES,
) -> Path:
    """Written if missing, and checked. record: record the hash of a fold that has none."""
    settings = settings_of(size, contour)
    path = generate(settings, folder, workers=workers, progress=progress)
    known: dict[str, str] = read_json(hashes, "the hashes of test sets") if hashes.is_file() else {}
    found = sha256(path)
    if settings.name not in known and record:
        write_json(hashes, dict(sorted({**known, settings.name: found}.items())))
        return path
    if settings.name not in known:
        raise ValueError(f"there is no known hash of {settings.name}; `testset --record` writes it down")
    if found != known[settings.name]:
        raise ValueError(
            f"{path} must have the SHA-256 {known[settings.name]}; got {found}: other images would give other results. "
            "Install the versions that constraints.txt names, and delete the file"
        )
    return path


test_set.__test__ = False  # type: ignore[attr-defined]  # not a test of pytest's
