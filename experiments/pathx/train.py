"""Train one model through its curriculum, stage by stage, and write its averaged weights.

<run>/model.safetensors   the averaged weights when the run is complete, with model.json; see weights.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.pathfinder.seeds import training_seed
from experiments.pathx import weights
from experiments.pathx.config import Config, Stage, as_dict, from_dict
from experiments.pathx.data.batches import Recipe, recipe_of
from experiments.pathx.data.packing import Packed
from experiments.pathx.data.stream import Stream
from experiments.pathx.graph_steps import steps_of
from experiments.pathx.model.intensity import fitted
from experiments.pathx.scoring import score
from experiments.pathx.supervision import of_model, of_run
from experiments.training import checkpoint
from experiments.training.distributed import find_device
from experiments.training.environment import device_name, versions
from experiments.training.fingerprint import sha256
from experiments.training.optimizer import adamw
from experiments.training.reading import checked, reading
from experiments.training.run_folder import SETTINGS, settings_as
from experiments.training.run_log import Record
from experiments.training.trainer import Cadence, Pause, State, Trainer, never
from experiments.training.window import Means


@dataclass
class StagedState(State):
    stage: int = 0
    images: int = 0
    tokens: int = 0
    # Right answers and images in groups of log_every steps, the stage's latest groups.
    recent: list[list[int]] = field(default_factory=list)
    is_open: bool = False  # the last of `recent` is incomplete


class Run(Trainer[Packed]):
    state: StagedState
    model: weights.Model

    def __init__(
        self, config: Config, folder: Path, stream: Stream, *, resume: bool = False, overwrite: bool = False
    ) -> None:
        if not config.curriculum:
            raise ValueError("a run must have a curriculum of at least one stage")
        self.config, self.stream = config, stream
        device = find_device(config.device)
        model = weights.for_training(config, device)
        super().__init__(
            folder,
            model,
            adamw(model, config.curriculum[0].lr, config.weight_decay),
            device,
            Cadence(config.log_every, config.validate_every, config.checkpoint_every, config.checkpoint_minutes),
            seed=config.seed,
            average_decay=config.average,
            average_warms_up=True,
            initial=config.initial,
            resume=resume,
            overwrite=overwrite,
        )
        self._recipe: Recipe | None = None
        self._validation: Callable[[], list[Packed]] | None = None

    @property
    def plan(self) -> Stage:
        return self.config.curriculum[self.state.stage]

    def settings(self) -> dict[str, Any]:
        return {"config": as_dict(self.config)}

    def begin_from(self, path: Path) -> dict[str, Any]:
        model, earlier, about = weights.load(path)
        checked(path, "weights to begin with", about, "initial", "cost")
        if earlier.model != self.config.model:
            raise ValueError(f"{path} must hold the weights of model {self.config.model}; got {earlier.model}")
        if earlier.positions != self.config.positions:
            raise ValueError(
                f"{path} must hold a model with positions {self.config.positions}; got {earlier.positions}"
            )
        own = self.model.state_dict()
        loaded = model.state_dict()
        # The second head continues too, with the same classes.
        kept = "tracer.weight" in own and "tracer.weight" in loaded
        kept = kept and own["tracer.weight"].shape == loaded["tracer.weight"].shape
        found = {name: tensor for name, tensor in loaded.items() if kept or not name.startswith("tracer.")}
        if (earlier.intensity, self.config.intensity) == ("rows", "smooth"):
            rows = fitted(found.pop("embedding.weight"))
            found |= {f"embedding.{name}": tensor for name, tensor in rows.items()}
        expected = {name for name in own if kept or not name.startswith("tracer.")}
        if found.keys() != expected or any(own[name].shape != tensor.shape for name, tensor in found.items()):
            raise ValueError(
                f"{path} must hold a model of the same layers, width, intensity and registers as this run's"
            )
        self.model.load_state_dict(own | found)
        # Older weights count as one run: all runs had the same images.
        runs = 1 if about["initial"] is None else 1 + about["initial"].get("runs", 1)
        training_seed(self.config.seed, runs)
        return {"sha256": sha256(path), "runs": runs, "helped": of_model(about), **about["cost"]}

    def details(self) -> dict[str, Any]:
        values = asdict(self.state)
        return {name: value for name, value in values.items() if name not in ("step", "seconds")}

    def restored(self, progress: checkpoint.Progress) -> StagedState:
        with reading(self.folder, "the folder of a run with the state of a curriculum in its checkpoint"):
            state = StagedState(progress.step, progress.seconds, **progress.details)
            if not 0 <= state.stage <= len(self.config.curriculum):
                raise ValueError(f"the stage {state.stage}")
        return state

    def remedy(self) -> str:
        return f"lower the stage's lr, {self.plan.lr:g}"

    def train(self, pause: Pause = never) -> dict[str, Any] | None:
        """To the end of the curriculum; returns the values written beside the model, or None if the run was paused."""
        begun_at = self.state.step
        with self.session():
            while self.state.stage < len(self.config.curriculum):
                if not self._train_stage(pause):
                    return None
                self._next_stage()
                self.save()
        path = self.folder / "model.safetensors"
        if self.state.step == begun_at and weights.is_whole(path):
            return weights.beside(path)
        return self._write_model(path)

    def _train_stage(self, pause: Pause) -> bool:
        # An older run continues with the images of its beginning.
        earlier = 0 if self.before is None else self.before.get("runs", 0)
        recipe = self._recipe = recipe_of(self.config, self.state.stage, earlier)
        self._validation = self.stream.validation(recipe, self.config.validation_images)
        batches = self.stream.batches(recipe, self.state.stage_step)
        steps = steps_of(self.model, self.optimizer, recipe, self.config, self.device)
        try:
            if not self.train_stage(batches, steps, pause):
                return False
            if not self.is_validated:
                self.validate()
        finally:
            batches.close()
        return True

    def startup_ends(self) -> None:
        self.stream.waited = 0.0

    def _next_stage(self) -> None:
        self.state.stage += 1
        self.state.stage_step, self.state.stage_seconds = 0, 0.0
        self.state.recent, self.state.is_open = [], False

    def progress(self) -> float:
        if self.state.stage == len(self.config.curriculum):
            return 1.0
        return (self.state.stage + min(1.0, self.stage_progress())) / len(self.config.curriculum)

    def is_reached(self) -> bool:
        """Images are fresh, so it is a test accuracy.

        At multiples of log_every, so that pauses do not affect it.
        """
        if self.state.is_open:
            return False
        right, images = map(sum, zip(*self.state.recent)) if self.state.recent else (0, 0)
        until = self.plan.until
        return until is not None and images >= self.config.advance_images and right / images >= until

    def training_numbers(self, means: Means, seconds: float) -> Record:
        state, stage = self.state, self.plan
        state.images += means.answers
        state.tokens += means.tokens
        self._remember(int(means.right), means.answers)
        numbers = {
            "stage": state.stage, "size": stage.size, "contour": stage.contour,
            "accuracy": means.right / means.answers, "auxiliary": means.auxiliary,
            "images": state.images, "tokens": state.tokens,
            "images_per_s": means.answers / seconds, "waited": self.stream.waited / seconds,
        }  # fmt: skip
        self.stream.waited = 0.0
        return numbers

    def _remember(self, right: int, images: int) -> None:
        state = self.state
        if state.is_open:
            state.recent[-1] = [state.recent[-1][0] + right, state.recent[-1][1] + images]
        else:
            state.recent.append([right, images])
        state.is_open = state.stage_step % self.config.log_every != 0
        while not state.is_open and sum(images for _, images in state.recent[1:]) >= self.config.advance_images:
            state.recent.pop(0)

    def validate(self) -> None:
        if self._validation is None or self._recipe is None:
            raise RuntimeError("a stage makes its validation images before it validates")
        packings = self._validation()
        self._validation = lambda: packings
        with self.averaged():
            found = score(self.model, packings, self._recipe.layers, self.config, self.device)
        self.record({
            "kind": "val", "step": self.state.step, "stage": self.state.stage, "size": self.plan.size,
            "contour": self.plan.contour, "loss": found.loss, "accuracy": found.accuracy,
            "seconds": self.state.seconds,
        })  # fmt: skip

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
            "helped": of_run(self.config, self.before),
            "validation": self.log.of_kind("val")[-1],
            "device": device_name(self.device),
            "versions": versions(),
        }
        with self.averaged():
            weights.save(path, self.model, self.config, about)
        return weights.beside(path)


def saved_run(folder: Path) -> Config:
    return settings_as(folder / SETTINGS, lambda saved: from_dict(saved["config"]))
