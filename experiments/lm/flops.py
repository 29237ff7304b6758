"""The FLOPs of a training step and their share of the device's peak (MFU).

    FLOPs of a token = 6 * M + 12 * D * (live scores of all layers and heads) / context

M: the weights of all linear layers and of the head, with the padded vocabulary; each is multiplied and added once
forward and twice backward. A live score takes 4 D forward and 8 D backward. Recomputation and masked scores do not
count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from experiments.lm.model.chosen import ChosenBlocks
from sparseflash import BlockMask

# Dense bf16, by data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


def matrix_weights(depth: int, width: int, kv_width: int, mlp: int, vocabulary: int) -> int:
    """kv_width: features of a token's keys, over all heads; its values have as many. `vocabulary` includes its padding.

    >>> matrix_weights(12, 768, 768, 4 * 768, 50_304)
    123568128
    """
    return 2 * depth * width * (width + kv_width + mlp) + vocabulary * width


def live_scores(layers: Sequence[BlockMask | ChosenBlocks], heads: int) -> float:
    found = {id(mask): mask.density * mask.q_len * mask.k_len * heads for mask in layers}
    return sum(found[id(mask)] for mask in layers)


def of_token(weights: int, head_dim: int, live: float, context: int) -> float:
    """Forward and backward.

    >>> round(of_token(123_568_128, 128, 12 * 6 * 2048 * 2049 / 2, 2048) / 1e6)
    855
    """
    return 6 * weights + 12 * head_dim * live / context


def peak(device: torch.device) -> float | None:
    """In bf16; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for known, value in PEAKS.items() if known in name), None)
