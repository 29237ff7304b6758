"""The stored models for the arena's tasks, one folder of `experiments/weights` each, with their stored accuracies."""

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
        """The command that tests the model. DATA stands for the task's files, if the test needs any."""
        words = ["python", "-m", "experiments.lra", "test", self.folder.relative_to(FOLDER.parents[1]).as_posix()]
        words += [] if self.task == "listops" else ["--data", "DATA"]
        return shlex.join(words + ([] if self.mask in NAMES else ["--mask", self.mask]))


def shipped(folder: Path = FOLDER) -> list[Shipped]:
    """The models in the order of their folders, without the models for Path-X and Path-256."""
    found = []
    for path in sorted(folder.glob("*/model.safetensors")):
        if not path.with_suffix(".json").is_file():  # beside those of experiments.pathx
            _, about = weights.read(path)
            config, accuracy = about["config"], 100 * about["test_accuracy"]
            size = path.stat().st_size
            found.append(Shipped(path.parent, config["task"], config["mask"], about["figure"], accuracy, size))
    return found
