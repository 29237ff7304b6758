"""Curricula by name. Minutes are for one H100.

An easier stage ends early at its accuracy. 64 pixels with 14 dashes cost the generator more than Path-X and teach less.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.pathx.config import Stage, curriculum_from

_K = 1024
_LR = 1e-3


def _stage(size: int, contour: int, **more: Any) -> Stage:
    return Stage(**{"size": size, "contour": contour, "tokens": 128 * _K, "lr": _LR, "warmup": 50, **more})


# Short paths first, then larger images, then longer paths. Gaps double from 64 to 128 pixels, so the size changes while
# paths are short. Images of 32 pixels teach nothing. All stages have the same number of tokens a step, so everything is
# compiled once.
_BEGINNING = (
    _stage(64, 6, minutes=4.0, until=0.94, warmup=200),
    _stage(128, 6, minutes=4.0, until=0.94),
)

# Paths of three dashes first, whose markers are two gaps apart. A stage begins when the one before is learned.
_FROM_LABELS = (
    _stage(64, 3, minutes=6.0, until=0.95, warmup=500),
    _stage(64, 4, also=(3,), minutes=6.0, until=0.95),
    _stage(64, 6, also=(4,), minutes=10.0, until=0.95),
    _stage(128, 4, also=(6,), minutes=6.0, until=0.95),
    _stage(128, 6, also=(9,), minutes=10.0, until=0.95),
    _stage(128, 9, also=(12, 6), minutes=10.0, until=0.95),
)

CURRICULA: dict[str, tuple[Stage, ...]] = {
    "smoke": (_stage(32, 6, tokens=3 * _K, steps=1600, schedule="cosine", lr=2e-3),),
    "cpu": (_stage(32, 6, tokens=3 * _K, minutes=1.3, schedule="cosine", lr=2e-3),),
    # A last stage of 14 alone forgets the shorter paths.
    "pathx": (
        *_BEGINNING,
        _stage(128, 9, minutes=7.0, until=0.94),
        _stage(128, 14, also=(14, 9, 6), minutes=15.0, schedule="cosine"),
    ),
    # In 4,000 steps, enough with pixel labels.
    "two-minutes": (
        _stage(64, 6, steps=700, warmup=200),
        _stage(128, 6, steps=250),
        _stage(128, 9, steps=450),
        _stage(128, 14, steps=2600, schedule="cosine"),
    ),
    # From a model for Path-X trained on one rendering (--initial).
    "renderings": (_stage(128, 14, also=(14, 9, 6), minutes=4.5, schedule="cosine", lr=7e-4, warmup=100),),
    "renderings-256": (_stage(256, 14, minutes=4.5, schedule="cosine", lr=7e-4, warmup=100),),
    # From class labels only.
    "label-free": (*_FROM_LABELS, _stage(128, 14, also=(14, 9, 6), minutes=12.0, schedule="cosine")),
    # From 160,000 images of each length, the size of the arena's training set.
    "label-free-160000": (
        *(replace(stage, images=160_000) for stage in _FROM_LABELS),
        _stage(128, 14, minutes=12.0, schedule="cosine", images=160_000),
    ),
    # 160,000 drawings in all stages together, as many as the arena's training set has. With --no-renderings it is one
    # fixed set in one rendering.
    "fixed-160000": (
        _stage(64, 3, minutes=6.0, until=0.95, warmup=500, images=8_000),
        _stage(64, 4, minutes=6.0, until=0.95, images=8_000),
        _stage(64, 6, minutes=10.0, until=0.95, images=16_000),
        _stage(128, 4, minutes=6.0, until=0.95, images=8_000),
        _stage(128, 6, minutes=10.0, until=0.95, images=16_000),
        _stage(128, 9, minutes=10.0, until=0.95, images=24_000),
        _stage(128, 14, minutes=12.0, schedule="cosine", images=80_000),
    ),
    # The same number of drawings, all of Path-X: no shorter paths first.
    "hard-160000": (_stage(128, 14, minutes=20.0, schedule="cosine", warmup=500, images=160_000),),
    # From the weights of a model for Path-X.
    "path256-label-free": (
        _stage(256, 6, also=(9,), minutes=5.0, until=0.95),
        _stage(256, 14, also=(9,), minutes=12.0, schedule="cosine"),
    ),
    # 262,144 pixels; from a model for Path-256.
    "path512": (
        _stage(512, 9, minutes=4.0, until=0.94),
        _stage(512, 14, minutes=10.0, schedule="cosine"),
    ),
    "path512-all": (
        _stage(512, 14, tokens=768 * _K, minutes=9.0, background="keep", schedule="cosine", lr=5e-4, warmup=100),
    ),
    # All 16,384 pixels are tokens. From a model for Path-X (--initial), for example with --layers
    # "tiles:16*5,butterfly:8*4".
    "pathx-all": (_stage(128, 14, minutes=7.0, background="keep", schedule="cosine", lr=5e-4, warmup=100),),
    # Paths are relatively shorter, so 128 pixels with 9 dashes lead to it.
    "path256": (
        *_BEGINNING,
        _stage(128, 9, minutes=7.0, until=0.94),
        _stage(256, 9, minutes=5.0, until=0.94),
        _stage(256, 14, minutes=10.0, schedule="cosine"),
    ),
    # All 65,536 pixels; from the weights of "path256".
    "path256-all": (
        _stage(256, 14, tokens=256 * _K, minutes=9.0, background="keep", schedule="cosine", lr=5e-4, warmup=100),
    ),
    # To compare masks, from random weights.
    "compare": (
        _stage(64, 6, minutes=1.25, warmup=200),
        _stage(64, 9, minutes=1.25, schedule="cosine"),
    ),
}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu": (
        "cpu",
        {
            "layers": "near:6*2,dense*2", "width": 64, "heads": 2, "mlp": 128, "block": 32, "auxiliary": 1.0,
            "average": 0.98, "precision": "fp32", "device": "cpu", "log_every": 10, "validate_every": 1_000_000,
            "validation_images": 200,
        },
    ),
}  # fmt: skip


def preset_of(name: str) -> tuple[str, dict[str, Any]]:
    if name not in PRESETS:
        raise ValueError(f"the preset must be one of {', '.join(PRESETS)}; got {name!r}")
    return PRESETS[name]


def curriculum(name: str) -> tuple[Stage, ...]:
    if name in CURRICULA:
        return CURRICULA[name]
    if not name.endswith(".json"):
        raise ValueError(f"the curriculum must be one of {', '.join(CURRICULA)}, or a .json file; got {name!r}")
    return curriculum_from(Path(name))
