"""The parameters of a set of images, and the Long Range Arena's values.

Sources: the docstrings of `lra_benchmarks/data/pathfinder.py` (google-research/long-range-arena) and the wrapper's
    defaults in drewlinsley/pathfinder, commit ab9c130.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from experiments.training.reading import reading

FOLDS = {6: "curv_baseline", 9: "curv_contour_length_9", 14: "curv_contour_length_14"}
LABEL = "generated.json"  # beside generated images in the release's layout
UNFINISHED = "unfinished"  # in its place until they are complete
MARKER_COUNTS = 3  # classes of a pixel, see owners.py


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Lengths in pixels, of snakes in dashes."""

    size: int  # pixels along a side
    dash_length: int
    margins: tuple[int, ...]  # half the gap between dashes; one is drawn for each image
    thickness: float
    marker_radius: float
    seed_distance: int  # of the first ends of the two target snakes
    padding: int  # no dash may touch it
    continuity: float  # no turn exceeds 90 degrees divided by it
    target_contrast: float
    distractor_contrast: float
    distractors: int  # fewer are placed if space runs out
    contour_length: int  # dashes of a target snake
    distractor_length: int  # dashes of a distractor

    def __post_init__(self) -> None:
        positive = [field.name for field in fields(self) if field.name not in ("margins", "distractors")]
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        if self.distractors < 0:
            raise ValueError(f"distractors must not be negative; got {self.distractors}")
        if not self.margins or min(self.margins) < 1 or max(self.margins) > 255:
            raise ValueError(f"margins must be one or more numbers from 1 to 255; got {self.margins}")
        if 2 * self.thickness != int(2 * self.thickness):
            raise ValueError(f"thickness must be a multiple of half a pixel; got {self.thickness}")
        if self.size > 65536:
            raise ValueError(f"size must be at most 65536 pixels; got {self.size}")
        extent = self.dash_length + max(self.margins) + self.marker_radius + self.thickness
        if extent > 128:
            raise ValueError(
                f"dash_length, margin, marker_radius and thickness must be at most 128 pixels together; got {extent:g}"
            )
        if self.contour_length < 2:
            raise ValueError(f"contour_length must be at least 2 dashes; got {self.contour_length}")
        # The first target begins in a square that lies twice the seed_distance from the border, so the second begins
        # within the image; tables.py relies on it.
        reach = self.dash_length + max(self.margins)
        if self.seed_distance <= reach:
            raise ValueError(f"seed_distance must exceed dash_length plus margin, {reach}; got {self.seed_distance}")
        if self.size <= 4 * self.seed_distance:
            raise ValueError(
                f"size must exceed four times the seed_distance, {4 * self.seed_distance}, or the snakes have no room "
                f"to begin; got {self.size}"
            )

    @property
    def name(self) -> str:
        """For values other than the arena's, it ends in a digest."""
        name = f"pathfinder{self.size}-cl{self.contour_length}"
        return name if self.is_lra else f"{name}-{blake2b(self.to_json().encode(), digest_size=4).hexdigest()}"

    @property
    def is_lra(self) -> bool:
        known = self.size in LRA and self.contour_length in FOLDS
        return known and self == lra(self.size, self.contour_length)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Parameters:
        values: dict[str, Any] = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"parameters must be an object of JSON; got a {type(values).__name__}")
        names = {field.name for field in fields(cls)}
        if values.keys() != names:
            raise ValueError(f"parameters must be {', '.join(sorted(names))}; got {', '.join(sorted(values))}")
        return cls(**{**values, "margins": tuple(values["margins"])})

    @classmethod
    def read(cls, path: Path) -> Parameters:
        with reading(path, "a JSON file of all parameters of a generator"):
            return cls.from_json(path.read_text(encoding="utf-8"))


# The original computes distractors' length at contour length 6, and keeps it: 20, 22, 35 and 30 divided by 2.
LRA: dict[int, dict[str, Any]] = {
    32: dict(dash_length=2, margins=(1,), thickness=0.5, marker_radius=1.5, seed_distance=7, padding=1)
    | dict(continuity=1.0, target_contrast=1.5, distractor_contrast=2.0, distractors=10),
    64: dict(dash_length=5, margins=(1,), thickness=1.0, marker_radius=2.5, seed_distance=12, padding=1)
    | dict(continuity=1.8, target_contrast=0.8, distractor_contrast=0.8, distractors=11),
    128: dict(dash_length=5, margins=(2, 3), thickness=1.5, marker_radius=3.0, seed_distance=20, padding=1)
    | dict(continuity=1.8, target_contrast=0.9, distractor_contrast=0.9, distractors=17),
    256: dict(dash_length=5, margins=(3,), thickness=2.0, marker_radius=5.0, seed_distance=27, padding=22)
    | dict(continuity=1.8, target_contrast=1.0, distractor_contrast=1.0, distractors=15),
}


def lra(size: int, contour_length: int) -> Parameters:
    """Pathfinder is 32 and 14, "Path-X" 128 and 14, "Path-256" 256 and 14.

    >>> lra(128, 14).distractor_length
    4
    """
    if size not in LRA or contour_length not in FOLDS:
        raise ValueError(
            f"the Long Range Arena has sizes {', '.join(map(str, LRA))} with contour lengths "
            f"{', '.join(map(str, FOLDS))}; got {size} with {contour_length}"
        )
    return Parameters(size=size, contour_length=contour_length, distractor_length=contour_length // 3, **LRA[size])


# From 256 to 512 pixels each parameter grows by its mean step from 64 to 128 to 256, rounded down to an allowed value.
# So dashes keep 5 pixels, half a gap grows from 3 to 4, the marker's radius from 5 to 6, the number of distractors from
# 15 to 17.
EXTRAPOLATED: dict[int, dict[str, Any]] = {
    512: dict(dash_length=5, margins=(4,), thickness=2.5, marker_radius=6.0, seed_distance=34, padding=32)
    | dict(continuity=1.8, target_contrast=1.0, distractor_contrast=1.0, distractors=17),
}
SIZES = (*LRA, *EXTRAPOLATED)
SHORTEST, LONGEST = 2, 14  # dashes, at any size


def parameters_of(size: int, contour_length: int) -> Parameters:
    """The Long Range Arena's parameters, or its rules for other sizes and shorter paths.

    >>> parameters_of(128, 14) == lra(128, 14), parameters_of(128, 14).is_lra, parameters_of(128, 3).is_lra
    (True, True, False)

    Distractors of other paths are a third as long, and at least one dash.
    """
    if size not in SIZES or not SHORTEST <= contour_length <= LONGEST:
        raise ValueError(
            f"images have sizes {', '.join(map(str, SIZES))} and paths of {SHORTEST} to {LONGEST} dashes; got {size} "
            f"with {contour_length}"
        )
    if size in LRA and contour_length in FOLDS:
        return lra(size, contour_length)
    known = LRA.get(size) or EXTRAPOLATED[size]
    distractor_length = max(1, contour_length // 3)
    return Parameters(size=size, contour_length=contour_length, distractor_length=distractor_length, **known)
