"""The supervision of a model beside the answers, in its run or in earlier ones.

In model files its key is "helped".
"""

from __future__ import annotations

from typing import Any

from experiments.pathx.config import Config

# "labels": weight of pixel labels; "hidden": share of hidden pixels; None: unknown.
Supervision = dict[str, float | None]


def of_run(config: Config, before: dict[str, Any] | None) -> Supervision:
    own = {"labels": 0.0 if config.hidden else config.auxiliary, "hidden": config.hidden}
    return own if before is None else {name: largest(value, _earlier(before)[name]) for name, value in own.items()}


def of_model(about: dict[str, Any]) -> Supervision:
    if "helped" in about:
        found: Supervision = about["helped"]
        return found
    # Older files have only their own labels' weight.
    earlier = 0.0 if about.get("initial") is None else _earlier(about["initial"])["labels"]
    return {"labels": largest(about["auxiliary"], earlier), "hidden": 0.0}


def _earlier(before: dict[str, Any]) -> Supervision:
    found: Supervision = before.get("helped", {"labels": None, "hidden": 0.0})
    return found


def largest(value: float, earlier: float | None) -> float | None:
    return max(value, earlier) if earlier is not None else value or None


def described(supervision: Supervision) -> str:
    """Empty for none.

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
