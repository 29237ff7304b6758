"""Every setting of a training run, with its help text and default, and the presets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from experiments.lra.data import TASKS
from experiments.lra.generate import Settings
from experiments.lra.model import POOLS, POSITIONS
from experiments.lra.schedule import SCHEDULES


def setting(default: Any, text: str) -> Any:
    """A field of Config with the help text that the command line shows."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run. All of it together with the code, the data and the device determines the result."""

    task: str = setting("listops", f"Task: {', '.join(TASKS)}.")
    mask: str = setting("butterfly", "Mask: dense, local, butterfly, module:function or file.py:function.")
    block: int = setting(128, "Tokens along one side of the mask's tiles.")
    window: int = setting(512, "Keys that a query of the local mask sees: |q - k| <= window / 2.")

    depth: int = setting(4, "Encoder layers.")
    width: int = setting(128, "Features of each token.")
    heads: int = setting(4, "Attention heads; each has width / heads features.")
    mlp: int = setting(256, "Hidden features of the MLPs.")
    dropout: float = setting(0.1, "Chance that a feature is dropped (embedding, attention output, MLP).")
    attention_dropout: float = setting(0.0, "Chance that an attention weight is dropped, in steps of 1/256.")
    pool: str = setting("cls", f"What the head reads: {', '.join(POOLS)}; cls is a token of its own before all others.")
    positions: str = setting("learned", f"Positions added to the embedding: {', '.join(POSITIONS)}.")

    steps: int = setting(5000, "Training steps.")
    minutes: float | None = setting(None, "End early after this many minutes; a cosine schedule ends then too.")
    batch: int = setting(32, "Sequences a step.")
    max_tokens: int = setting(2000, "Tokens after which a sequence is cut.")
    lr: float = setting(5e-4, "Peak learning rate.")
    warmup: int = setting(500, "Steps over which the learning rate rises to its peak.")
    schedule: str = setting("cosine", f"Learning rate after the warm-up: {', '.join(SCHEDULES)}.")
    weight_decay: float = setting(0.01, "AdamW weight decay of the matrices.")
    clip: float = setting(1.0, "Largest norm of all gradients together; 0 clips nothing.")
    seed: int = setting(0, "Seed of the weights, the order of the data and the dropout.")

    device: str = setting("auto", "cpu, cuda, cuda:1, ...; auto takes a GPU if PyTorch sees one.")
    precision: str = setting("fp32", "fp32, or bf16: matrix products in bfloat16, weights in float32.")
    eval_every: int = setting(500, "Steps between validations.")
    eval_examples: int = setting(2000, "Examples of a validation; the final test uses all.")
    checkpoint_every: int = setting(500, "Steps between checkpoints; only the newest is kept.")
    log_every: int = setting(10, "Steps between lines of the log, each the mean over these steps.")

    longer_than: int = setting(Settings.longer_than, "Generated data: every expression has more tokens.")
    shorter_than: int = setting(Settings.shorter_than, "Generated data: every expression has fewer tokens.")
    train_examples: int = setting(Settings.train, "Generated data: training expressions.")
    val_examples: int = setting(Settings.val, "Generated data: validation expressions.")
    test_examples: int = setting(Settings.test, "Generated data: test expressions.")
    data_seed: int = setting(Settings.seed, "Generated data: seed of the expressions.")

    def __post_init__(self) -> None:
        positive = ("block", "window", "depth", "width", "heads", "mlp", "steps", "batch", "max_tokens")
        for name in (*positive, "eval_every", "eval_examples", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1; got {getattr(self, name)}")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision must be fp32 or bf16; got {self.precision!r}")
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"minutes must be more than 0; got {self.minutes}")
        for name, allowed in (
            ("pool", POOLS),
            ("positions", POSITIONS),
            ("schedule", SCHEDULES),
            ("task", TASKS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")

    @property
    def generator(self) -> Settings:
        """The generated data that this run asks for when it is given none."""
        return Settings(
            self.longer_than,
            self.shorter_than,
            self.train_examples,
            self.val_examples,
            self.test_examples,
            self.data_seed,
        )


HELP: dict[str, str] = {each.name: each.metadata["help"] for each in fields(Config)}
DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(Config)}

# What may change when a run is resumed: it leaves the weights as they would be, or is meant to change them.
FREE_ON_RESUME = (
    "steps",
    "minutes",
    "device",
    "eval_every",
    "eval_examples",
    "checkpoint_every",
    "log_every",
)

PRESETS: dict[str, dict[str, Any]] = {
    # The paper's sizes and the Long Range Arena's schedule (lr 0.05 / sqrt(step), warm-up 1000) and dropout.
    # 9.7 million parameters: a checkpoint with the optimiser takes 116 MB.
    "lra": {
        "depth": 4,
        "width": 512,
        "heads": 8,
        "mlp": 1024,
        "attention_dropout": 0.1,
        "pool": "cls",
        "steps": 5000,
        "batch": 32,
        "lr": 0.05 / 1000**0.5,
        "warmup": 1000,
        "schedule": "rsqrt",
        "weight_decay": 0.1,
        "precision": "bf16",
    },
    # For one GPU: 3.8 million parameters, so that a checkpoint with the optimiser's state stays below 48 MB.
    "modern": {
        "depth": 6,
        "width": 256,
        "heads": 4,
        "mlp": 512,
        "steps": 20000,
        "batch": 64,
        "lr": 1e-3,
        "warmup": 1000,
        "weight_decay": 0.05,
        "precision": "bf16",
    },
    # Short expressions, a small model, and a head that reads the first token, the root operator: on two CPU
    # cores half a minute a mask suffices to learn what the operator says. [CLS] would have to find it first.
    "demo": {
        "block": 64,
        "window": 128,
        "depth": 2,
        "width": 64,
        "heads": 2,
        "mlp": 128,
        "dropout": 0.0,
        "pool": "first",
        "steps": 120,
        "minutes": 0.4,
        "batch": 8,
        "max_tokens": 1024,
        "lr": 2e-3,
        "warmup": 20,
        "device": "cpu",
        "eval_every": 1000,
        "checkpoint_every": 1000,
        "log_every": 5,
        "longer_than": 300,
        "shorter_than": 1024,
        "train_examples": 2000,
        "val_examples": 200,
        "test_examples": 300,
    },
}


def configure(preset: str | None, chosen: dict[str, Any]) -> Config:
    """The defaults, changed by a preset, changed by what the user chose."""
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"the preset must be one of {', '.join(PRESETS)}; got {preset!r}")
    return Config(**{**(PRESETS[preset] if preset else {}), **chosen})


def resumed(saved: Config, chosen: dict[str, Any]) -> Config:
    """A saved run's settings with what was chosen now; raises ValueError where that would change the run."""
    for name, value in chosen.items():
        if value != getattr(saved, name) and name not in FREE_ON_RESUME:
            raise ValueError(
                f"a resumed run must keep its settings: --{name.replace('_', '-')} was "
                f"{getattr(saved, name)}, got {value}; start another run with another --out"
            )
    return replace(saved, **chosen)


def as_dict(config: Config) -> dict[str, Any]:
    """The settings as plain values for a JSON file."""
    return asdict(config)
