"""What test_lra_distributed.py starts in several processes by torchrun: runs in which all take part.

Each process leaves what it saw in <out>/process<rank>.json and its last weights in <out>/process<rank>.pt.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from experiments.lra.config import Config
from experiments.lra.tasks import load
from experiments.lra.train import Run
from experiments.training.distributed import process_group

# Without a norm, keys have a bias that no score depends on: its gradient is rounding alone, which Adam blows up.
TINY = Config(
    mask="butterfly", block=16, window=16, depth=1, width=16, heads=1, mlp=16, dropout=0.0, average=0.9, batch=8,
    max_tokens=40, qk_norm=True, lr=3e-3, warmup=2, steps=6, eval_every=4, checkpoint_every=100, log_every=2,
    device="cpu",
)  # fmt: skip
DROPPING = replace(TINY, dropout=0.2, attention_dropout=0.2, steps=5, minutes=1000.0, schedule="constant")


def main(data_folder: Path, out: Path) -> None:
    with process_group("cpu") as ranks:
        data = ranks.first_before_others(lambda: load("listops", data_folder))
        seen: dict[str, object] = {"count": ranks.count, "rank": ranks.rank}

        run = Run(TINY, data, out / "plain", ranks=ranks)
        seen["rows"] = [run.order.rows(step).tolist() for step in range(3)]
        metrics = run.train()
        assert metrics is not None
        seen |= {"loss": metrics["test_loss"], "examples": metrics["test_examples"], "processes": metrics["processes"]}
        torch.save(run.model.state_dict(), out / f"process{ranks.rank}.pt")

        Run(TINY, data, out / "half", ranks=ranks).train(pause=lambda step: step == 3)
        whole = Run(DROPPING, data, out / "whole", ranks=ranks)
        whole.train()
        # Only the first process's clock counts, and it alone is asked here.
        Run(DROPPING, data, out / "parts", ranks=ranks).train(pause=lambda step: ranks.first and step == 3)
        torch.manual_seed(99)  # whatever happens in between
        parts = Run(DROPPING, data, out / "parts", resume=True, ranks=ranks)
        seen["resumed_at"] = parts.state.step
        parts.train()
        first, second = (each.model.state_dict().values() for each in (whole, parts))
        seen["same_bits"] = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        seen["random"] = torch.rand(1).item()

        for name, attempt in (
            ("batch", lambda: Run(replace(TINY, batch=7), data, out / "seven", ranks=ranks)),
            ("held", lambda: Run(TINY, data, out / "plain", ranks=ranks)),
        ):
            try:
                attempt()
            except (ValueError, FileExistsError) as error:
                seen[name] = f"{type(error).__name__}: {error}"
        (out / f"process{ranks.rank}.json").write_text(json.dumps(seen))
    assert len(waiting_threads()) <= 2, waiting_threads()  # of the group that the runs above still train with


def waiting_threads() -> list[str]:
    """Those of Gloo's process groups."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name == "pt_gloo_runloop"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
