"""Tests a finished run, and reports accuracies by subset."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.lra import weights
from experiments.lra.baselines import baselines
from experiments.lra.config import Config, from_saved
from experiments.lra.data.batches import check_images, evaluation_batches, evaluation_order
from experiments.lra.data.examples import Examples
from experiments.lra.data.fingerprint import fingerprint
from experiments.lra.losses import forward
from experiments.lra.model.build import made_model, mask_of
from experiments.lra.model.classifier import Classifier
from experiments.lra.model.masks import NAMES
from experiments.lra.tasks import TASKS
from experiments.lra.tasks.task import Data, Kinds
from experiments.measurements import Measurement, slug
from experiments.training import tensor_files
from experiments.training.environment import command_line, device_name, versions
from experiments.training.fingerprint import check_disjoint, sha256
from experiments.training.host_threads import single_host_thread
from experiments.training.reading import reading


def opened(path: Path, device: torch.device, mask: str | None = None) -> tuple[Classifier, Config, dict[str, Any]]:
    """The classifier of a finished run, its settings, and the description in its file.

    path: the run's folder, or its model.safetensors.
    The mask is required if it is a function, because the file then names code to run.
    """
    found, about = weights.read(path)
    with reading(path, f"a file of an {weights.KIND} with its settings and its cost"):
        config = replace(from_saved(about["config"]), compiled=False, recorded=False, context_parallel=1)
        about["cost"]["steps"]
    if config.mask not in NAMES and config.mask != mask:
        raise ValueError(
            f"{path} must be allowed to run code: its settings name the function {config.mask!r}, which makes its "
            f"mask. If you trust it, pass --mask {shlex.quote(config.mask)}"
        )
    if device.type == "cpu":
        config = replace(config, precision="fp32")
    if config.objective != "classify":
        raise ValueError(f"{path} must hold a model that classifies; it was trained with objective={config.objective}")
    tensor_files.check_length(path, config.shape.length, config.block)
    with reading(path, "a model whose mask its own settings describe"):
        of_run = mask_of(config).to(device)

    def made() -> Classifier:
        model = made_model(config, TASKS[config.task], of_run)
        assert isinstance(model, Classifier)
        return model

    return tensor_files.filled(path, found, made, config.depth).to(device), config, about


def evaluate(
    path: Path,
    model: Classifier,
    config: Config,
    about: dict[str, Any],
    data: Data,
    *,
    first: int | None = None,
    progress: Callable[[int], None] = lambda tested: None,
) -> dict[str, Any]:
    """The accuracy of a model on the test split of some data, as plain values for a JSON file.

    first: test this many examples, the first ones; None: all.
    progress: called with the number of tested examples.

    Losses are mean cross-entropies in nats.
    """
    check_disjoint(path, about.get("seen"), fingerprint(data))
    device = next(model.parameters()).device
    test = data.test if first is None else data.test.take(np.arange(min(first, len(data.test))))
    right, loss = answers(model, test, config, device, progress)
    accuracy = float(right.double().mean())
    return {
        "task": data.task.name,
        "generated_data": data.generated,
        "data": {**fingerprint(data), "folder": str(data.folder)},
        "trained_on": about.get("seen"),
        "mask": config.mask,
        "attention": config.attention,
        "objective": config.objective,
        "token_labels": about["cost"].get("token_labels", False),
        "test_examples": len(right),
        "of_examples": len(data.test),
        "test_accuracy": accuracy,
        "error": sqrt(accuracy * (1 - accuracy) / len(right)),  # the standard error
        "accuracy_of_run": about.get("test_accuracy"),  # on the run's own test split
        "figure": about.get("figure"),
        "test_loss": loss,
        "baselines": [asdict(rule) for rule in baselines(data)],
        "kinds": None if data.kinds is None else by_kind(data.kinds(), right),
        "weights": sha256(*tensor_files.files(path)),
        "steps": about["cost"]["steps"],
        "tested_step": about["cost"].get("tested_step", about["cost"]["steps"]),
        "command": command_line("experiments.lra"),
        "device": device_name(device),
        "versions": versions(),
    }


def measurement(found: dict[str, Any]) -> Measurement:
    """A test as a measurement, named after the stored accuracy of the run; its spread is its standard error."""
    figure = found["figure"] or f"lra/{found['task']}/accuracy/{slug(found['mask'])}"
    settings = {
        "examples": found["test_examples"],
        "of": found["of_examples"],
        "spread": "standard error of one test",
        "accuracy_of_run": found["accuracy_of_run"] and 100 * found["accuracy_of_run"],
        "figure": found["figure"],
        "weights": found["weights"],
        "data": found["data"]["origin"],
    }
    accuracy = found["test_accuracy"]
    spread = found["error"] / accuracy if accuracy else None
    return Measurement(figure.replace("/accuracy/", "/tested-again/"), 100 * accuracy, spread, "%", settings)


@torch.inference_mode()
def answers(
    model: Classifier, examples: Examples, config: Config, device: torch.device, progress: Callable[[int], None]
) -> tuple[Tensor, float]:
    """Whether each example is answered correctly, in the order of the examples, bool [n] on the CPU; and the loss."""
    check_images(examples, config.shape)
    model.eval()
    right, loss, tested = [], torch.zeros((), dtype=torch.float64, device=device), 0
    with single_host_thread(device):
        for batch in evaluation_batches(examples, config.shape, config.batch, len(examples)):
            batch = batch.to(device)
            logits = forward(model, batch, config)
            loss += F.cross_entropy(logits, batch.labels, reduction="sum")
            right.append(logits.argmax(-1) == batch.labels)
            progress(tested := tested + len(batch.labels))
    in_order = torch.empty(len(examples), dtype=torch.bool)
    in_order[torch.from_numpy(evaluation_order(examples, config.shape, len(examples)))] = torch.cat(right).cpu()
    return in_order, float(loss) / len(examples)


def by_kind(kinds: Kinds, right: Tensor) -> dict[str, Any]:
    groups = []
    for number, name in enumerate(kinds.names):
        chosen = right[torch.from_numpy(kinds.of_test[: len(right)] == number)]
        if len(chosen):
            rules = {rule: accuracies[number] for rule, accuracies in kinds.rules.items()}
            accuracy = float(chosen.double().mean())
            groups.append({"name": name, "examples": len(chosen), "accuracy": accuracy, "rules": rules})
    return {"by": kinds.by, "groups": groups}
