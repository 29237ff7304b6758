from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.pathx.data.packing import LEVELS

STEP = 15  # 18 rows, the last for level 255


class SmoothEmbedding(nn.Module):
    """Features that change gradually with the grey level, and a row for every register.

    >>> SmoothEmbedding(0, 8)(torch.tensor([[0, 7, 255]])).shape
    torch.Size([1, 3, 8])

    Interpolated between learned rows, so unseen levels have features like their neighbours', and noise changes little.
    """

    hats: Tensor

    def __init__(self, registers: int, width: int) -> None:
        super().__init__()
        self.register_buffer("hats", hats(), persistent=False)
        self.rows = nn.Parameter(torch.randn(self.hats.shape[1], width) * width**-0.5)
        self.registers = nn.Parameter(torch.randn(registers, width) * width**-0.5)

    def table(self) -> Tensor:
        # Autocast would round a matrix product to bfloat16.
        levels = (self.hats[:, :, None] * self.rows).sum(1)
        return torch.cat([levels, self.registers])

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table())


def hats() -> Tensor:
    levels, rows = torch.arange(LEVELS), torch.arange(0, LEVELS, STEP)
    return (1 - (levels[:, None] - rows).abs() / STEP).clamp(min=0)


def fitted(table: Tensor) -> dict[str, Tensor]:
    """Least squares above level 0. Black has its own row: where it is dropped it is untrained."""
    shares = hats().double()
    known = table[:LEVELS].double().cpu()
    black, rest = shares[1:, :1] @ known[:1], shares[1:, 1:]
    rows = torch.cat([known[:1], torch.linalg.lstsq(rest, known[1:] - black).solution])
    return {"rows": rows.to(table), "registers": table[LEVELS:].clone()}
