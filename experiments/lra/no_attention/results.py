"""The stored accuracies of models without attention: experiments/results/lra/no-attention*.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch

from experiments.lra.data.fingerprint import fingerprint
from experiments.lra.no_attention import linear, network
from experiments.lra.no_attention.linear import Answered
from experiments.lra.no_attention.network import Length
from experiments.lra.tasks.task import Data
from experiments.measurements import Measurement, read, slug

STORED = Path(__file__).parents[2] / "results" / "lra"
FILES = "no-attention*.jsonl"
RUN = 4  # tokens of the longest runs that are counted
MOST = 20_000  # training examples of a linear model of runs

BAG, RUNS, CNN = "bag of tokens", "bag of runs of 4", "small CNN"
RULES = {"bag": BAG, "runs": RUNS, "cnn": CNN}


def measured(data: Data, rule: str, seeds: Sequence[int], length: Length, device: torch.device) -> Measurement:
    """The test accuracy of one model without attention, in percent; for a network the mean over the seeds."""
    if rule not in RULES:
        raise ValueError(f"a model without attention must be one of {', '.join(RULES)}; got {rule!r}")
    if rule == "runs" and data.task.side is not None:
        raise ValueError(f"runs are of sequences; {data.task.name} has images: leave out runs")
    fits: dict[str, Callable[[], list[Answered]]] = {
        "bag": lambda: [linear.fitted(data, 1)],
        "runs": lambda: [linear.fitted(data, RUN, MOST)],
        "cnn": lambda: [network.trained(data, length, seed, device) for seed in seeds],
    }
    found = fits[rule]()
    values = [100 * each.accuracy for each in found]
    settings = {
        "data": fingerprint(data),
        "validation": [100 * each.validation for each in found],
        "examples": [each.examples for each in found],
        "parameters": found[0].parameters,
        "runs": values,
        "run_seeds": list(seeds) if rule == "cnn" else [],
    }
    name = f"lra/{data.task.name}/accuracy/no-attention/{slug(RULES[rule])}"
    if len(values) == 1:
        return Measurement(name, values[0], None, "%", settings)
    spread = stdev(values) / fmean(values)
    return Measurement(name, fmean(values), spread, "%", settings, spread_of="seeds", seeds=len(values))


def stored(data: Data, folder: Path = STORED) -> list[tuple[str, float]]:
    own = fingerprint(data)["hash"]
    names = {slug(rule): rule for rule in RULES.values()}
    return [
        (names[each.way], each.value / 100)
        for path in sorted(folder.glob(FILES))
        for each in read(path)[1]
        if each.value is not None and each.settings["data"]["hash"] == own
    ]
