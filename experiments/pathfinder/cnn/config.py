from __future__ import annotations

from dataclasses import dataclass

from experiments.pathfinder.seeds import MOST_IMAGES
from experiments.training.settings import PRECISIONS, check_one_of


@dataclass(frozen=True)
class Config:
    width: int = 16
    blocks: int = 1
    batch: int = 64
    lr: float = 2e-3  # AdamW's peak: it rises over `warmup` steps, then falls as a cosine to 0
    warmup: int = 100
    weight_decay: float = 0.01
    steps: int | None = None
    minutes: float | None = 5.0
    seed: int = 0
    precision: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("width", "blocks", "lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        if not 1 <= self.batch <= MOST_IMAGES:
            raise ValueError(f"batch must be from 1 to {MOST_IMAGES}; got {self.batch}")
        if self.steps is None and self.minutes is None:
            raise ValueError("a network must have steps or minutes to end by; got neither")
        for name in ("steps", "minutes"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        check_one_of("precision", self.precision, PRECISIONS)
