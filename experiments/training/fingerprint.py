"""Hashes that tell files and data apart, and the checks that a run sees the data that it should see."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def sha256(*paths: Path) -> str:
    """The SHA-256 of a file, or of several one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())  # a few MB
    return digest.hexdigest()


def check_same_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError where a run is to go on with other data than it began with.

    saved, now: with "examples", the number of examples of each split; "folder"; "origin" and "hash", as in
        `check_disjoint`.
    """
    if saved["examples"] != now["examples"]:
        raise ValueError(
            f"a resumed run must see the same data: it began with {saved['examples']} examples (train, val, "
            f"test) from {saved['folder']}; got {now['examples']}"
        )
    if saved.get("hash", now["hash"]) != now["hash"]:  # runs from before hashes were saved have none
        raise ValueError(
            f"a resumed run must see the same data: it began with {saved['origin']}, from {saved['folder']}; those in "
            f"{now['folder']} ({now['origin']}) are others"
        )


def check_disjoint(path: object, seen: Sequence[Mapping[str, str]] | None, here: Mapping[str, str]) -> None:
    """Raises ValueError where weights have seen other splits of the examples that they are to be tested on.

    seen: the fingerprints of all data that the weights of `path` were trained on; None for weights from before
        fingerprints were saved, of which nothing is known.
    here: the fingerprint of the data of the test. Data of one "origin" may share examples; of one "hash", they are the
        same examples in the same splits.
    """
    for there in seen or ():
        if there["origin"] == here["origin"] and there["hash"] != here["hash"]:
            raise ValueError(
                f"{path} was trained on another split of the same examples ({here['origin']}), and may have seen what "
                "it is to be tested on; take the same split and number of examples, or data of another seed or origin"
            )
