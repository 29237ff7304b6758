"""Train one model on a task, test it, and write its metrics.

<run>/metrics.json        the result, when the run is complete
<run>/model.safetensors   the tested weights, for another run's --initial; see weights.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.lra import weights
from experiments.lra.config import Config, as_dict, from_saved
from experiments.lra.data.augment import Turning
from experiments.lra.data.batches import Batch, blocks_of_rows, check_images, evaluation_batches, training_batches
from experiments.lra.data.examples import Examples
from experiments.lra.data.fingerprint import described, fingerprint
from experiments.lra.data.order import Order
from experiments.lra.denoise import hidden_for_scoring, hidden_for_training
from experiments.lra.graph_steps import steps_of
from experiments.lra.metrics import final_metrics
from experiments.lra.model.build import build_model, build_optimizer, mask_of
from experiments.lra.scoring import Score, score
from experiments.lra.tasks import TASKS
from experiments.lra.tasks.task import Data
from experiments.lra.token_labels import token_labels_of
from experiments.training.atomic_files import write_json
from experiments.training.distributed import SINGLE, Ranks, find_device
from experiments.training.fingerprint import check_same_data
from experiments.training.run_folder import SETTINGS, settings_as
from experiments.training.run_log import Record
from experiments.training.series import SERIES
from experiments.training.trainer import Cadence, Pause, Trainer, never
from experiments.training.window import Means


def check(config: Config) -> None:
    find_device(config.device)
    mask = mask_of(config)
    if config.context_parallel > 1 and max(mask.block_q, mask.block_k) > config.block:
        raise ValueError(
            f"the mask's blocks must have at most --block {config.block} tokens if context_parallel is above 1: "
            f"each process needs a block of the shortest row; got {mask.block_q} x {mask.block_k}: raise --block"
        )
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        build_model(config, TASKS[config.task], mask.to("meta"))


class Run(Trainer[Batch]):
    def __init__(
        self,
        config: Config,
        data: Data,
        folder: Path,
        *,
        resume: bool = False,
        overwrite: bool = False,
        ranks: Ranks = SINGLE,
        model: nn.Module | None = None,
    ) -> None:
        """model: a network without attention, on its device; None: the transformer of the settings."""
        self.config, self.data = config, data
        ranks.check_context_parallel(config.context_parallel)
        ranks.check_batch(config.batch, "--batch")
        if config.keep == "best" and data.val is data.test:
            raise ValueError(
                f"keep=best would choose the weights by the test split: {config.task} has no other to validate on; "
                "choose --keep last"
            )
        device = find_device(config.device)
        self.shape = config.shape
        for examples in (data.train, data.val, data.test):
            check_images(examples, self.shape)
        # The first process may store them.
        self.token_classes = ranks.first_before_others(lambda: token_labels_of(data)) if config.auxiliary else None
        sizes = blocks_of_rows(data.train, self.shape) if config.buckets else None
        self.order = Order(len(data.train), config.batch, config.seed, sizes, ranks.share)
        self.mask = mask_of(config)
        self.fingerprint = fingerprint(data)
        if model is None:
            model = build_model(config, data.task, self.mask.to(device))
            if ranks.mesh is not None:
                self.shared = model.share_sequences(ranks)
        super().__init__(
            folder,
            model,
            build_optimizer(config, model),
            device,
            Cadence(config.log_every, config.eval_every, config.checkpoint_every),
            seed=config.seed,
            average_decay=config.average,
            keeps_best=config.keep == "best",
            initial=config.initial,
            resume=resume,
            overwrite=overwrite,
            ranks=ranks,
        )

    @property
    def plan(self) -> Config:
        return self.config

    def settings(self) -> dict[str, Any]:
        return {"config": as_dict(self.config), "data": described(self.data)}

    def check_resumable(self, saved: dict[str, Any]) -> None:
        check_same_data(saved["data"], described(self.data))

    def begin_from(self, path: Path) -> dict[str, Any]:
        return weights.begin_from(self.model, path, self.config, self.fingerprint)

    def train(self, pause: Pause = never) -> dict[str, Any] | None:
        with self.session():
            steps = steps_of(self.model, self.optimizer, self.config, self.device, self.data_parallel)
            if not self.train_stage(self._batches(), steps, pause):
                return None
            self.save()
            # A run that is extended later would not have validated here.
            if self.best is not None and self.best.offered != self.state.step:
                self.validate()
            self._test()
        return self.ranks.on_first(self._write_result)

    def _batches(self) -> Iterator[Batch]:
        config, side = self.config, self.data.task.side
        turning = None
        if config.augment != "none" and side is not None:
            turning = Turning(config.augment, side, config.seed, config.batch, self.ranks.share)
        step = self.state.step
        batches = training_batches(self.data.train, self.shape, self.order, step, turning, self.token_classes)
        if config.objective == "denoise":
            share = self.ranks.data_parallel_rank
            return hidden_for_training(batches, self.shape, config.hidden, config.seed, step, share)
        return batches

    def training_numbers(self, means: Means, seconds: float) -> Record:
        numbers = {"accuracy": means.right / means.answers, "padding": 1 - means.tokens / means.places}
        if self.config.auxiliary:
            numbers["auxiliary"] = means.auxiliary
        return numbers

    def validate(self) -> None:
        with self.averaged():
            found = self._score(self.data.val, self.config.eval_examples)
            if self.best is not None:
                self.best.offer(self.state.step, found.accuracy)
        self.record({"kind": "val", "step": self.state.step, **vars(found)})

    def _test(self) -> None:
        with self._tested():
            found = self._score(self.data.test, len(self.data.test))
        chosen = {"tested_step": self.tested_step} if self.best is not None else {}
        self.record({"kind": "test", "step": self.state.step, **vars(found), **chosen})

    def _score(self, examples: Examples, limit: int) -> Score:
        batches = evaluation_batches(
            examples, self.shape, self.config.batch // self.ranks.data_parallel_ranks, limit, self.ranks.share
        )
        if self.config.objective == "denoise":
            numbers = count(self.ranks.data_parallel_rank, self.ranks.data_parallel_ranks)
            batches = hidden_for_scoring(batches, self.shape, self.config.hidden, numbers)
        return score(self.model, batches, self.config, self.device, self.ranks)

    def _tested(self) -> AbstractContextManager[None]:
        """Inside, the model has the last or the best weights."""
        return self.averaged() if self.best is None else self.best.in_place()

    @property
    def tested_step(self) -> int:
        return self.state.step if self.best is None else self.best.step

    @property
    def has_seen_token_labels(self) -> bool:
        return self.config.auxiliary > 0 or bool((self.before or {}).get("token_labels"))

    def _write_result(self) -> dict[str, Any]:
        cost = {
            "steps": self.state.step,
            "tested_step": self.tested_step,
            "seconds": self.state.seconds,
            "token_labels": self.has_seen_token_labels,
            "before": weights.runs_before(self.before),
        }
        seen = [*((self.before or {}).get("seen") or ()), self.fingerprint]
        with self._tested():
            accuracy = self.log.of_kind("test")[-1]["accuracy"]
            weights.save(self.folder / weights.FILE, self.model, self.config, cost, seen, accuracy)
        metrics = final_metrics(self)
        write_json(self.folder / "metrics.json", metrics)
        return metrics


def check_initial(config: Config, data: Data) -> None:
    if config.initial is not None:
        model = build_model(config, data.task, mask_of(config))
        weights.begin_from(model, Path(config.initial), config, fingerprint(data))


def saved_run(folder: Path) -> tuple[Config, Path]:
    path = folder / (SERIES if (folder / SERIES).is_file() else SETTINGS)
    return settings_as(path, lambda saved: (from_saved(saved["config"]), Path(saved["data"]["folder"])))
