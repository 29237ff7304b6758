import torch

from sparseflash import BlockMask

i, j = torch.arange(128)[:, None], torch.arange(128)
drawn = torch.rand(128, 128, generator=torch.Generator().manual_seed(0))
LAYOUTS = {
    "butterfly": ((i ^ j) & ((i ^ j) - 1)) == 0,
    "local": (i - j).abs() <= 4,
    "global": ((i - j).abs() <= 1) | (i < 2) | (j < 2) | (drawn < 0.025),
    "random": (i == j) | (drawn < 0.12),
    "causal": i >= j,
    "dense": i + j >= 0,
}


def mask_of(name):
    return BlockMask.from_layout(LAYOUTS[name], block=128)
