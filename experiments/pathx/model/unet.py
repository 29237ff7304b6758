"""A residual U-Net that reads the same batches as the transformer: the convolutional control.

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

# Channels at the image's own size and after each halving, in eighths of the width. Few at the image's own size, where
# most of the memory traffic is. After five halvings a place is 32 pixels wide; with one more block there, a place in
# the middle of an image of 256 pixels sees all of it.
EIGHTHS = (1, 2, 4, 5, 6, 6)
GROUP = 8  # channels that are normalised together


class UNet(nn.Module):
    """Whether the markers of images are connected, by convolutions: halved five times, doubled again, mean and max.

    Every halving and doubling is a residual block of two 3 x 3 convolutions with a shortcut of one of 1 x 1, and a
    doubling also reads, by a skip connection, what lay at its size before. The weights do not depend on the size of the
    images. With the width of 128 and the head of 256 features that are the defaults of a run it has 1,343,954
    parameters.

    Each image is normalised by itself, so its answer does not depend on the others of its batch, whose number varies.

    >>> import numpy as np
    >>> from experiments.pathx.data.device_batch import on_device
    >>> from experiments.pathx.data.packing import pack
    >>> packed = pack([np.eye(64, dtype=np.uint8)] * 3, [0, 1, 0], (), block=16)
    >>> logits, _ = UNet(width=64, head=16)(on_device(packed, (), torch.device("cpu")))
    >>> logits.shape
    torch.Size([3, 2])
    """

    def __init__(self, width: int, head: int) -> None:
        """width: eight times the channels at the images' own size; head: hidden features of the head."""
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
        self.to(memory_format=torch.channels_last)  # that of the convolutions that tensor cores compute

    def forward(self, batch: Batch) -> tuple[Tensor, None]:
        """Logits [I, 2]; there is no second head."""
        x = self.features(images_of(batch).to(self.head[0].weight.dtype) / (LEVELS - 1))
        pooled = torch.cat([x.mean((2, 3)), x.amax((2, 3))], dim=-1)  # [I, 2 C]
        return self.head(pooled), None

    def features(self, images: Tensor) -> Tensor:
        """Images [I, 1, S, S] to [I, C, S, S]; S is a multiple of 32."""
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
    """The normalisation of so many channels, in groups of GROUP."""
    return nn.GroupNorm(channels // GROUP, channels)


def images_of(batch: Batch) -> Tensor:
    """The images of a batch, int16 [I, 1, S, S]: the grey levels of its pixels, and black where there is no token.

    An entry that is not an image is black.
    """
    images, most = batch.blocks.shape
    pixels = batch.side**2
    owner = places_in_groups(batch.blocks, batch.ids.numel() // batch.block) // most  # [M]; `images` if there is none
    owner = owner.repeat_interleave(batch.block).view_as(batch.ids)
    place = owner * pixels + batch.y.long() * batch.side + batch.x
    is_pixel = (batch.ids >= 0) & (batch.ids < LEVELS) & (owner < images)
    # No two pixels have one place. What is not a pixel is written behind the images, in any order, and cut off.
    place = place.where(is_pixel, images * pixels)
    canvas = batch.ids.new_zeros(images * pixels + 1).scatter_(0, place.flatten(), batch.ids.flatten())
    return canvas[:-1].view(images, 1, batch.side, batch.side)
