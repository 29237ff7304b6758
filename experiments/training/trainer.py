"""The training loop: a run in a folder, from its first step or from its newest checkpoint."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Protocol

import torch
from torch import nn

from experiments.training import checkpoint, lr_schedule, run_folder, series
from experiments.training.atomic_files import write_json
from experiments.training.best_weights import BestWeights
from experiments.training.clock import Clock
from experiments.training.distributed import SINGLE, Ranks
from experiments.training.host_threads import single_host_thread
from experiments.training.run_log import Record, RunLog
from experiments.training.sharding import is_sharded
from experiments.training.steps import Batch, Steps
from experiments.training.weight_average import WeightAverage
from experiments.training.window import Means, Window

Pause = Callable[[int], bool]


def never(step: int) -> bool:
    return False


class Plan(Protocol):
    @property
    def lr(self) -> float: ...
    @property
    def schedule(self) -> str: ...
    @property
    def warmup(self) -> int: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def minutes(self) -> float | None: ...


class Shared(Protocol):
    def clear(self) -> None:
        pass


@dataclass(frozen=True)
class Cadence:
    log_every: int
    validate_every: int
    checkpoint_every: int
    checkpoint_minutes: float = math.inf


@dataclass
class State:
    step: int = 0
    seconds: float = 0.0  # without validation
    startup_seconds: float = 0.0  # until the first batch and a compiled step
    stage_step: int = 0
    stage_seconds: float = 0.0


class Trainer(ABC, Generic[Batch]):
    """A derived class sets the attributes that its methods need, then calls `__init__`."""

    shared: Shared | None = None

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        cadence: Cadence,
        *,
        seed: int,
        average_decay: float = 0.0,
        average_warms_up: bool = False,
        keeps_best: bool = False,
        initial: str | None = None,
        resume: bool = False,
        overwrite: bool = False,
        ranks: Ranks = SINGLE,
    ) -> None:
        self.folder, self.model, self.optimizer, self.device, self.cadence = folder, model, optimizer, device, cadence
        self.ranks = ranks
        self.listeners: list[Callable[[Record], None]] = []
        # It may be writing a checkpoint.
        found = ranks.on_first(lambda: checkpoint.newest(folder)) if resume else None
        self.before: dict[str, Any] | None = None
        if initial is not None:
            if found is not None:
                path = folder / run_folder.SETTINGS
                self.before = run_folder.settings_as(path, lambda saved: saved["initial"])
            else:
                self.before = self.begin_from(Path(initial))
        self.average = WeightAverage(model, average_decay, warms_up=average_warms_up) if average_decay > 0 else None
        self.best = BestWeights(model) if keeps_best else None
        ranks.seed_by_rank(seed)
        ranks.on_first(lambda: self._prepare_folder(resume, overwrite, initial))
        progress = checkpoint.Progress(0, 0.0)
        if found is not None:
            progress = checkpoint.load(found, model, optimizer, self.average, best=self.best, rank=ranks.rank)
        self.state = self.restored(progress)
        self.log = RunLog(folder / run_folder.LOG if ranks.first else None, self.state.step if resume else None)
        self.data_parallel = ranks.data_parallel(model)
        self.window = Window(device)
        self._since_saved = Clock(device)

    @property
    @abstractmethod
    def plan(self) -> Plan:
        pass

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        pass

    @abstractmethod
    def begin_from(self, path: Path) -> dict[str, Any]:
        """Returns the result's entry about them."""

    def details(self) -> dict[str, Any]:
        return {"startup_seconds": self.state.startup_seconds}

    def restored(self, progress: checkpoint.Progress) -> State:
        startup = progress.details.get("startup_seconds", 0.0)
        return State(progress.step, progress.seconds, startup, progress.step, progress.seconds)

    @abstractmethod
    def training_numbers(self, means: Means, seconds: float) -> Record:
        pass

    @abstractmethod
    def validate(self) -> None:
        pass

    def remedy(self) -> str:
        return f"lower --lr (now {self.plan.lr:g}) or raise --warmup (now {self.plan.warmup})"

    def check_resumable(self, saved: dict[str, Any]) -> None:
        return

    def is_reached(self) -> bool:
        return False

    def startup_ends(self) -> None:
        return

    @contextmanager
    def session(self) -> Iterator[None]:
        with single_host_thread(self.device):
            yield
            if self.shared is not None:
                self.shared.clear()

    def train_stage(self, batches: Iterator[Batch], steps: Steps[Batch, Any], pause: Pause) -> bool:
        state, plan, cadence = self.state, self.plan, self.cadence
        self.window = Window(self.device)
        if self._stage_progress() < 1 and not self.is_reached():
            batches = self._started(batches, steps)
        while (progress := self._stage_progress()) < 1 and not self.is_reached():
            lr = plan.lr * lr_schedule.factor(plan.schedule, state.stage_step, plan.warmup, progress)
            batch = next(batches)
            before = steps.preparing
            self.window.add(steps(batch, lr), batch.size)
            # Preparing new batch shapes is no training.
            self.state.startup_seconds += steps.preparing - before
            self.window.clock.leave_out(steps.preparing - before)
            if self.average is not None:
                self.average.update(state.step)
            state.step += 1
            state.stage_step += 1
            paused = bool(self.ranks.broadcast(pause(state.step)))
            validates = state.step % cadence.validate_every == 0
            saves = state.step % cadence.checkpoint_every == 0 or paused or self._is_overdue()
            if state.stage_step % cadence.log_every == 0 or validates or saves:
                self._close_window(lr)
            if validates:
                self.validate()
            if saves:
                self.save()
            if paused:
                return False
            if validates or saves:
                self.window = Window(self.device)
        if self.window.steps:
            self._close_window(lr)
        return True

    def _started(self, batches: Iterator[Batch], steps: Steps[Batch, Any]) -> Iterator[Batch]:
        """Time counts from the first batch and its prepared step."""
        clock = Clock(self.device)
        first = next(batches)
        steps.prepare(first)
        self.state.startup_seconds += clock.finish()
        self.startup_ends()
        self.window = Window(self.device)
        return chain([first], batches)

    def stage_progress(self) -> float:
        plan, state = self.plan, self.state
        by_step = state.stage_step / plan.steps if plan.steps is not None else 0.0
        if plan.minutes is None:
            return by_step
        return max(by_step, (state.stage_seconds + self.window.clock.elapsed()) / (60 * plan.minutes))

    def progress(self) -> float:
        return self.stage_progress()

    def _stage_progress(self) -> float:
        """Steps are equal in all processes, times are not."""
        progress = self.stage_progress()
        return progress if self.plan.minutes is None else self.ranks.broadcast(progress)

    def _is_overdue(self) -> bool:
        minutes = self.cadence.checkpoint_minutes
        return minutes < math.inf and bool(self.ranks.broadcast(self._since_saved.elapsed() >= 60 * minutes))

    def _close_window(self, lr: float) -> None:
        seconds = self.window.clock.finish()
        means = self.window.means(self.ranks)
        if not math.isfinite(means.loss):
            raise FloatingPointError(f"the loss is {means.loss} at step {self.state.step}; {self.remedy()}")
        self.state.seconds += seconds
        self.state.stage_seconds += seconds
        self.record(self._training_record(means, seconds, lr) | self.training_numbers(means, seconds))
        self.window = Window(self.device)

    def _training_record(self, means: Means, seconds: float, lr: float) -> Record:
        return {
            "kind": "train",
            "step": self.state.step,
            "loss": means.loss,
            "lr": lr,
            "tokens_per_s": means.tokens / seconds,
            "seconds": self.state.seconds,
            "startup_seconds": self.state.startup_seconds,
        }

    @property
    def is_validated(self) -> bool:
        validated = self.log.of_kind("val")
        return bool(validated) and validated[-1]["step"] == self.state.step

    def record(self, record: Record) -> None:
        self.log.write(record)
        if self.ranks.first:
            for listener in self.listeners:
                listener(record)

    def averaged(self) -> AbstractContextManager[None]:
        return self.average.in_place() if self.average is not None else nullcontext()

    def save(self) -> None:
        random = self.ranks.gather(checkpoint.random_state(self.device))
        saved = self.model, self.optimizer, self.average, random
        tensors = checkpoint.collected(*saved, self.best) if is_sharded(self.model) else None
        if self.ranks.first:
            progress = checkpoint.Progress(self.state.step, self.state.seconds, self.details())
            checkpoint.save(self.folder, progress, *saved, best=self.best, tensors=tensors)
        self._since_saved = Clock(self.device)

    def _prepare_folder(self, resume: bool, overwrite: bool, initial: str | None) -> None:
        path = self.folder / run_folder.SETTINGS
        settings = self.settings()
        if resume:
            self.check_resumable(run_folder.saved_settings(path))
        else:
            series.check_none(self.folder)
            run_folder.check_replaceable(self.folder, overwrite=overwrite, initial=initial)
            run_folder.discard(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {**settings, "initial": self.before})
