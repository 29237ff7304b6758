"""A residual U-Net on the same batches: the convolutional baseline.

Shapes: I images of S x S pixels, C channels, M blocks of tokens in all, K blocks per image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.pathfinder.cnn.network import Block, normed
from experiments.pathx.data.device_batch import Batch
from experiments.pathx.data.packing import LEVELS
from experiments.pathx.model.classifier import CLASSES
from experiments.pathx.model.gather import places_in_groups

# Channels after each halving, in eighths of the width; few at the image's size, which has most of the memory traffic.
# After five halvings a position is 32 pixels wide.
EIGHTHS = (1, 2, 4, 5, 6, 6)
GROUP = 8


class UNet(nn.Module):
    """A residual U-Net: the side is halved five times and doubled again, then mean and maximum are classified.

    >>> import numpy as np
    >>> from experiments.pathx.data.device_batch import on_device
    >>> from experiments.pathx.data.packing import pack
    >>> packed = pack([np.eye(64, dtype=np.uint8)] * 3, [0, 1, 0], (), block=16)
    >>> logits, _ = UNet(width=64, head=16)(on_device(packed, (), torch.device("cpu")))
    >>> logits.shape
    torch.Size([3, 2])

    Every halving and doubling is a residual block of two 3 x 3 convolutions; a doubling also reads the earlier features
    of its size. By default it has 1,343,954 parameters.

    Each image is normalised separately.
    """

    def __init__(self, width: int, head: int) -> None:
        """width: eight times the channels at the images' size. head: hidden features."""
        super().__init__()
        if width % (8 * GROUP):
            raise ValueError(f"the width of a U-Net must be a multiple of {8 * GROUP}; got {width}")
        first, *others = channels = [width // 8 * eighths for eighths in EIGHTHS]
        self.stem = nn.Sequential(*normed(1, first, kernel=3, stride=1, norm=group_norm), nn.ReLU())
        self.whole = Block(first, first, stride=1, norm=group_norm)
        self.halvings = nn.ModuleList(
            Block(before, after, stride=2, norm=group_norm) for before, after in zip(channels, others)
        )
        self.bottom = Block(channels[-1], channels[-1], stride=1, norm=group_norm)
        self.doublings = nn.ModuleList(
            Block(below + same, same, stride=1, norm=group_norm)
            for same, below in reversed(list(zip(channels, others)))
        )
        self.head = nn.Sequential(nn.Linear(2 * first, head), nn.GELU(), nn.Linear(head, CLASSES))
        self.to(memory_format=torch.channels_last)

    def forward(self, batch: Batch) -> tuple[Tensor, None]:
        x = self.features(images_of(batch).to(self.head[0].weight.dtype) / (LEVELS - 1))
        pooled = torch.cat([x.mean((2, 3)), x.amax((2, 3))], dim=-1)  # [I, 2 C]
        return self.head(pooled), None

    def features(self, images: Tensor) -> Tensor:
        x: Tensor = self.whole(self.stem(images))
        skipped = []
        for block in self.halvings:
            skipped.append(x)
            x = block(x)
        x = self.bottom(x)
        for block in self.doublings:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), skipped.pop()], dim=1))
        return x


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // GROUP, channels)


def images_of(batch: Batch) -> Tensor:
    """int16 [I, 1, S, S], black where no token lies."""
    images, most = batch.blocks.shape
    pixels = batch.side**2
    owner = places_in_groups(batch.blocks, batch.ids.numel() // batch.block) // most  # [M]; `images` for no image
    owner = owner.repeat_interleave(batch.block).view_as(batch.ids)
    place = owner * pixels + batch.y.long() * batch.side + batch.x
    is_pixel = (batch.ids >= 0) & (batch.ids < LEVELS) & (owner < images)
    # Tokens that are no pixels are written behind the images, and cut off.
    place = place.where(is_pixel, images * pixels)
    canvas = batch.ids.new_zeros(images * pixels + 1).scatter_(0, place.flatten(), batch.ids.flatten())
    return canvas[:-1].view(images, 1, batch.side, batch.side)
