"""Curricula by name. Minutes are those of one H100; those of a headline result add up to 60 at most.

An easier stage ends early when its accuracy is reached, and the remaining minutes are not used; the cost of a result is
that of its log. 64 pixels with 14 dashes are left out, because these images cost the generator more than those of
Path-X (README.md) and teach less.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.pathx.config import Stage, curriculum_from

_K = 1024
_LR = 1e-3


def _stage(size: int, contour: int, **more: Any) -> Stage:
    return Stage(**{"size": size, "contour": contour, "tokens": 128 * _K, "lr": _LR, "warmup": 50, **more})


# Short paths first, then larger images, then longer paths. Dashes have 5 pixels from 64 pixels on, but gaps double from
# 64 to 128: so the size changes while paths are short. Nothing was learned from 264,000 images of 32 pixels, whose
# dashes have 2 pixels; and a stage that ends before anything is learned does not help the next one
# (results/tried/pathx.md). Steps have the same length in all stages, so that everything is compiled only once.
_BEGINNING = (
    _stage(64, 6, minutes=4.0, until=0.94, warmup=200),
    _stage(128, 6, minutes=4.0, until=0.94),
)

CURRICULA: dict[str, tuple[Stage, ...]] = {
    # A check that everything works, for a small model on a CPU; README.md has the command.
    "smoke": (_stage(32, 6, tokens=3 * _K, steps=1600, schedule="cosine", lr=2e-3),),
    # Path-X: 128 pixels, 14 dashes. A last stage of 14 alone forgets the shorter paths.
    "pathx": (
        *_BEGINNING,
        _stage(128, 9, minutes=7.0, until=0.94),
        _stage(128, 14, also=(14, 9, 6), minutes=15.0, schedule="cosine"),
    ),
    # The same in 4,000 steps, which are enough with pixel labels: two minutes of an H200.
    "two-minutes": (
        _stage(64, 6, steps=700, warmup=200),
        _stage(128, 6, steps=250),
        _stage(128, 9, steps=450),
        _stage(128, 14, steps=2600, schedule="cosine"),
    ),
    # From the weights of a model for Path-X that knows one rendering (--initial).
    "renderings": (_stage(128, 14, also=(14, 9, 6), minutes=4.5, schedule="cosine", lr=7e-4, warmup=100),),
    "renderings-256": (_stage(256, 14, minutes=4.5, schedule="cosine", lr=7e-4, warmup=100),),
    # From class labels alone: paths of three dashes first, whose markers are two gaps apart, then longer ones, and the
    # next stage only when the last one is learned. To be trained over several sessions (--pause-after, --resume).
    "label-free": (
        _stage(64, 3, minutes=6.0, until=0.95, warmup=500),
        _stage(64, 4, also=(3,), minutes=6.0, until=0.95),
        _stage(64, 6, also=(4,), minutes=10.0, until=0.95),
        _stage(128, 4, also=(6,), minutes=6.0, until=0.95),
        _stage(128, 6, also=(9,), minutes=10.0, until=0.95),
        _stage(128, 9, also=(12, 6), minutes=10.0, until=0.95),
        _stage(128, 14, also=(14, 9, 6), minutes=12.0, schedule="cosine"),
    ),
    # The same from 160,000 images of each length in every stage, as many as the arena has for training.
    "label-free-160000": (
        _stage(64, 3, minutes=6.0, until=0.95, warmup=500, images=160_000),
        _stage(64, 4, also=(3,), minutes=6.0, until=0.95, images=160_000),
        _stage(64, 6, also=(4,), minutes=10.0, until=0.95, images=160_000),
        _stage(128, 4, also=(6,), minutes=6.0, until=0.95, images=160_000),
        _stage(128, 6, also=(9,), minutes=10.0, until=0.95, images=160_000),
        _stage(128, 9, also=(12, 6), minutes=10.0, until=0.95, images=160_000),
        _stage(128, 14, minutes=12.0, schedule="cosine", images=160_000),
    ),
    # From the weights of a model for Path-X.
    "path256-label-free": (
        _stage(256, 6, also=(9,), minutes=5.0, until=0.95),
        _stage(256, 14, also=(9,), minutes=12.0, schedule="cosine"),
    ),
    # From the weights of a model for Path-256: 262,144 pixels.
    "path512": (
        _stage(512, 9, minutes=4.0, until=0.94),
        _stage(512, 14, minutes=10.0, schedule="cosine"),
    ),
    "path512-all": (
        # Three images a step.
        _stage(512, 14, tokens=768 * _K, minutes=9.0, background="keep", schedule="cosine", lr=5e-4, warmup=100),
    ),
    # All 16,384 pixels are tokens. From the weights of a model for Path-X (--initial), for example with --layers
    # "tiles:16*5,butterfly:8*4", because dense layers would take most of the time. Black pixels are new to the model.
    "pathx-all": (_stage(128, 14, minutes=7.0, background="keep", schedule="cosine", lr=5e-4, warmup=100),),
    # Path-256: paths are relatively shorter there, so 128 pixels with 9 dashes lead to it. With the weights of a model
    # for Path-X the stages of 64 and 128 pixels are over in seconds.
    "path256": (
        *_BEGINNING,
        _stage(128, 9, minutes=7.0, until=0.94),
        _stage(256, 9, minutes=5.0, until=0.94),
        _stage(256, 14, minutes=10.0, schedule="cosine"),
    ),
    # From the weights of "path256", likewise: all 65,536 pixels.
    "path256-all": (
        _stage(256, 14, tokens=256 * _K, minutes=9.0, background="keep", schedule="cosine", lr=5e-4, warmup=100),
    ),
    # To compare masks: the same minutes for each, from random weights.
    "compare": (
        _stage(64, 6, minutes=1.25, warmup=200),
        _stage(64, 9, minutes=1.25, schedule="cosine"),
    ),
}


def curriculum(name: str) -> tuple[Stage, ...]:
    """The curriculum with a name, or from a JSON file; raises ValueError or FileNotFoundError if there is none."""
    if name in CURRICULA:
        return CURRICULA[name]
    if not name.endswith(".json"):
        raise ValueError(f"the curriculum must be one of {', '.join(CURRICULA)}, or a .json file; got {name!r}")
    return curriculum_from(Path(name))
