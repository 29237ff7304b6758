"""What test_lm_train.py runs in two processes: a run with whole weights, and one with divided ones.

Each is also paused and resumed. The first process writes what came out to <out>/found.json.
"""

import json
from pathlib import Path

from experiments.lm.data.store import opened
from experiments.lm.train import Run
from experiments.training.distributed import process_group
from lm_models import tiny


def whole_and_divided(data: Path, out: Path) -> None:
    found = {}
    with process_group("cpu") as ranks:
        for sharding in ("ddp", "fsdp"):
            config, store = tiny(sharding=sharding), opened(data)
            run = Run(config, store, out / sharding, ranks=ranks)
            shares = [type(parameter).__name__ for parameter in run.model.parameters()]
            whole = run.train()
            Run(config, store, out / f"{sharding}-parts", ranks=ranks).train(pause=lambda step: step == 3)
            resumed = Run(config, store, out / f"{sharding}-parts", resume=True, ranks=ranks)
            begun = resumed.state.step
            parts = resumed.train()
            if ranks.first:
                found[sharding] = {
                    "loss": whole["val_loss"], "resumed": parts["val_loss"], "at": begun, "kinds": sorted({*shares}),
                    "processes": whole["processes"],
                }  # fmt: skip
        if ranks.first:
            (out / "found.json").write_text(json.dumps(found))
