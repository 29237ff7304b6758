"""Runs of experiments.lm in several processes, paused and resumed; the first writes <out>/found.json."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from experiments.lm.cli import app
from experiments.lm.config import Config
from experiments.lm.data.store import Store, opened
from experiments.lm.train import Run
from experiments.training.distributed import Ranks, process_group
from experiments.training.sharding import whole
from tests.experiments.lm.models import tiny
from tests.processes.rank_runs import refused, waiting_threads

KINDS = {
    "plain": {"pattern": "local|butterfly", "log_every": 1, "steps": 6},
    "divided": {"sharding": "fsdp", "pattern": "local,dense", "recompute": True, "steps": 4},
    "documents": {
        "documents": "separate", "pattern": "local,dense", "positions": "learned", "micro_tokens": 64, "steps": 4,
    },
    "uneven": {"context": 80, "batch_tokens": 160, "pattern": "local/dense", "validation_tokens": 160, "steps": 4},
}  # fmt: skip


def whole_and_divided(data: Path, out: Path) -> None:
    found = {}
    with process_group("cpu") as ranks:
        for sharding in ("ddp", "fsdp"):
            found[sharding] = trained(tiny(sharding=sharding), opened(data), out / sharding, ranks)
        leave(found, out, ranks)


def sharing_sequences(data: Path, out: Path, context: int) -> None:
    found: dict[str, object] = {}
    with process_group("cpu", context) as ranks:
        store = opened(data)
        for name, changes in KINDS.items():
            if ranks.count == context or name == "plain":
                found[name] = trained(tiny(**changes, context_parallel=context), store, out / name, ranks)
        if ranks.count == context:
            Run(tiny(**KINDS["plain"], context_parallel=context), store, out / "half", ranks=ranks).train(
                pause=lambda step: step == 4
            )
        found["other"] = refused(lambda: Run(tiny(), store, out / "other", ranks=ranks))
        one = tiny(batch_tokens=64, context_parallel=context)
        if ranks.data_parallel_ranks > 1:
            found["batch"] = refused(lambda: Run(one, store, out / "one", ranks=ranks))
        leave(found, out, ranks)
    assert len(waiting_threads()) <= 2, waiting_threads()


def command(words: list[str]) -> None:
    app(words, standalone_mode=False)


def trained(config: Config, store: Store, folder: Path, ranks: Ranks) -> dict[str, object]:
    run = Run(config, store, folder, ranks=ranks)
    kinds = {type(parameter).__name__ for parameter in run.model.parameters()}
    torch.save(first_gradients(run), folder / f"gradients{ranks.rank}.pt")
    metrics = run.train()
    parts = folder.with_name(f"{folder.name}-parts")
    Run(config, store, parts, ranks=ranks).train(pause=lambda step: step == 3)
    resumed = Run(config, store, parts, resume=True, ranks=ranks)
    begun = resumed.state.step
    again = resumed.train()
    return {
        "loss": metrics["val_loss"], "resumed": again["val_loss"], "at": begun, "kinds": sorted(kinds),
        "processes": metrics["processes"],
    }  # fmt: skip


def first_gradients(run: Run) -> dict[str, torch.Tensor]:
    steps = run._steps()
    steps.objective = replace(steps.objective, clip=0.0)
    steps.gradients(next(run._batches()))
    found = {name: whole(parameter.grad).clone() for name, parameter in run.model.named_parameters()}
    run.model.zero_grad(set_to_none=True)
    return found


def leave(found: dict[str, object], out: Path, ranks: Ranks) -> None:
    if ranks.first:
        (out / "found.json").write_text(json.dumps(found))
