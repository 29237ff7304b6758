"""What a model has learned from beside the answers, in its own run or in those that it began from.

Every result says it; files of models have it under the name "helped".
"""

from __future__ import annotations

from typing import Any

from experiments.pathx.config import Config

# "labels": the weight of the pixel labels; "hidden": the share of the pixels to be named; None: it is not known.
Supervision = dict[str, float | None]


def of_run(config: Config, before: dict[str, Any] | None) -> Supervision:
    """That of a run and of the runs before it: the largest weight and share of them all."""
    own = {"labels": 0.0 if config.hidden else config.auxiliary, "hidden": config.hidden}
    return own if before is None else {name: largest(value, _earlier(before)[name]) for name, value in own.items()}


def of_model(about: dict[str, Any]) -> Supervision:
    """That of a model, from what is written of it."""
    if "helped" in about:
        found: Supervision = about["helped"]
        return found
    # Older files have the weight of their own labels alone; the runs before them had nothing else.
    earlier = 0.0 if about.get("initial") is None else _earlier(about["initial"])["labels"]
    return {"labels": largest(about["auxiliary"], earlier), "hidden": 0.0}


def _earlier(before: dict[str, Any]) -> Supervision:
    """That of the runs before a run, from what it has stored of them."""
    found: Supervision = before.get("helped", {"labels": None, "hidden": 0.0})
    return found


def largest(value: float, earlier: float | None) -> float | None:
    """The larger one; None where that cannot be known, as an unknown value may be more than 0."""
    return max(value, earlier) if earlier is not None else value or None


def described(supervision: Supervision) -> str:
    """In words, empty where there was none.

    >>> described({"labels": 0.5, "hidden": 0.15})
    'pixel labels (weight 0.5), 15 % of the pixels hidden and named'
    """
    labels = supervision["labels"]
    parts = ["perhaps pixel labels (of an earlier run, which does not say)"] if labels is None else []
    if labels:
        parts.append(f"pixel labels (weight {labels:g})")
    if supervision["hidden"]:
        parts.append(f"{100 * supervision['hidden']:g} % of the pixels hidden and named")
    return ", ".join(parts)
