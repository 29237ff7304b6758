from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from experiments.lra.data.augment import WAYS
from experiments.lra.data.batches import Shape
from experiments.lra.data.listops.generator import Settings
from experiments.lra.model.classifier import POOLS
from experiments.lra.model.positions import OF_BRACKETS, POSITIONS
from experiments.lra.presets import settings_of
from experiments.lra.tasks import TASKS
from experiments.lra.tasks.pathfinder import FOLDS, SPLITS
from experiments.lra.tasks.task import Options
from experiments.training import run_folder
from experiments.training.layers.attention import IMPLEMENTATIONS, row_multiple
from experiments.training.lr_schedule import SCHEDULES
from experiments.training.settings import (
    RunSettings,
    changed,
    check_at_least,
    check_fractions,
    check_one_of,
    help_texts,
    setting,
)
from experiments.training.shared_sequences import check_shareable

OBJECTIVES = ("classify", "denoise")
KEEPS = ("last", "best")
ENCODINGS = ("tokens", "brightness")


@dataclass(frozen=True, kw_only=True)
class Config(RunSettings):
    task: str = setting("listops", f"Task: {', '.join(TASKS)}.")
    mask: str = setting(
        "butterfly",
        "Mask: dense, local, butterfly; a pattern of the library, 'longformer(n, window=64, global_tokens=16)' for n "
        "tokens; module:function or file.py:function.",
    )
    attention: str = setting(
        "sparseflash",
        f"Implementation: {', '.join(IMPLEMENTATIONS)} (sdpa: PyTorch's; standard: all N x N scores in memory).",
    )
    window: int = setting(512, "Keys that a query of the local mask sees: |q - k| <= window / 2.")

    depth: int = setting(4, "Encoder layers.")
    dropout: float = changed(RunSettings, "dropout", default=0.1)
    attention_dropout: float = setting(0.0, "Dropout of attention weights, in steps of 1/256.")
    pool: str = setting("cls", f"Input of the head: {', '.join(POOLS)}; cls is an extra first token.")
    positions: str = setting(
        "learned",
        f"Positions: {', '.join(POSITIONS)}; rotary rotates queries and keys; nested also embeds the number of open "
        "brackets; tree, besides, lets half of the heads find an operator's arguments.",
    )
    qk_norm: bool = setting(False, "Normalise queries and keys (RMS, with learned gains), for stable training.")
    convolution: int = setting(
        0,
        "Window of a depthwise convolution after the embedding and in each layer, in tokens, or pixels along a side; "
        "0: no convolution.",
    )
    augment: str = setting(
        "none",
        "Augmentation of training images: none, mirror (left and right), square (all symmetries of a square), or crops "
        "(mirror, and moved by up to four pixels).",
    )
    cutmix: float = setting(
        0.0, "Share of training images that get a square of another, whose answer counts by its area."
    )
    encoding: str = setting(
        "tokens", "Pixels: tokens (a learned vector for each brightness), or brightness (a linear map of the number)."
    )
    background: str = setting("keep", "Images: keep black pixels as tokens, or drop them.")

    objective: str = setting(
        "classify",
        f"Objective: {', '.join(OBJECTIVES)}; denoise predicts hidden tokens of the task's inputs (self-pretraining).",
    )
    hidden: float = setting(0.15, "For denoise: the share of hidden tokens.")
    auxiliary: float = setting(
        0.0,
        "Weight of a second training loss. Generated Pathfinder: the number of markers on each drawn pixel's curve. "
        "ListOps: the value of each operator's expression. 0: answers only.",
    )
    label_smoothing: float = setting(0.0, "Share of each training answer that is spread over all classes.")
    initial: str | None = changed(
        RunSettings,
        "initial",
        text="Initial weights: model.safetensors or the folder of a run of the same sizes.",
    )

    steps: int = setting(5000, "Training steps.")
    minutes: float | None = setting(
        None, "End early after this many minutes; a cosine schedule ends then too.", "no limit"
    )
    batch: int = setting(32, "Examples a step.")
    context_parallel: int = setting(
        1,
        "Processes that share the tokens of each sequence, for sequences too long for one GPU; the number of processes "
        "must be a multiple.",
    )
    buckets: bool = setting(True, "Put examples of similar length into a batch, to reduce padding.")
    max_tokens: int | None = setting(None, "Tokens after which a sequence is cut.", "the task's number")
    lr: float = setting(5e-4, "Peak learning rate.")
    warmup: int = setting(500, "Steps over which the learning rate rises to its peak.")
    schedule: str = setting("cosine", f"Learning rate after the warm-up: {', '.join(SCHEDULES)}.")
    weight_decay: float = changed(RunSettings, "weight_decay", default=0.01)
    keep: str = setting(
        "last",
        f"Weights to test and keep: {', '.join(KEEPS)}; best: from the best validation.",
    )

    eval_every: int = setting(500, "Steps between validations.")
    eval_examples: int = setting(2000, "Examples of a validation; the final test uses all.")

    difficulty: str = setting(Options.difficulty, f"Pathfinder: {', '.join(FOLDS)}.")
    split: str = setting(Options.split, f"Pathfinder: {', '.join(SPLITS)}; S4 and most others use shuffled.")

    longer_than: int = setting(Settings.longer_than, "Generated data: every expression has more tokens.")
    shorter_than: int = setting(Settings.shorter_than, "Generated data: every expression has fewer tokens.")
    train_examples: int = setting(Settings.train, "Generated data: training expressions.")
    val_examples: int = setting(Settings.val, "Generated data: validation expressions.")
    test_examples: int = setting(Settings.test, "Generated data: test expressions.")
    data_seed: int = setting(Settings.seed, "Generated data: seed of the expressions.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, ("window", "depth", "steps", "batch", "context_parallel", "max_tokens"))
        check_at_least(self, 1, ("eval_every", "eval_examples"))
        if not 0 < self.hidden < 1:
            raise ValueError(f"hidden must be above 0 and below 1; got {self.hidden}")
        check_fractions(self, ("attention_dropout", "label_smoothing"))
        check_at_least(self, 0, ("lr", "warmup", "auxiliary"))
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"minutes must be more than 0; got {self.minutes}")
        for name, allowed in (
            ("objective", OBJECTIVES),
            ("keep", KEEPS),
            ("attention", IMPLEMENTATIONS),
            ("pool", POOLS),
            ("positions", POSITIONS),
            ("augment", tuple(WAYS)),
            ("encoding", ENCODINGS),
            ("background", ("keep", "drop")),
            ("schedule", SCHEDULES),
            ("task", TASKS),
            ("difficulty", FOLDS),
            ("split", SPLITS),
        ):
            check_one_of(name, getattr(self, name), allowed)
        self._check_images()
        if self.auxiliary and not TASKS[self.task].token_classes:
            raise ValueError(f"auxiliary={self.auxiliary} is for ListOps and Pathfinder; the task is {self.task}")
        if self.auxiliary and self.objective != "classify":
            raise ValueError(f"auxiliary={self.auxiliary} needs objective=classify; got {self.objective}")
        if self.positions in OF_BRACKETS and TASKS[self.task].brackets is None:
            raise ValueError(f"positions={self.positions} are for expressions with brackets; the task is {self.task}")
        if self.positions in OF_BRACKETS and self.objective == "denoise":
            raise ValueError(
                f"positions={self.positions} are counted from the tokens, which objective=denoise hides; choose "
                "others, --positions rotary say, here and in the run that begins with these weights"
            )
        if self.convolution:
            self._check_convolution()
        if self.context_parallel > 1:
            self._check_shared_sequences()

    def _check_images(self) -> None:
        if TASKS[self.task].side is None and (self.background == "drop" or self.positions == "rotary2d"):
            raise ValueError(f"background=drop and positions=rotary2d are for images; the task is {self.task}")
        if TASKS[self.task].side is None:
            for name, without in (("augment", "none"), ("cutmix", 0.0), ("encoding", "tokens")):
                if getattr(self, name) != without:
                    raise ValueError(f"{name}={getattr(self, name)} is for images; the task is {self.task}")
        if not 0 <= self.cutmix <= 1:
            raise ValueError(f"cutmix must be at least 0 and at most 1; got {self.cutmix}")
        if self.encoding == "brightness" and (self.objective == "denoise" or self.shape.first):
            raise ValueError(
                "encoding must be tokens if objective=denoise or pool=cls: hidden pixels and [CLS] have no brightness; "
                f"got objective={self.objective}, pool={self.pool}"
            )
        if self.cutmix and self.context_parallel > 1:
            raise ValueError("cutmix must be 0 if context_parallel is above 1: each process draws squares of its own")
        if self.cutmix and (
            self.objective == "denoise" or self.background == "drop" or self.auxiliary or self.shape.first
        ):
            raise ValueError(
                "cutmix needs whole images and answers alone: objective=classify, background=keep, auxiliary=0 and no "
                f"pool=cls; got objective={self.objective}, background={self.background}, auxiliary={self.auxiliary}, "
                f"pool={self.pool}"
            )

    def _check_convolution(self) -> None:
        if self.convolution < 3 or self.convolution % 2 == 0:
            raise ValueError(f"convolution must be 0, or odd and at least 3; got {self.convolution}")
        if self.context_parallel > 1:
            raise ValueError("convolution must be 0 if context_parallel is above 1: no process has all neighbours")
        task = TASKS[self.task]
        if task.side is not None and (self.background == "drop" or self.shape.length != task.longest):
            raise ValueError(
                "convolution over an image needs all of its pixels and nothing else in a row: background=keep, "
                f"no pool=cls, max_tokens={task.longest} and a block that divides it; "
                f"got background={self.background}, pool={self.pool}, max_tokens={self.shape.max_tokens}, "
                f"block={self.block}"
            )

    def _check_shared_sequences(self) -> None:
        check_shareable(
            processes=self.context_parallel, attention=self.attention, longest=self.shape.length, block=self.block,
            length_option="--max-tokens",
        )  # fmt: skip

    @property
    def shape(self) -> Shape:
        task = TASKS[self.task]
        return Shape(
            self.block,
            self.max_tokens or task.longest,
            cls=task.cls if self.pool == "cls" else None,
            drop_background=self.background == "drop",
            multiple=row_multiple(self.attention, self.block),
            shortest_row=self.context_parallel * self.block if self.context_parallel > 1 else 0,
        )

    @property
    def data(self) -> Options:
        return Options(self.difficulty, self.split)

    @property
    def generator(self) -> Settings:
        return Settings(
            self.longer_than,
            self.shorter_than,
            self.train_examples,
            self.val_examples,
            self.test_examples,
            self.data_seed,
        )


HELP = help_texts(Config)
DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(Config)}

GENERATOR = ("longer_than", "shorter_than", "train_examples", "val_examples", "test_examples", "data_seed")

# They do not affect the weights, or change the run's length.
FREE_ON_RESUME = (
    "steps",
    "minutes",
    "device",
    "context_parallel",
    "compiled",
    "recorded",
    "eval_every",
    "eval_examples",
    "checkpoint_every",
    "log_every",
)

# They select weights with keep=best.
VALIDATION = ("eval_every", "eval_examples")


def configure(preset: str | None, chosen: dict[str, Any]) -> Config:
    named = settings_of(preset, chosen.get("task", DEFAULTS["task"])) if preset else {}
    return Config(**{**named, **chosen})


def resumed(saved: Config, chosen: dict[str, Any]) -> Config:
    free = FREE_ON_RESUME if saved.keep != "best" else [name for name in FREE_ON_RESUME if name not in VALIDATION]
    return run_folder.resumed(saved, chosen, free)


def from_saved(saved: dict[str, Any]) -> Config:
    return Config(**{"buckets": False, **saved})


def as_dict(config: Config) -> dict[str, Any]:
    return asdict(config)
