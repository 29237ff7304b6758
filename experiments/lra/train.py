"""Train one model: the loop, its log, its checkpoints and its final metrics.

<run>/config.json         the settings, and which data they were used on
<run>/log.jsonl           loss, accuracy and speed over the steps
<run>/checkpoint-*        the newest state; see checkpoint.py
<run>/metrics.json        the result, when the run is complete
<run>/model.safetensors   the weights that were tested, for another run's --initial; in parts if they are large; see
                          weights.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from experiments.lra import checkpoint, masks, schedule, seeds, weights
from experiments.lra.augment import Turning
from experiments.lra.average import Average
from experiments.lra.batches import Batch, blocks_of_rows, check_images, evaluation_batches, training_batches
from experiments.lra.best import Best
from experiments.lra.clock import Clock
from experiments.lra.config import Config, as_dict, from_saved
from experiments.lra.denoise import hidden_for_scoring, hidden_for_training
from experiments.lra.files import write_json
from experiments.lra.host import host_threads
from experiments.lra.identity import check_same, described, identity
from experiments.lra.metrics import final_metrics
from experiments.lra.order import Order
from experiments.lra.ranks import ALONE, Ranks, find_device
from experiments.lra.recorded import steps_of
from experiments.lra.resume import check_unused, discard
from experiments.lra.runlog import Record, RunLog
from experiments.lra.step import Outcome, Steps, build_model, build_optimizer, evaluate
from experiments.lra.tasks import TASKS, Data
from experiments.lra.trace import classes_of


def check(config: Config) -> None:
    """What can be told of the settings before there are data: raises ValueError for a mask or sizes that no run has."""
    find_device(config.device)
    mask = masks.build(config.mask, config.shape.length, block=config.block, window=config.window)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        build_model(config, TASKS[config.task], mask.to("meta"))


class Run:
    """A training run in a folder, from its first step or from its newest checkpoint.

    report: called with every record of the log as it is written.
    ranks: the processes that train it together; the first one writes, and reports.
    Raises FileExistsError where the folder holds a run and neither `resume` nor `overwrite` is set; ValueError where
    the processes cannot share the batch, or the best weights would be chosen by the test split.
    """

    def __init__(
        self,
        config: Config,
        data: Data,
        folder: Path,
        *,
        resume: bool = False,
        overwrite: bool = False,
        report: Callable[[Record], None] = lambda record: None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config, self.data, self.folder, self.report, self.ranks = config, data, folder, report, ranks
        if config.batch % ranks.count:
            raise ValueError(
                f"the batch must be a multiple of the number of processes, {ranks.count}, which share it; "
                f"got {config.batch}"
            )
        if config.keep == "best" and data.val is data.test:
            raise ValueError(
                f"keep=best would choose the weights by the test split: {config.task} has no other to validate on; "
                "choose --keep last"
            )
        self.device = find_device(config.device)
        self.shape = config.shape
        for examples in (data.train, data.val, data.test):
            check_images(examples, self.shape)
        # The first process may have to work them out and to keep them, for the others to read.
        self.traces = ranks.after_first(lambda: classes_of(data)) if config.auxiliary else None
        sizes = blocks_of_rows(data.train, self.shape) if config.buckets else None
        self.order = Order(len(data.train), config.batch, config.seed, sizes, ranks.share)
        self.mask = masks.build(config.mask, self.shape.length, block=config.block, window=config.window)
        self.model = build_model(config, data.task, self.mask.to(self.device))
        self.optimizer = build_optimizer(config, self.model)
        # Asked by the first process, which may be writing one: the others wait for it, and see the same.
        found = ranks.from_first(lambda: checkpoint.newest(folder)) if resume else None
        self.before: dict[str, Any] | None = None  # what the weights had seen when this run began
        self.seen = identity(data)
        if config.initial is not None:
            if found is not None:
                self.before = json.loads((folder / "config.json").read_text())["initial"]
            else:
                self.before = weights.begin_from(self.model, Path(config.initial), config, self.seen)
        self.average = Average(self.model, config.average) if config.average > 0 else None
        self.best = Best(self.model) if config.keep == "best" else None
        ranks.seed_apart(config.seed)
        self.step, self.seconds = 0, 0.0
        self.startup_seconds = 0.0  # until the first batch is there and a step is compiled, over all sessions
        ranks.from_first(lambda: self._prepare_folder(resume, overwrite))
        if found is not None:
            progress = checkpoint.load(found, self.model, self.optimizer, self.average, best=self.best, rank=ranks.rank)
            self.step, self.seconds = progress.step, progress.seconds
            self.startup_seconds = progress.details.get("startup_seconds", 0.0)
        self.log = RunLog(folder / "log.jsonl" if ranks.first else None, self.step if resume else None)
        self.shared = ranks.together(self.model)
        self.window = Window(self.device)

    def _prepare_folder(self, resume: bool, overwrite: bool) -> None:
        saved = self.folder / "config.json"
        used = described(self.data)
        if resume:
            check_same(json.loads(saved.read_text())["data"], used)
        else:
            seeds.check_none(self.folder)
            if not overwrite:
                check_unused(self.folder)
            discard(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(saved, {"config": as_dict(self.config), "data": used, "initial": self.before})

    def train(self, pause: Callable[[int], bool] = lambda step: False) -> dict[str, Any] | None:
        """Train to the end, test, and return the final metrics.

        pause: asked after every step; where it says yes, the run is saved and None is returned.
        """
        with host_threads(self.device):
            if not self._train(pause):
                return None
            self._save()
            # After the checkpoint: a run that is prolonged would not have stopped here to validate.
            if self.best is not None and self.best.offered != self.step:
                self._evaluate("val")
            self._evaluate("test")
        return self.ranks.from_first(self._write_result)

    def _train(self, pause: Callable[[int], bool]) -> bool:
        """Take all steps; False where the run was paused before."""
        config = self.config
        side = self.data.task.side
        turning = None
        if config.augment != "none" and side is not None:
            turning = Turning(config.augment, side, config.seed, config.batch, self.ranks.share)
        batches = training_batches(self.data.train, self.shape, self.order, self.step, turning, self.traces)
        if config.objective == "denoise":
            batches = hidden_for_training(batches, self.shape, config.hidden, config.seed, self.step, self.ranks.rank)
        steps = steps_of(self.model, self.optimizer, config, self.device, self.shared)
        self.window = Window(self.device)
        if self._agreed_progress() < 1:
            batches = self._started(batches, steps)
        while (progress := self._agreed_progress()) < 1:
            lr = config.lr * schedule.factor(config.schedule, self.step, config.warmup, progress)
            batch = next(batches)
            prepared = steps.preparing
            self.window.add(batch, steps(batch, lr))
            self._start_up_longer(steps.preparing - prepared)
            if self.average is not None:
                self.average.update()
            self.step += 1
            paused = bool(self.ranks.agreed(pause(self.step)))
            validates = self.step % config.eval_every == 0
            saves = self.step % config.checkpoint_every == 0 or paused
            if self.step % config.log_every == 0 or validates or saves:
                self._close_window(lr)
            if validates:
                self._evaluate("val")
            if saves:
                self._save()
            if paused:
                return False
            if validates or saves:
                self.window = Window(self.device)  # its clock starts only now
        if self.window.steps:
            self._close_window(lr)
        return True

    def _started(self, batches: Iterator[Batch], steps: Steps) -> Iterator[Batch]:
        """The batches, as soon as the first one is there and steps like it are prepared; then time counts."""
        clock = Clock(self.device)
        first = next(batches)
        steps.prepare(first)
        self.startup_seconds += clock.finish()
        self.window = Window(self.device)
        return chain([first], batches)

    def _start_up_longer(self, seconds: float) -> None:
        """Steps on batches of a new shape may have to be prepared in the middle of a run, which is no training."""
        self.startup_seconds += seconds
        self.window.clock.leave_out(seconds)

    def _write_result(self) -> dict[str, Any]:
        with self._tested():
            weights.save(
                self.folder / weights.FILE,
                self.model,
                self.config,
                {
                    "steps": self.step,
                    "tested_step": self.tested_step,
                    "seconds": self.seconds,
                    "pixel_labels": self.pixel_labels,
                    "before": weights.runs_before(self.before),
                },
                [*((self.before or {}).get("seen") or ()), self.seen],
            )
        metrics = final_metrics(self)
        write_json(self.folder / "metrics.json", metrics)
        return metrics

    @property
    def pixel_labels(self) -> bool:
        """Whether the weights have seen the classes of pixels, in this run or in one before it."""
        return self.config.auxiliary > 0 or bool((self.before or {}).get("pixel_labels"))

    @property
    def tested_step(self) -> int:
        """The step that the weights are of which count as the run's result."""
        return self.step if self.best is None else self.best.step

    def _agreed_progress(self) -> float:
        """The steps are the same in every process, the time is not."""
        return self.progress() if self.config.minutes is None else self.ranks.agreed(self.progress())

    def progress(self) -> float:
        """The part of the run that is done, by its steps or its time, whichever is further."""
        by_step = self.step / self.config.steps
        if self.config.minutes is None:
            return by_step
        return max(by_step, (self.seconds + self.window.clock.elapsed()) / (60 * self.config.minutes))

    def _close_window(self, lr: float) -> None:
        seconds = self.window.clock.finish()
        self.seconds += seconds
        window = self.window
        counts = torch.tensor([window.answers, window.tokens, window.places], dtype=torch.float64, device=self.device)
        outcomes = torch.stack([window.loss.double(), window.right.double(), window.auxiliary.double()])
        sums = self.ranks.summed(torch.cat([outcomes, counts]))
        loss, right, auxiliary, answers, tokens, places = sums.tolist()
        loss, auxiliary = (each / (window.steps * self.ranks.count) for each in (loss, auxiliary))
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} at step {self.step}; lower --lr (now {self.config.lr:g}) or raise "
                f"--warmup (now {self.config.warmup})"
            )
        record = {
            "kind": "train",
            "step": self.step,
            "loss": loss,
            "accuracy": right / answers,
            "lr": lr,
            "tokens_per_s": tokens / seconds,
            "padding": 1 - tokens / places,
            "seconds": self.seconds,
            "startup_seconds": self.startup_seconds,
        }
        if self.config.auxiliary:
            record["auxiliary"] = auxiliary
        self._record(record)
        self.window = Window(self.device)

    def _evaluate(self, kind: str) -> None:
        """Score the validation or the test split and log it."""
        test = kind == "test"
        examples = self.data.test if test else self.data.val
        limit = len(examples) if test else self.config.eval_examples
        batch = self.config.batch // self.ranks.count
        batches = evaluation_batches(examples, self.shape, batch, limit, self.ranks.share)
        if self.config.objective == "denoise":
            numbers = count(self.ranks.rank, self.ranks.count)
            batches = hidden_for_scoring(batches, self.shape, self.config.hidden, numbers)
        with self._tested() if test else self._averaged():
            score = evaluate(self.model, batches, self.config, self.device, self.ranks)
            if not test and self.best is not None:
                self.best.offer(self.step, score.accuracy)
        chosen = {"tested_step": self.tested_step} if test and self.best is not None else {}
        self._record({"kind": kind, "step": self.step, **vars(score), **chosen})

    def _averaged(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that would be the run's result if it ended now."""
        return self.average.in_place() if self.average is not None else nullcontext()

    def _tested(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that count as the run's result: the last ones, or the best."""
        return self._averaged() if self.best is None else self.best.in_place()

    def _record(self, record: Record) -> None:
        self.log.write(record)
        if self.ranks.first:
            self.report(record)

    def _save(self) -> None:
        random = self.ranks.gathered(checkpoint.random_state(self.device))
        if self.ranks.first:
            progress = checkpoint.Progress(self.step, self.seconds, {"startup_seconds": self.startup_seconds})
            checkpoint.save(self.folder, progress, self.model, self.optimizer, self.average, random, best=self.best)


class Window:
    """Sums over the steps since the last line of the log, kept on the device so that no step waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.loss, self.auxiliary = torch.zeros((), device=device), torch.zeros((), device=device)
        self.right = torch.zeros((), dtype=torch.int64, device=device)
        self.steps = self.answers = self.tokens = self.places = 0
        self.clock = Clock(device)

    def add(self, batch: Batch, outcome: Outcome) -> None:
        self.loss += outcome.loss
        self.right += outcome.right
        self.auxiliary += outcome.auxiliary
        self.steps += 1
        self.answers += len(batch.labels)
        self.tokens += batch.live_tokens
        self.places += batch.ids.numel()


def check_initial(config: Config, data: Data) -> None:
    """Raises where a run could not begin with the weights that it is to: before older runs are deleted for it."""
    if config.initial is not None:
        mask = masks.build(config.mask, config.shape.length, block=config.block, window=config.window)
        weights.begin_from(build_model(config, data.task, mask), Path(config.initial), config, identity(data))


def saved_run(folder: Path) -> tuple[Config, Path]:
    """The settings and the data folder of the run, or of the runs with several seeds, in a folder.

    Raises FileNotFoundError where there is none.
    """
    path = folder / (seeds.SERIES if (folder / seeds.SERIES).is_file() else "config.json")
    if not path.is_file():
        raise FileNotFoundError(f"there is no run to resume in {folder}")
    saved = json.loads(path.read_text())
    return from_saved(saved["config"]), Path(saved["data"]["folder"])
