"""A finished run tested on texts that neither trained it nor chose its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from experiments.lm import evaluate, probe
from experiments.lm.data.store import Store
from experiments.lm.data.tokenizer import FILE
from experiments.lm.sample import opened
from experiments.training import tensor_files
from experiments.training.atomic_files import write_json
from experiments.training.distributed import SINGLE
from experiments.training.environment import command_line, device_name, versions
from experiments.training.fingerprint import sha256

PART_TOKENS = 65_536  # of a forward


def test(
    run: Path, store: Store, device: torch.device, *, tokens: int, examples: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Plain values for a JSON file. tokens: at most, for the loss. examples: places of the probe at each distance; 0:
    no probe.
    """
    if store.test is None:
        raise ValueError(f"{store.folder} must have texts for testing, as `corpus --books` gives; it has none")
    model, config, tokenizer = opened(run, device)
    own, its = (folder / FILE for folder in (tensor_files.folder_of(run), store.folder))
    if own.is_file() != its.is_file() or (own.is_file() and own.read_bytes() != its.read_bytes()):
        raise ValueError(f"{run} must hold a model of the tokens in {store.folder}; its vocabulary differs")
    part, config = store.test, replace(config, validation_tokens=tokens)
    losses = evaluate.losses(model, part, config, device, SINGLE, None, max(1, PART_TOKENS // config.context))
    evaluate.write_positions(tensor_files.folder_of(run) / "test-positions.csv", losses)
    say(f"loss {losses.mean:.4f} on {losses.tokens:,} tokens of other authors")
    far = []
    if examples:
        far = probe.measured(model, part, tokenizer, config.context, examples=examples, say=say)
    return {
        "test_loss": losses.mean,
        "test_tokens": losses.tokens,
        "by_position": losses.by_position(),
        "probe": [asdict(each) for each in far],
        "pattern": config.pattern,
        "context": config.context,
        "data": store.about["hash"],
        "weights": sha256(*tensor_files.files(run)),
        "command": command_line("experiments.lm"),
        "device": device_name(device),
        "versions": versions(),
    }


def write(run: Path, found: dict[str, Any]) -> Path:
    path = tensor_files.folder_of(run) / "test.json"
    write_json(path, found)
    return path
