"""Train one model through its curriculum: the loop, its log and its checkpoints.

<run>/config.json         the settings, the curriculum among them
<run>/log.jsonl           loss, accuracy and speed over the steps
<run>/checkpoint-*        the newest state, in files below 15 MiB; experiments/lra/checkpoint.py
<run>/model.safetensors   the averaged weights when the run is complete, with model.json; weights.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from experiments.lra import checkpoint, schedule
from experiments.lra.average import Average
from experiments.lra.clock import Clock
from experiments.lra.files import write_json
from experiments.lra.host import host_threads
from experiments.lra.metrics import device_name, versions
from experiments.lra.ranks import find_device
from experiments.lra.resume import check_unused
from experiments.lra.runlog import Record, RunLog
from experiments.lra.step import adamw
from experiments.lra.tensorfile import sha256
from experiments.pathx import weights
from experiments.pathx.config import Config, Stage, as_dict, from_dict
from experiments.pathx.helped import helped_by, helped_of
from experiments.pathx.packing import Packed
from experiments.pathx.recorded import steps_of
from experiments.pathx.sources import training_seed
from experiments.pathx.step import Outcome, Steps, score
from experiments.pathx.stream import Recipe, Stream, recipe_of


@dataclass
class State:
    """How far a run has come, summed over all its sessions."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    stage_seconds: float = 0.0
    seconds: float = 0.0  # of training, waiting for images included, validation not
    startup_seconds: float = 0.0  # until a stage's first batch is there and its step is compiled, in every session
    images: int = 0
    tokens: int = 0
    # Right answers and images of every log_every latest steps of the stage, oldest first; the last may be incomplete.
    recent: list[list[int]] = field(default_factory=list)
    is_open: bool = False


class Run:
    """A training run in a folder, from its first step or from its newest checkpoint.

    report: called with every record of the log as it is written.
    Raises FileExistsError where the folder holds a run and neither `resume` nor `overwrite` is set.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        stream: Stream,
        *,
        resume: bool = False,
        overwrite: bool = False,
        report: Callable[[Record], None] = lambda record: None,
    ) -> None:
        if not config.curriculum:
            raise ValueError("a run must have a curriculum of at least one stage")
        self.config, self.folder, self.stream, self.report = config, folder, stream, report
        self.device = find_device(config.device)
        self.state = State()
        self.before: dict[str, Any] | None = None  # what the weights had cost, and in how many runs
        self.model = weights.build(config)
        found = checkpoint.newest(folder) if resume else None
        if config.initial is not None:
            if found is not None:
                self.before = json.loads((folder / "config.json").read_text())["initial"]
            else:
                self._begin_from(Path(config.initial))
        self.model.to(self.device)
        if config.compiled:
            self.model.compile_layers()
        self.optimizer = adamw(self.model, config.curriculum[0].lr, config.weight_decay)
        self.average = Average(self.model, config.average) if config.average > 0 else None
        self._prepare_folder(resume, overwrite)
        if found is not None:
            progress = checkpoint.load(found, self.model, self.optimizer, self.average)
            self.state = State(progress.step, seconds=progress.seconds, **progress.details)
        self.log = RunLog(folder / "log.jsonl", self.state.step if resume else None)
        self.window = Window(self.device)
        self.saved = Clock(self.device)  # since the last checkpoint
        self._validation: Callable[[], list[Packed]] | None = None

    @property
    def stage(self) -> Stage:
        return self.config.curriculum[self.state.stage]

    def _begin_from(self, path: Path) -> None:
        model, _, about = weights.load(path)
        own = self.model.state_dict()
        found = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("tracer.")}
        expected = {name for name in own if not name.startswith("tracer.")}
        if found.keys() != expected or any(own[name].shape != tensor.shape for name, tensor in found.items()):
            raise ValueError(f"{path} must hold a model of the same layers, width and registers as this run's")
        self.model.load_state_dict(own | found)
        # Of weights from before this was counted, all runs had the same images.
        runs = 1 if about["initial"] is None else 1 + about["initial"].get("runs", 1)
        training_seed(self.config.seed, runs)  # raises ValueError where there are too many
        self.before = {"sha256": sha256(path), "runs": runs, "helped": helped_of(about), **about["cost"]}

    def _prepare_folder(self, resume: bool, overwrite: bool) -> None:
        if not resume:
            if not overwrite:
                check_unused(self.folder)
            checkpoint.remove(self.folder)
            for name in ("model.safetensors", "model.json"):
                (self.folder / name).unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "config.json", {"config": as_dict(self.config), "initial": self.before})

    def train(self, pause: Callable[[int], bool] = lambda step: False) -> dict[str, Any] | None:
        """Train to the end of the curriculum, write the model, and return what is written beside it.

        pause: asked after every step; where it says yes, the run is saved and None is returned.
        Of a run that is complete already, nothing is written: its model may have results.
        """
        begun_at = self.state.step
        with host_threads(self.device):
            while self.state.stage < len(self.config.curriculum):
                if not self._train_stage(pause):
                    return None
                self._next_stage()
                self._save()
        path = self.folder / "model.safetensors"
        if self.state.step == begun_at and weights.is_whole(path):
            return weights.beside(path)
        return self._write_model(path)

    def _train_stage(self, pause: Callable[[int], bool]) -> bool:
        """Train to the end of the stage; False where the run was paused before."""
        config, state, stage = self.config, self.state, self.stage
        # A run that began before this was counted goes on with the images that it began with.
        recipe = recipe_of(config, state.stage, 0 if self.before is None else self.before.get("runs", 0))
        self._validation = self.stream.validation(recipe, config.validation_images)
        batches = self.stream.batches(recipe, state.stage_step)
        steps = steps_of(self.model, self.optimizer, recipe, config, self.device)
        self.window = Window(self.device)
        try:
            packings = batches
            if self._stage_progress() < 1 and not self._advances():
                packings = self._started(batches, steps)
            while (done := self._stage_progress()) < 1 and not self._advances():
                lr = stage.lr * schedule.factor(stage.schedule, state.stage_step, stage.warmup, done)
                packed = next(packings)
                self.window.add(packed, steps(packed, lr))
                if self.average is not None:
                    # The first weights are soon forgotten.
                    self.average.decay = min(config.average, (1 + state.step) / (10 + state.step))
                    self.average.update()
                state.step += 1
                state.stage_step += 1
                paused = pause(state.step)
                validates = state.step % config.validate_every == 0
                saves = state.step % config.checkpoint_every == 0 or paused
                saves = saves or self.saved.elapsed() >= 60 * config.checkpoint_minutes
                if state.stage_step % config.log_every == 0 or validates or saves:
                    self._close_window(lr)
                if validates:
                    self._validate(recipe)
                if saves:
                    self._save()
                if paused:
                    return False
                if validates or saves:
                    self.window = Window(self.device)  # its clock starts only now
            if self.window.steps:
                self._close_window(lr)
            validated = self.log.of_kind("val")
            if not validated or validated[-1]["step"] != state.step:
                self._validate(recipe)
        finally:
            batches.close()
        return True

    def _started(self, batches: Iterator[Packed], steps: Steps) -> Iterator[Packed]:
        """The batches, as soon as the first one is there and steps are prepared; then time counts.

        Otherwise a stage of so many minutes would spend them on starting processes and on compiling, more of them in
        every session and with some masks than with others.
        """
        clock = Clock(self.device)
        first = next(batches)
        steps.prepare(first)
        self.state.startup_seconds += clock.finish()
        self.stream.waited = 0.0
        self.window = Window(self.device)
        return chain([first], batches)

    def _next_stage(self) -> None:
        self.state.stage += 1
        self.state.stage_step, self.state.stage_seconds = 0, 0.0
        self.state.recent, self.state.is_open = [], False

    def progress(self) -> float:
        """The part of the run that is done, in stages and parts of stages."""
        if self.state.stage == len(self.config.curriculum):
            return 1.0
        return (self.state.stage + min(1.0, self._stage_progress())) / len(self.config.curriculum)

    def _stage_progress(self) -> float:
        """The part of the stage that is done, by its steps or its time, whichever is further."""
        stage, state = self.stage, self.state
        by_step = state.stage_step / stage.steps if stage.steps is not None else 0.0
        if stage.minutes is None:
            return by_step
        return max(by_step, (state.stage_seconds + self.window.clock.elapsed()) / (60 * stage.minutes))

    def _advances(self) -> bool:
        """Whether the stage's accuracy is reached; fresh images, so it is that of a test.

        Asked at multiples of log_every only, wherever a run was paused between them.
        """
        if self.state.is_open:
            return False
        right, images = map(sum, zip(*self.state.recent)) if self.state.recent else (0, 0)
        until = self.stage.until
        return until is not None and images >= self.config.advance_images and right / images >= until

    def _close_window(self, lr: float) -> None:
        state, window = self.state, self.window
        seconds = window.clock.finish()
        loss, auxiliary, right = torch.stack([window.loss, window.auxiliary, window.right]).tolist()
        loss, auxiliary = loss / window.steps, auxiliary / window.steps
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} at step {state.step}; lower the stage's lr, {self.stage.lr:g}"
            )
        state.seconds += seconds
        state.stage_seconds += seconds
        state.images += window.images
        state.tokens += window.tokens
        self._remember(int(right), window.images)
        self._record({
            "kind": "train", "step": state.step, "stage": state.stage, "size": self.stage.size,
            "contour": self.stage.contour, "loss": loss, "accuracy": right / window.images, "auxiliary": auxiliary,
            "lr": lr, "images": state.images, "tokens": state.tokens, "seconds": state.seconds,
            "startup_seconds": state.startup_seconds,
            "tokens_per_s": window.tokens / seconds, "images_per_s": window.images / seconds,
            "waited": self.stream.waited / seconds,
        })  # fmt: skip
        self.stream.waited = 0.0
        self.window = Window(self.device)

    def _remember(self, right: int, images: int) -> None:
        state = self.state
        if state.is_open:
            state.recent[-1] = [state.recent[-1][0] + right, state.recent[-1][1] + images]
        else:
            state.recent.append([right, images])
        state.is_open = state.stage_step % self.config.log_every != 0
        while not state.is_open and sum(images for _, images in state.recent[1:]) >= self.config.advance_images:
            state.recent.pop(0)

    def _validate(self, recipe: Recipe) -> None:
        if self._validation is None:
            raise RuntimeError("a stage makes its validation images before it validates")
        packings = self._validation()
        self._validation = lambda: packings
        with self.average.in_place() if self.average is not None else nullcontext():
            found = score(self.model, packings, recipe.layers, self.config, self.device)
        self._record({
            "kind": "val", "step": self.state.step, "stage": self.state.stage, "size": recipe.size,
            "contour": self.stage.contour, "loss": found.loss, "accuracy": found.accuracy,
            "seconds": self.state.seconds,
        })  # fmt: skip

    def _record(self, record: Record) -> None:
        self.log.write(record)
        self.report(record)

    def _save(self) -> None:
        details = asdict(self.state)
        step, seconds = details.pop("step"), details.pop("seconds")
        checkpoint.save(
            self.folder, checkpoint.Progress(step, seconds, details), self.model, self.optimizer, self.average
        )
        self.saved = Clock(self.device)

    def _write_model(self, path: Path) -> dict[str, Any]:
        state = self.state
        cost = {
            "minutes": state.seconds / 60, "startup_minutes": state.startup_seconds / 60, "images": state.images,
            "tokens": state.tokens, "steps": state.step,
        }  # fmt: skip
        if self.before is not None:
            cost |= {name: cost[name] + self.before.get(name, 0) for name in cost}
        about = {
            "cost": cost,
            "initial": self.before,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "auxiliary": self.config.auxiliary,
            "helped": helped_by(self.config, self.before),
            "validation": self.log.of_kind("val")[-1],
            "device": device_name(self.device),
            "versions": versions(),
        }
        with self.average.in_place() if self.average is not None else nullcontext():
            weights.save(path, self.model, self.config, about)
        return weights.beside(path)


class Window:
    """Sums over the steps since the last line of the log, kept on the device so that no step waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.loss, self.auxiliary, self.right = torch.zeros(3, dtype=torch.float64, device=device).unbind()
        self.steps = self.images = self.tokens = 0
        self.clock = Clock(device)

    def add(self, packed: Packed, outcome: Outcome) -> None:
        self.loss += outcome.loss
        self.auxiliary += outcome.auxiliary
        self.right += outcome.right
        self.steps += 1
        self.images += packed.images
        self.tokens += packed.tokens


def saved_run(folder: Path) -> Config:
    """The settings of the run in a folder; raises FileNotFoundError where there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no run to resume in {folder}")
    return from_dict(json.loads(path.read_text())["config"])
