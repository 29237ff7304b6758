"""Self-pretraining: the model predicts hidden pixels (Amos, Berant and Gupta, 2024).

A hidden pixel looks black. The loss covers only hidden pixels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.pathx.data.packing import LEVELS, Packed

HIDDEN = 0


def hide(packed: Packed, share: float, random: np.random.Generator) -> Packed:
    """At least one of the drawn pixels is hidden; all grey levels are labels.

    Masks depend only on positions.
    """
    is_pixel = (packed.ids >= 0) & (packed.ids < LEVELS)
    levels = np.where(is_pixel, packed.ids, 0).astype(np.uint8)
    drawn = np.flatnonzero(levels)
    ids = packed.ids.copy()
    ids.reshape(-1)[random.choice(drawn, max(1, round(share * len(drawn))), replace=False)] = HIDDEN
    return replace(packed, ids=ids, pixel_labels=levels)
