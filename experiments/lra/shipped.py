"""The models of the arena that the repository ships: a folder each in `experiments/weights`, for a stored figure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from experiments.lra import weights
from experiments.lra.model.masks import NAMES

FOLDER = Path(__file__).parents[1] / "weights"


@dataclass(frozen=True)
class Shipped:
    folder: Path
    task: str
    mask: str
    figure: str  # the name of the stored measurement of its run
    accuracy: float  # of the run, before its weights were rounded, in percent
    bytes: int

    @property
    def command(self) -> str:
        """What tests it; where files of the task are needed, DATA stands for them."""
        words = ["python", "-m", "experiments.lra", "test", self.folder.relative_to(FOLDER.parents[1]).as_posix()]
        words += [] if self.task == "listops" else ["--data", "DATA"]
        return shlex.join(words + ([] if self.mask in NAMES else ["--mask", self.mask]))


def shipped(folder: Path = FOLDER) -> list[Shipped]:
    """In the order of their folders. Other models, such as those of Path-X, are not the arena's."""
    found = []
    for path in sorted(folder.glob("*/model.safetensors")):
        if not path.with_suffix(".json").is_file():  # beside those of experiments.pathx
            _, about = weights.read(path)
            config, accuracy = about["config"], 100 * about["test_accuracy"]
            size = path.stat().st_size
            found.append(Shipped(path.parent, config["task"], config["mask"], about["figure"], accuracy, size))
    return found
