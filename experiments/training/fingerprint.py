from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def sha256(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_same_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if saved["examples"] != now["examples"]:
        raise ValueError(
            f"a resumed run must see the same data: it began with {saved['examples']} examples (train, val, "
            f"test) from {saved['folder']}; got {now['examples']}"
        )
    if saved.get("hash", now["hash"]) != now["hash"]:
        raise ValueError(
            f"a resumed run must see the same data: it began with {saved['origin']}, from {saved['folder']}; those in "
            f"{now['folder']} ({now['origin']}) are others"
        )


def check_disjoint(path: object, seen: Sequence[Mapping[str, str]] | None, here: Mapping[str, str]) -> None:
    """seen: fingerprints of the training data of the weights in `path`; None for older weights. Data with equal
    "origin" may share examples; with equal "hash", splits are equal.
    """
    for there in seen or ():
        if there["origin"] == here["origin"] and there["hash"] != here["hash"]:
            raise ValueError(
                f"{path} was trained on another split of the same examples ({here['origin']}), and may have seen what "
                "it is to be tested on; take the same split and number of examples, or data of another seed or origin"
            )
