from __future__ import annotations

from collections.abc import Collection

from experiments.lra.config import GENERATOR, Config


def check_used(config: Config, chosen: Collection[str], *, masks: Collection[str], given_data: bool) -> None:
    path = config.task.startswith("pathfinder")
    made = config.task == "listops" and not given_data
    idle = {
        "window": (all(name != "local" for name in masks), f"is for --mask local; the mask is {config.mask}"),
        "hidden": (config.objective != "denoise", f"is for --objective denoise; it is {config.objective}"),
        "difficulty": (not path, f"is for Pathfinder; the task is {config.task}"),
        "split": (not path, f"is for Pathfinder; the task is {config.task}"),
        **{
            name: (not made, "says what to generate for ListOps; with --data, or another task, nothing is generated")
            for name in GENERATOR
        },
    }
    for name in chosen:
        idles, why = idle.get(name, (False, ""))
        if idles:
            raise ValueError(f"--{name.replace('_', '-')} {why}: leave it out")
