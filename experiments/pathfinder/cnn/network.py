from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALLEST = 2  # positions along a side
WIDEST = 4  # relative to the first stage

Normalisation = Callable[[int], nn.Module]


class SmallCNN(nn.Module):
    """Whether the markers of images are connected: logits [B, 2] from uint8 [B, S, S].

    >>> SmallCNN(32)(torch.zeros(3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([3, 2])
    """

    def __init__(
        self, size: int, width: int = 16, blocks: int = 1, classes: int = 2, stages: int | None = None
    ) -> None:
        """width: channels of the first stage, doubled at the next two. blocks: blocks of two convolutions in each
        stage. classes: of other images. stages: this many, of which the first keeps the size, for images whose answer
        is in details; None: all halve it, until a place sees the whole image.
        """
        super().__init__()
        layers: list[nn.Module] = [*normed(1, width, kernel=3, stride=1), nn.ReLU()]
        channels = width
        for stage, wider in enumerate(widths(size, width)[:stages]):
            stride = 1 if stages is not None and stage == 0 else 2
            layers += [Block(channels, wider, stride), *(Block(wider, wider, stride=1) for _ in range(blocks - 1))]
            channels = wider
        self.trunk = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images[:, None].to(self.head.weight.dtype) / 255  # [B, 1, S, S]
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        logits: Tensor = self.head(self.trunk(pixels).mean((2, 3)))
        return logits


def widths(size: int, width: int) -> list[int]:
    """The channels of every stage; each halves the image.

    >>> widths(32, 16), widths(256, 16)
    ([16, 32, 64, 64], [16, 32, 64, 64, 64, 64, 64])
    """
    found: list[int] = []
    while size > SMALLEST:
        found.append(width * min(2 ** len(found), WIDEST))
        size = -(-size // 2)
    return found


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int, norm: Normalisation = nn.BatchNorm2d) -> None:
        super().__init__()
        first = normed(before, after, kernel=3, stride=stride, norm=norm)
        second = normed(after, after, kernel=3, stride=1, norm=norm)
        self.convolutions = nn.Sequential(*first, nn.ReLU(), *second)
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*normed(before, after, kernel=1, stride=1, norm=norm))
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        # Subsampled before the 1 x 1 convolution: with fewer than eight input channels, PyTorch 2.13's backward of the
        # equivalent stride writes past its memory on the CPU.
        return F.relu(self.convolutions(x) + self.shortcut(x[:, :, :: self.stride, :: self.stride]))


def normed(
    before: int, after: int, *, kernel: int, stride: int, norm: Normalisation = nn.BatchNorm2d
) -> list[nn.Module]:
    return [nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False), norm(after)]
