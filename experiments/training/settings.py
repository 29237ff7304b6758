from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

PRECISIONS = ("fp32", "bf16")


def setting(default: Any, text: str, shown: str | None = None) -> Any:
    return field(default=default, metadata={"help": text, "shown": shown or str(default)})


def changed(settings: type, name: str, *, default: Any = ..., text: str | None = None) -> Any:
    (known,) = (each for each in fields(settings) if each.name == name)
    if default is ...:
        return setting(known.default, text or known.metadata["help"], known.metadata["shown"])
    return setting(default, text or known.metadata["help"])


def help_texts(settings: type) -> dict[str, str]:
    return {each.name: each.metadata["help"] for each in fields(settings) if each.metadata}


def check_at_least(settings: object, least: float, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least:g}; got {value}")


def check_fractions(settings: object, names: Sequence[str]) -> None:
    for name in names:
        if not 0 <= getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 0 and below 1; got {getattr(settings, name)}")


def check_one_of(name: str, value: object, allowed: Collection[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    block: int = setting(128, "Tokens along one side of a mask's tiles.")
    width: int = setting(128, "Features of each token.")
    heads: int = setting(4, "Attention heads.")
    head_dim: int | None = setting(None, "Features of each head.", "width / heads")
    mlp: int = setting(256, "Hidden features of the MLPs.")
    dropout: float = setting(0.0, "Chance that a feature is dropped (embedding, attention output, MLP).")

    initial: str | None = setting(
        None, "Initial weights: model.safetensors of a run of the same sizes.", "random weights"
    )
    weight_decay: float = setting(0.0, "AdamW weight decay of the matrices.")
    clip: float = setting(1.0, "Maximum norm of all gradients; 0: no clipping.")
    average: float = setting(
        0.0,
        "Decay of an average of the weights (such as 0.999), which is validated, tested and kept; 0: no average.",
    )
    seed: int = setting(0, "Seed of the weights, of the examples' order or drawing, and of the dropout.")

    device: str = setting("auto", "cpu, cuda, cuda:1, ...; auto takes a GPU if PyTorch sees one.")
    precision: str = setting("fp32", "fp32, or bf16: matrix products in bfloat16, weights in float32.")
    compiled: bool = setting(False, "Compile the code around attention with torch.compile.")
    recorded: bool = setting(
        True, "On one GPU, record steps as CUDA graphs, one for each batch shape, to save host time."
    )
    checkpoint_every: int = setting(500, "Maximum steps between checkpoints; only the newest is kept.")
    log_every: int = setting(10, "Steps between log lines; each line is the mean over these steps.")

    def __post_init__(self) -> None:
        check_at_least(self, 1, ("block", "width", "heads", "head_dim", "mlp", "checkpoint_every", "log_every"))
        check_at_least(self, 0, ("weight_decay", "clip"))
        check_fractions(self, ("dropout", "average"))
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be {' or '.join(PRECISIONS)}; got {self.precision!r}")
