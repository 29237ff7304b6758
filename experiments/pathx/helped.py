"""What helped a model beside the answers, in its own run or in one that it began from: every result says it."""

from __future__ import annotations

from typing import Any

from experiments.pathx.config import Config

# "labels": the weight of the pixel labels; "hidden": the share of the pixels to be named; None: it is not known.
Helped = dict[str, float | None]


def helped_by(config: Config, before: dict[str, Any] | None) -> Helped:
    """Of a run, and of the runs before it: the most of each."""
    own = {"labels": 0.0 if config.hidden else config.auxiliary, "hidden": config.hidden}
    return own if before is None else {name: most(value, _earlier(before)[name]) for name, value in own.items()}


def helped_of(about: dict[str, Any]) -> Helped:
    """Of what is written of a model."""
    if "helped" in about:
        found: Helped = about["helped"]
        return found
    # From before this was written: the weight of its own labels, and the runs before it had nothing else.
    earlier = 0.0 if about.get("initial") is None else _earlier(about["initial"])["labels"]
    return {"labels": most(about["auxiliary"], earlier), "hidden": 0.0}


def _earlier(before: dict[str, Any]) -> Helped:
    """Of what a run keeps of those before it."""
    found: Helped = before.get("helped", {"labels": None, "hidden": 0.0})
    return found


def most(value: float, earlier: float | None) -> float | None:
    """The greater one. What is not known may be more than nothing; beside something it is left out."""
    return max(value, earlier) if earlier is not None else value or None


def told(helped: Helped) -> str:
    """For people, empty where nothing helped.

    >>> told({"labels": 0.5, "hidden": 0.15})
    'pixel labels (weight 0.5), 15 % of the pixels hidden and named'
    """
    labels = helped["labels"]
    parts = ["perhaps pixel labels (of an earlier run, which does not say)"] if labels is None else []
    if labels:
        parts.append(f"pixel labels (weight {labels:g})")
    if helped["hidden"]:
        parts.append(f"{100 * helped['hidden']:g} % of the pixels hidden and named")
    return ", ".join(parts)
