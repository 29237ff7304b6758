"""What helped a model beside the answers, in its own run or in one that it began from: every result says it."""

from __future__ import annotations

from typing import Any

from experiments.pathx.config import Config

Helped = dict[str, float]  # "labels": the weight of the pixel labels; "hidden": the share of the pixels to be named


def helped_by(config: Config, before: dict[str, Any] | None) -> Helped:
    """Of a run, and of what is known of the runs before it."""
    own = {"labels": 0.0 if config.hidden else config.auxiliary, "hidden": config.hidden}
    earlier = {} if before is None else before.get("helped", {})
    return {name: max(value, earlier.get(name, 0.0)) for name, value in own.items()}


def helped_of(about: dict[str, Any]) -> Helped:
    """Of what is written of a model; before there was more, it was the weight alone."""
    found: Helped = about.get("helped", {"labels": about["auxiliary"], "hidden": 0.0})
    return found


def told(helped: Helped) -> str:
    """For people, empty where nothing helped.

    >>> told({"labels": 0.5, "hidden": 0.15})
    'pixel labels (weight 0.5), 15 % of the pixels hidden and named'
    """
    parts = [f"pixel labels (weight {helped['labels']:g})"] if helped["labels"] else []
    if helped["hidden"]:
        parts.append(f"{100 * helped['hidden']:g} % of the pixels hidden and named")
    return ", ".join(parts)
