"""The stored accuracies of models without attention: experiments/results/lra/no-attention*.jsonl."""

from __future__ import annotations

from pathlib import Path

from experiments.lra.data.fingerprint import fingerprint
from experiments.lra.tasks.task import Data
from experiments.measurements import read, slug

STORED = Path(__file__).parents[2] / "results" / "lra"
FILES = "no-attention*.jsonl"
RULES = {"bag": "bag of tokens", "runs": "bag of runs of 4", "cnn": "small CNN"}


def stored(data: Data, folder: Path = STORED) -> list[tuple[str, float]]:
    own = fingerprint(data)["hash"]
    names = {slug(rule): rule for rule in RULES.values()}
    return [
        (names[each.way], each.value / 100)
        for path in sorted(folder.glob(FILES))
        for each in read(path)[1]
        if each.value is not None and each.settings["data"]["hash"] == own
    ]
