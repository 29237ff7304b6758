from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from experiments.pathfinder.parameters import LONGEST, SHORTEST, SIZES
from experiments.pathfinder.seeds import MOST_IMAGES, training_seed
from experiments.pathfinder.strokes import ORIGINAL, TRAINING
from experiments.pathx.data.packing import BACKGROUNDS
from experiments.pathx.masks.relations import Relation, parse_layers
from experiments.training import run_folder
from experiments.training.lr_schedule import SCHEDULES
from experiments.training.reading import reading
from experiments.training.settings import RunSettings, changed, check_at_least, check_fractions, check_one_of, setting

MODELS = ("attention", "unet")
INTENSITIES, POSITIONS = ("smooth", "rows"), ("plane", "line")
CONTOURS = tuple(range(SHORTEST, LONGEST + 1))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage; it ends after its minutes, its steps or at its accuracy."""

    size: int
    contour: int  # dashes
    tokens: int  # a step
    lr: float  # peak learning rate
    minutes: float | None = None  # minutes of training
    steps: int | None = None
    until: float | None = None  # on the latest images
    warmup: int = 100  # steps
    schedule: str = "constant"  # after the warm-up
    background: str = "drop"  # "keep": black pixels are tokens, too
    layers: str | None = None  # if they differ from the run's
    also: tuple[int, ...] = ()  # further path lengths in training, in turns
    images: int | None = None  # distinct training images of each length; None: all fresh

    def __post_init__(self) -> None:
        object.__setattr__(self, "also", tuple(self.also))
        for name, value, allowed in (
            ("size", self.size, SIZES),
            ("contour", self.contour, CONTOURS),
            *(("also", length, CONTOURS) for length in self.also),
            ("schedule", self.schedule, SCHEDULES),
            ("background", self.background, BACKGROUNDS),
        ):
            check_one_of(f"a stage's {name}", value, allowed)
        for name in ("tokens", "lr", "minutes", "steps", "images"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"a stage's {name} must be more than 0; got {getattr(self, name)}")
        if self.minutes is None and self.steps is None:
            raise ValueError("a stage must have minutes or steps, or it may never end")
        if self.until is not None and not 0.5 < self.until < 1:
            raise ValueError(f"a stage's accuracy must be above 0.5 and below 1; got {self.until}")
        if self.layers is not None:
            parse_layers(self.layers)

    @property
    def name(self) -> str:
        lengths = "+".join(map(str, self.contours))
        return f"{self.size}/cl{lengths}{'/all pixels' if self.background == 'keep' else ''}"

    @property
    def contours(self) -> tuple[int, ...]:
        return (self.contour, *self.also)


@dataclass(frozen=True, kw_only=True)
class Config(RunSettings):
    curriculum: tuple[Stage, ...] = ()
    model: str = setting(
        "attention",
        "attention (a transformer), or unet (convolutions, for comparison; uses only the sizes --width and --mlp).",
    )
    layers: str = setting(
        "tiles:16*4,dense*2", 'Masks of the layers, first layer first (see masks/relations.py); "*n" repeats a mask.'
    )
    block: int = changed(RunSettings, "block", default=64)
    intensity: str = setting(
        "smooth",
        "Features of grey levels: smooth (interpolated between learned rows) or rows (one for each level).",
    )
    renderings: bool = setting(
        True, "Draw a random rendering for every training image (brightness, noise, overshoot, scaling, rounding)."
    )
    positions: str = setting("plane", "Rotary positions: plane (row and column, in pixels) or line (row-major index).")
    release: str | None = setting(
        None, "Folder of the arena's release, whose training images are used instead of fresh ones.", "fresh images"
    )
    strokes: str = setting(
        ORIGINAL,
        f"Strokes of the training images, with commas between them: {', '.join(TRAINING)}; see "
        "experiments/pathfinder/strokes.py.",
    )
    floor: int = setting(32, "Grey levels below it are background, which a stage may drop.")
    registers: int = setting(0, "Global tokens of every image.")
    auxiliary: float = setting(
        0.0,
        "Weight of a second loss, the number of markers on each pixel's curve. 0: answers only.",
    )
    hidden: float = setting(
        0.0,
        "Share of hidden drawn pixels in training; the second loss then predicts their grey levels, without labels.",
    )
    answers: float = setting(1.0, "Weight of the answers' loss; 0 with --hidden: self-pretraining, for --initial.")
    average: float = changed(RunSettings, "average", default=0.999)

    recorded: bool = changed(
        RunSettings,
        "recorded",
        text="On one GPU, record a transformer's steps as CUDA graphs, to save host time. A U-Net is never recorded: "
        "it would read as many images as a graph has room for.",
    )
    precision: str = changed(RunSettings, "precision", default="bf16")
    log_every: int = changed(
        RunSettings,
        "log_every",
        default=20,
        text="Steps between log lines, each the mean over these steps; stages end only at log lines.",
    )
    validate_every: int = setting(1000, "Steps between validations on held-out images of the stage.")
    validation_images: int = setting(1000, "Images of a validation.")
    checkpoint_every: int = changed(RunSettings, "checkpoint_every", default=1000)
    checkpoint_minutes: float = setting(2.0, "Maximum minutes between checkpoints. Each stage also ends with one.")
    advance_images: int = setting(4000, "Number of latest images for a stage's accuracy.")

    @property
    def styles(self) -> tuple[str, ...]:
        return tuple(self.strokes.split(","))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, ("validate_every", "validation_images", "advance_images"))
        if not self.checkpoint_minutes > 0:
            raise ValueError(f"checkpoint_minutes must be more than 0; got {self.checkpoint_minutes}")
        check_at_least(self, 0, ("auxiliary", "answers"))
        check_fractions(self, ("hidden",))
        check_one_of("model", self.model, MODELS)
        check_one_of("intensity", self.intensity, INTENSITIES)
        check_one_of("positions", self.positions, POSITIONS)
        for style in self.styles:
            check_one_of("strokes", style, TRAINING)
        if self.release is not None and self.styles != (ORIGINAL,):
            raise ValueError(f"strokes={self.strokes} are drawn, and a release's images are not: leave one of them out")
        if self.release is not None and self.auxiliary and not self.hidden:
            raise ValueError(
                f"auxiliary must be 0 with a release, whose images have no pixel labels; got {self.auxiliary}"
            )
        if not 1 <= self.floor <= 255:
            raise ValueError(f"floor must be from 1, which leaves out black pixels alone, to 255; got {self.floor}")
        if not self.auxiliary and (self.hidden or not self.answers):
            raise ValueError("auxiliary must be more than 0 with hidden pixels, and without answers; got 0")
        if not 0 <= self.registers <= self.block:
            raise ValueError(f"registers must be from 0 to the block, {self.block}; got {self.registers}")
        training_seed(self.seed)
        if self.model == "unet":
            self._check_without_attention()
        depth = len(parse_layers(self.layers))
        for stage in self.curriculum:
            if stage.layers is not None and len(parse_layers(stage.layers)) != depth:
                raise ValueError(f"every stage must have {depth} layers, as --layers has; got {stage.layers!r}")
            if stage.tokens // self.block * self.block < self._most_tokens(stage):
                raise ValueError(
                    f"a step at {stage.name} must have room for an image, {self._most_tokens(stage)} tokens; got "
                    f"{stage.tokens}"
                )
            if stage.tokens // self.block > MOST_IMAGES:
                raise ValueError(
                    f"a step must have at most {self.block * MOST_IMAGES} tokens, as it has numbers for {MOST_IMAGES} "
                    f"images of a block; got {stage.tokens}"
                )

    def layers_of(self, stage: Stage) -> tuple[Relation, ...]:
        return parse_layers(stage.layers or self.layers) if self.model == "attention" else ()

    def _check_without_attention(self) -> None:
        defaults = {each.name: each.default for each in fields(self)}
        for name in OF_ATTENTION:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} must not be set with model unet, which has none; got {getattr(self, name)}")
        for stage in self.curriculum:
            if stage.layers is not None:
                raise ValueError(f"a stage must have no layers with model unet, which has no masks; got {stage.layers}")

    def _most_tokens(self, stage: Stage) -> int:
        if stage.background == "keep":
            return stage.size**2 + (self.block if self.registers else 0)
        return most_tokens(stage.size)


def distinct_drawings(stages: tuple[Stage, ...]) -> int:
    return sum((stage.images or 0) * len(set(stage.contours)) for stage in stages)


def most_tokens(size: int) -> int:
    """Of an image with this many pixels along a side, without its background."""
    # The fullest: 18 % of 128 x 128, 5 % of 256 x 256 and 2 % of 512 x 512 pixels.
    return min(size**2, 4096 if size <= 256 else 6144)


OF_ATTENTION = (
    "layers", "heads", "head_dim", "dropout", "intensity", "positions", "registers", "auxiliary", "hidden", "compiled",
)  # fmt: skip

# They do not affect the weights.
FREE_ON_RESUME = (
    "device", "compiled", "recorded", "validate_every", "validation_images", "checkpoint_every", "checkpoint_minutes",
)  # fmt: skip


# Of runs from before these settings.
BEFORE: dict[str, Any] = {"intensity": "rows", "renderings": False, "floor": 1}


def as_dict(config: Config) -> dict[str, Any]:
    return asdict(config)


def from_dict(values: dict[str, Any]) -> Config:
    return Config(**{**BEFORE, **values, "curriculum": tuple(Stage(**stage) for stage in values["curriculum"])})


def resumed(saved: Config, chosen: dict[str, Any]) -> Config:
    return run_folder.resumed(saved, chosen, FREE_ON_RESUME)


def curriculum_from(path: Path) -> tuple[Stage, ...]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no curriculum {path}")
    known = ", ".join(sorted(each.name for each in fields(Stage)))
    with reading(path, f"a list of stages with the fields {known}"):
        return tuple(Stage(**stage) for stage in json.loads(path.read_text()))


def stretched(curriculum: tuple[Stage, ...], minutes: float) -> tuple[Stage, ...]:
    if minutes <= 0 or any(stage.minutes is None for stage in curriculum):
        raise ValueError("--minutes must be more than 0, and needs a curriculum whose stages all have minutes")
    factor = minutes / sum(stage.minutes or 0.0 for stage in curriculum)
    return tuple(replace(stage, minutes=(stage.minutes or 0.0) * factor) for stage in curriculum)
