"""Which data a run has seen: what is compared when it is resumed, when its results are put together with others', and
when another run begins with its weights."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from experiments.lra.cache import Examples
from experiments.lra.tasks.task import Data

_READ = 64  # examples of each split whose symbols are hashed: all of Path-X would be 2.6 GB


def identity(data: Data) -> dict[str, str]:
    """Where the examples come from, and a hash of the three splits as they are dealt out.

    Splits of one origin can share examples in all ways; of one hash they are the same.
    """
    return {"origin": data.origin, "hash": splits_hash(data)}


def splits_hash(data: Data) -> str:
    """A hash of all labels and lengths of the three splits, and of the symbols of some of their examples."""
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


def check_apart(path: object, there: Mapping[str, Any] | None, here: Mapping[str, Any]) -> None:
    """Raises ValueError where weights have seen other splits of the examples that a run is to be tested on.

    there: the identity of the data of the weights; None, of those from before it was kept, says nothing.
    """
    if there is not None and there["origin"] == here["origin"] and there["hash"] != here["hash"]:
        raise ValueError(
            f"{path} was trained on another split of the same examples ({here['origin']}), so what this run tests may "
            "have been trained on; begin with weights of the same split and number of examples, or of other data"
        )
