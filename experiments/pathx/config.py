"""The settings of a run: its model, its curriculum, and how it is trained."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from experiments.pathfinder.parameters import LONGEST, SHORTEST, SIZES
from experiments.pathfinder.seeds import MOST_IMAGES, training_seed
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
    """One part of a curriculum. It ends with the first of its minutes, its steps and its accuracy."""

    size: int  # pixels along a side
    contour: int  # dashes of a path, in training and validation
    tokens: int  # per step; a batch holds as many images as fit
    lr: float  # peak learning rate
    minutes: float | None = None  # minutes of training
    steps: int | None = None
    until: float | None = None  # accuracy on the latest images at which the next stage begins
    warmup: int = 100  # steps over which the learning rate rises
    schedule: str = "constant"  # after the warm-up; a cosine falls to 0 at the end of the minutes or steps
    background: str = "drop"  # "drop": black pixels are not tokens; "keep": all pixels are
    layers: str | None = None  # the masks of this stage, if they are not those of the run
    also: tuple[int, ...] = ()  # dashes of other paths in training, which images take in turns
    images: int | None = None  # different images of each length in training, drawn with replacement; None: all fresh

    def __post_init__(self) -> None:
        object.__setattr__(self, "also", tuple(self.also))  # JSON has a list
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
        """The name of the stage in results."""
        lengths = "+".join(map(str, self.contours))
        return f"{self.size}/cl{lengths}{'/all pixels' if self.background == 'keep' else ''}"

    @property
    def contours(self) -> tuple[int, ...]:
        """The dashes of a path that training images take in turns."""
        return (self.contour, *self.also)


@dataclass(frozen=True, kw_only=True)
class Config(RunSettings):
    """One training run. The settings, the code and the device together determine the result."""

    curriculum: tuple[Stage, ...] = ()
    model: str = setting(
        "attention",
        "attention (a transformer), or unet (convolutions alone, for comparison; of the sizes only --width and --mlp "
        "apply to it).",
    )
    layers: str = setting(
        "tiles:16*4,dense*2", 'Masks of the layers, first layer first, see masks/relations.py; "*n" repeats one.'
    )
    block: int = changed(RunSettings, "block", default=64)
    intensity: str = setting(
        "smooth",
        "How grey levels become features: smooth (interpolated between learned rows) or rows (one for each level).",
    )
    renderings: bool = setting(
        True, "Draw the rendering of every training image (brightness, noise, overshoot, scaling, rounding)."
    )
    positions: str = setting(
        "plane", "Rotary positions: plane (row and column, in pixels) or line (place in row-major order)."
    )
    release: str | None = setting(
        None, "Folder of the arena's release, whose training images are used instead of fresh ones.", "fresh images"
    )
    floor: int = setting(32, "Levels below it are background, which --background drop of a stage leaves out.")
    registers: int = setting(0, "Tokens of every image that see all and that all see.")
    auxiliary: float = setting(
        0.0,
        "Weight of a second loss: how many markers the curve through each pixel has, which the generator knows. 0: the "
        "answers alone.",
    )
    hidden: float = setting(
        0.0,
        "Share of the drawn pixels that is hidden in training; the second loss is then that of naming their grey "
        "levels, which needs no labels.",
    )
    answers: float = setting(1.0, "Weight of the answers' loss; 0 with --hidden: self-pretraining, for --initial.")
    average: float = changed(RunSettings, "average", default=0.999)

    recorded: bool = changed(
        RunSettings,
        "recorded",
        text="On one GPU, record steps of a transformer as CUDA graphs: they need not wait for the host. Those of a "
        "U-Net never are: it would read as many images as a graph has room for.",
    )
    precision: str = changed(RunSettings, "precision", default="bf16")
    log_every: int = changed(
        RunSettings,
        "log_every",
        default=20,
        text="Steps between lines of the log, each the mean over these steps; a stage may end at these.",
    )
    validate_every: int = setting(1000, "Steps between validations on images of the stage that are never trained on.")
    validation_images: int = setting(1000, "Images of a validation.")
    checkpoint_every: int = changed(RunSettings, "checkpoint_every", default=1000)
    checkpoint_minutes: float = setting(2.0, "Most minutes between checkpoints. A stage ends with one, too.")
    advance_images: int = setting(4000, "The latest images over which a stage's accuracy is taken.")

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
        """The relation of every layer in a stage; none without attention."""
        return parse_layers(stage.layers or self.layers) if self.model == "attention" else ()

    def _check_without_attention(self) -> None:
        """Raises ValueError if there is a setting that only a model with attention has."""
        defaults = {each.name: each.default for each in fields(self)}
        for name in OF_ATTENTION:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} must not be set with model unet, which has none; got {getattr(self, name)}")
        for stage in self.curriculum:
            if stage.layers is not None:
                raise ValueError(f"a stage must have no layers with model unet, which has no masks; got {stage.layers}")

    def _most_tokens(self, stage: Stage) -> int:
        """The largest number of tokens of an image in a stage."""
        if stage.background == "keep":
            return stage.size**2 + (self.block if self.registers else 0)
        return most_tokens(stage.size)


def most_tokens(size: int) -> int:
    """The largest number of tokens of an image with this many pixels along a side, without its background."""
    # The fullest have 18 % of 128 x 128, 5 % of 256 x 256 and 2 % of 512 x 512 pixels.
    return min(size**2, 4096 if size <= 256 else 6144)


# Settings that only a model with attention has.
OF_ATTENTION = (
    "layers", "heads", "head_dim", "dropout", "intensity", "positions", "registers", "auxiliary", "hidden", "compiled",
)  # fmt: skip

# Settings that may change when a run is resumed, because they do not affect the weights.
FREE_ON_RESUME = (
    "device", "compiled", "recorded", "validate_every", "validation_images", "checkpoint_every", "checkpoint_minutes",
)  # fmt: skip


# What runs did before there were settings for it.
BEFORE: dict[str, Any] = {"intensity": "rows", "renderings": False, "floor": 1}


def as_dict(config: Config) -> dict[str, Any]:
    """The settings as plain values for a JSON file."""
    return asdict(config)


def from_dict(values: dict[str, Any]) -> Config:
    """The settings from the plain values of `as_dict`, which may be those of a run from before a setting existed."""
    return Config(**{**BEFORE, **values, "curriculum": tuple(Stage(**stage) for stage in values["curriculum"])})


def resumed(saved: Config, chosen: dict[str, Any]) -> Config:
    """A saved run's settings with those chosen now; raises ValueError if they would change the run."""
    return run_folder.resumed(saved, chosen, FREE_ON_RESUME)


def curriculum_from(path: Path) -> tuple[Stage, ...]:
    """The stages of a JSON file: a list of objects with the fields of Stage."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no curriculum {path}")
    known = ", ".join(sorted(each.name for each in fields(Stage)))
    with reading(path, f"a list of stages with the fields {known}"):
        return tuple(Stage(**stage) for stage in json.loads(path.read_text()))


def stretched(curriculum: tuple[Stage, ...], minutes: float) -> tuple[Stage, ...]:
    """The same curriculum with its minutes scaled to a given sum; raises ValueError if a stage has no minutes."""
    if minutes <= 0 or any(stage.minutes is None for stage in curriculum):
        raise ValueError("--minutes must be more than 0, and needs a curriculum whose stages all have minutes")
    factor = minutes / sum(stage.minutes or 0.0 for stage in curriculum)
    return tuple(replace(stage, minutes=(stage.minutes or 0.0) * factor) for stage in curriculum)
