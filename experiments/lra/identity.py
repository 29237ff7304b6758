"""Which data a run has seen: what is compared when it is resumed, when its results are put together with others', and
when another run begins with its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def described(data: Data) -> dict[str, Any]:
    """The identity, and what people want to read beside it."""
    examples = [len(split) for split in (data.train, data.val, data.test)]
    return {**identity(data), "examples": examples, "folder": str(data.folder), "generated": data.generated}


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError where a run is to go on with other data than it began with; both as `described` has them."""
    if saved["examples"] != now["examples"]:
        raise ValueError(
            f"a resumed run must see the same data: it began with {saved['examples']} examples (train, val, "
            f"test) from {saved['folder']}; got {now['examples']}"
        )
    if saved.get("hash", now["hash"]) != now["hash"]:  # of a run from before it was kept nothing is known
        raise ValueError(
            f"a resumed run must see the same data: it began with {saved['origin']}, from {saved['folder']}; those in "
            f"{now['folder']} ({now['origin']}) are others"
        )


def check_apart(path: object, seen: Sequence[Mapping[str, str]] | None, here: Mapping[str, str]) -> None:
    """Raises ValueError where weights have seen other splits of the examples that they are to be tested on.

    seen: the identities of all data that they were trained on; None, of weights from before it was kept, says nothing.
    """
    for there in seen or ():
        if there["origin"] == here["origin"] and there["hash"] != here["hash"]:
            raise ValueError(
                f"{path} was trained on another split of the same examples ({here['origin']}), and may have seen what "
                "it is to be tested on; take the same split and number of examples, or data of another seed or origin"
            )
