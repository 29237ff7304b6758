"""Runs of experiments.lra in several processes, for its tests."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from experiments.lra.config import Config
from experiments.lra.losses import objective_of
from experiments.lra.tasks import Data, load
from experiments.lra.train import Run
from experiments.training.distributed import Ranks, process_group
from experiments.training.steps import compute_gradients
from sparseflash import distributed, masks
from tests.processes.rank_runs import refused, waiting_threads

# Without a norm, the gradient of the keys' bias is rounding alone, which Adam amplifies.
TINY = Config(
    mask="butterfly", block=16, window=16, depth=1, width=16, heads=1, mlp=16, dropout=0.0, average=0.9, batch=8,
    max_tokens=40, qk_norm=True, lr=3e-3, warmup=2, steps=6, eval_every=4, checkpoint_every=100, log_every=2,
    device="cpu",
)  # fmt: skip
DROPPING = replace(TINY, dropout=0.2, attention_dropout=0.2, steps=5, minutes=1000.0, schedule="constant")

SHARED = replace(
    TINY, depth=2, width=32, heads=2, mlp=32, max_tokens=60, pool="mean+max", warmup=5, steps=30, eval_every=15,
    log_every=1,
)  # fmt: skip
KINDS = {
    "nested": replace(SHARED, positions="nested", pool="cls", mask="local", steps=6, eval_every=6),
    "denoised": replace(SHARED, positions="rotary", objective="denoise", mask="dense", steps=6, eval_every=6),
    "pixels": replace(
        SHARED, task="pathfinder32", auxiliary=0.5, positions="rotary2d", background="drop", max_tokens=None, block=32,
        mask="local", window=64, batch=4, steps=4, eval_every=4,
    ),
    "filled": replace(
        SHARED, task="pathfinder32", max_tokens=256, block=32, mask="butterfly", pool="mean", batch=4, steps=4,
        eval_every=4, positions="sinusoidal",
    ),
    "dropped weights": replace(SHARED, attention_dropout=0.3, steps=8, eval_every=8),
}  # fmt: skip
SHARED_DROPPING = replace(SHARED, dropout=0.2, attention_dropout=0.2, steps=5)


def sharing_batches(data_folder: Path, out: Path) -> None:
    with process_group("cpu") as ranks:
        data = ranks.first_before_others(lambda: load("listops", data_folder))
        run = Run(TINY, data, out / "plain", ranks=ranks)
        seen: dict[str, object] = {"count": ranks.count, "rank": ranks.rank}
        seen["rows"] = [run.order.rows(step).tolist() for step in range(3)]
        seen |= trained(run, out)
        Run(TINY, data, out / "half", ranks=ranks).train(pause=lambda step: step == 3)
        seen |= paused_and_not(DROPPING, data, out, ranks)
        seen["batch"] = refused(lambda: Run(replace(TINY, batch=7), data, out / "seven", ranks=ranks))
        seen["held"] = refused(lambda: Run(TINY, data, out / "plain", ranks=ranks))
        leave(seen, out, ranks)
    assert len(waiting_threads()) <= 2, waiting_threads()


def sharing_sequences(out: Path, context: int, folders: dict[str, Path]) -> None:
    with process_group("cpu", context) as ranks:
        shared = replace(SHARED, context_parallel=context)
        data = data_of(shared, folders)
        run = Run(shared, data, out / "plain", ranks=ranks)
        seen: dict[str, object] = {"rows": run.order.rows(0).tolist()}
        torch.save(first_gradients(run), out / f"gradients{ranks.rank}.pt")
        seen["kept"] = kept_weights(run)
        seen |= trained(run, out)
        if ranks.count == context:
            for name, kind in KINDS.items():
                config = replace(kind, context_parallel=context)
                Run(config, data_of(config, folders), out / name, ranks=ranks).train()
            Run(shared, data, out / "half", ranks=ranks).train(pause=lambda step: step == 20)
            seen |= paused_and_not(replace(SHARED_DROPPING, context_parallel=context), data, out, ranks)
            seen["other"] = refused(lambda: Run(SHARED, data, out / "other", ranks=ranks))
        else:
            seen["batch"] = refused(lambda: Run(replace(shared, batch=7), data, out / "seven", ranks=ranks))
        leave(seen, out, ranks)
    assert len(waiting_threads()) <= 2, waiting_threads()


def data_of(config: Config, folders: dict[str, Path]) -> Data:
    return load(config.task, folders[config.task])


def first_gradients(run: Run) -> dict[str, torch.Tensor]:
    batch = next(run._batches())
    compute_gradients(run.data_parallel, replace(objective_of(run.config, run.device), clip=0.0), batch)
    found = {name: parameter.grad for name, parameter in run.model.named_parameters()}
    run.model.zero_grad(set_to_none=True)
    return found


def kept_weights(run: Run) -> list[int]:
    with torch.random.fork_rng():
        plan = distributed.shard(masks.dense(48, block=16), run.ranks.mesh["cp"])
        zeros = plan.scatter(torch.zeros(1, 1, 48, 16))
        weights = distributed.attention(zeros, zeros, plan.scatter(torch.eye(48)[None, None]), plan, dropout_p=0.5)
        kept: list[int] = (plan.gather(weights) > 0).sum(-1).flatten().tolist()
    return kept


def trained(run: Run, out: Path) -> dict[str, object]:
    metrics = run.train()
    assert metrics is not None
    torch.save(run.model.state_dict(), out / f"process{run.ranks.rank}.pt")
    return {"loss": metrics["test_loss"], "examples": metrics["test_examples"], "processes": metrics["processes"]}


def paused_and_not(config: Config, data: Data, out: Path, ranks: Ranks) -> dict[str, object]:
    whole = Run(config, data, out / "whole", ranks=ranks)
    whole.train()
    Run(config, data, out / "parts", ranks=ranks).train(pause=lambda step: ranks.first and step == 3)
    torch.manual_seed(99)
    parts = Run(config, data, out / "parts", resume=True, ranks=ranks)
    resumed_at = parts.state.step
    parts.train()
    first, second = (each.model.state_dict().values() for each in (whole, parts))
    same_bits = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return {"resumed_at": resumed_at, "same_bits": same_bits, "random": torch.rand(1).item()}


def leave(seen: dict[str, object], out: Path, ranks: Ranks) -> None:
    (out / f"process{ranks.rank}.json").write_text(json.dumps(seen))
