"""What test_lra_context_parallel.py starts in several processes by torchrun: runs that share the tokens of sequences.

Each process leaves what it saw in <out>/process<rank>.json and its last weights in <out>/process<rank>.pt.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from experiments.lra.config import Config
from experiments.lra.losses import objective_of
from experiments.lra.tasks import load
from experiments.lra.train import Run
from experiments.training.distributed import process_group
from experiments.training.steps import compute_gradients
from lra_distributed_runs import waiting_threads

# Keys are normalised as in lra_distributed_runs.py.
TINY = Config(
    mask="butterfly", block=16, window=16, depth=2, width=32, heads=2, mlp=32, dropout=0.0, average=0.9, batch=8,
    max_tokens=60, pool="mean+max", qk_norm=True, lr=3e-3, warmup=5, steps=30, eval_every=15, checkpoint_every=100,
    log_every=1, device="cpu",
)  # fmt: skip
# Each with a path of its own through the model: how positions reach tokens, what is read of them, what is left out.
KINDS = {
    "nested": replace(TINY, positions="nested", pool="cls", mask="local", steps=6, eval_every=6),
    "denoised": replace(TINY, positions="rotary", objective="denoise", mask="dense", steps=6, eval_every=6),
    "pixels": replace(
        TINY, task="pathfinder32", auxiliary=0.5, positions="rotary2d", background="drop", max_tokens=None, block=32,
        mask="local", window=64, batch=4, steps=4, eval_every=4,
    ),
    "filled": replace(
        TINY, task="pathfinder32", max_tokens=256, block=32, mask="butterfly", pool="mean", batch=4, steps=4,
        eval_every=4, positions="sinusoidal",
    ),
}  # fmt: skip
DROPPING = replace(TINY, dropout=0.2, steps=5)


def data_of(config, folders):
    return load(config.task, folders[config.task])


def first_gradients(run: Run) -> dict[str, torch.Tensor]:
    """The gradients of the run's first step, of all its processes together."""
    batch = next(run._batches())
    compute_gradients(run.data_parallel, replace(objective_of(run.config, run.device), clip=0.0), batch)
    found = {name: parameter.grad for name, parameter in run.model.named_parameters()}
    run.model.zero_grad(set_to_none=True)
    return found


def main(out: Path, context: int, folders: dict[str, Path]) -> None:
    with process_group("cpu", context) as ranks:
        shared = {"context_parallel": context}
        seen: dict[str, object] = {}

        run = Run(replace(TINY, **shared), data_of(TINY, folders), out / "plain", ranks=ranks)
        seen["rows"] = run.order.rows(0).tolist()
        torch.save(first_gradients(run), out / f"gradients{ranks.rank}.pt")
        metrics = run.train()
        assert metrics is not None
        seen |= {"loss": metrics["test_loss"], "examples": metrics["test_examples"], "processes": metrics["processes"]}
        torch.save(run.model.state_dict(), out / f"process{ranks.rank}.pt")

        if ranks.count == context:
            for name, config in KINDS.items():
                Run(replace(config, **shared), data_of(config, folders), out / name, ranks=ranks).train()
            half = Run(replace(TINY, **shared), data_of(TINY, folders), out / "half", ranks=ranks)
            half.train(pause=lambda step: step == 20)
            dropping, data = replace(DROPPING, **shared), data_of(TINY, folders)
            whole = Run(dropping, data, out / "whole", ranks=ranks)
            whole.train()
            Run(dropping, data, out / "parts", ranks=ranks).train(pause=lambda step: ranks.first and step == 3)
            torch.manual_seed(99)  # whatever happens in between
            parts = Run(dropping, data, out / "parts", resume=True, ranks=ranks)
            seen["resumed_at"] = parts.state.step
            parts.train()
            first, second = (each.model.state_dict().values() for each in (whole, parts))
            seen["same_bits"] = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            seen["random"] = torch.rand(1).item()
            try:
                Run(TINY, data_of(TINY, folders), out / "other", ranks=ranks)
            except ValueError as error:
                seen["other"] = str(error)
        else:
            try:
                Run(replace(TINY, batch=7, **shared), data_of(TINY, folders), out / "seven", ranks=ranks)
            except ValueError as error:
                seen["batch"] = str(error)
        (out / f"process{ranks.rank}.json").write_text(json.dumps(seen))
    assert len(waiting_threads()) <= 2, waiting_threads()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), {name: Path(path) for name, path in json.loads(sys.argv[3]).items()})
