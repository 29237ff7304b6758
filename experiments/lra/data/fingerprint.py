from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from experiments.lra.data.examples import Examples
from experiments.lra.tasks.task import Data

_READ = 64  # of each split; all of Path-X would be 2.6 GB


def fingerprint(data: Data) -> dict[str, str]:
    """The origin of the examples, and a hash of the splits. Splits with equal origins may share examples."""
    return {"origin": data.origin, "hash": splits_hash(data)}


def splits_hash(data: Data) -> str:
    digest = blake2b(data.task.name.encode(), digest_size=8)
    for split in (data.train, data.val, data.test):
        update(digest, split)
    return digest.hexdigest()


def update(digest: blake2b, split: Examples) -> None:
    digest.update(np.ascontiguousarray(split.labels))
    digest.update(np.ascontiguousarray(split.ends - split.begins))
    for example in np.linspace(0, len(split) - 1, min(_READ, len(split)), dtype=np.int64):
        for tower in range(split.towers):
            digest.update(np.ascontiguousarray(split.sequence(example, tower)))


def described(data: Data) -> dict[str, Any]:
    examples = [len(split) for split in (data.train, data.val, data.test)]
    return {**fingerprint(data), "examples": examples, "folder": str(data.folder), "generated": data.generated}
