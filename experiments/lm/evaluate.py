"""Losses on validation text: their mean, and by position in the context."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from experiments.lm.config import Config
from experiments.lm.data.packing import Packing
from experiments.lm.data.store import Part
from experiments.lm.document_masks import DocumentMasks
from experiments.training.atomic_files import write_csv
from experiments.training.distributed import Ranks

BUCKETS = 32  # rows of positions.csv


@dataclass(frozen=True)
class Losses:
    sums: np.ndarray  # [N]
    sequences: int

    @property
    def tokens(self) -> int:
        return self.sequences * len(self.sums)

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.tokens)

    def by_position(self) -> list[tuple[int, int, float]]:
        """Ranges [first, end), whose lengths double.

        >>> [row[:2] for row in Losses(np.ones(100), 1).by_position()]
        [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 100)]
        """
        bounds = [0, *(2**power for power in range(BUCKETS) if 2**power < len(self.sums)), len(self.sums)]
        return [(begin, end, float(self.sums[begin:end].mean() / self.sequences)) for begin, end in pairwise(bounds)]


@torch.no_grad()
def losses(
    model: nn.Module,
    part: Part,
    config: Config,
    device: torch.device,
    ranks: Ranks,
    documents: DocumentMasks | None,
    together: int,
) -> Losses:
    count = min((len(part) - 1) // config.context, max(1, config.validation_tokens // config.context))
    shares = ranks.data_parallel_ranks
    count = count // shares * shares
    if count == 0:
        raise ValueError(
            f"the validation text must have at least {shares} sequences of {config.context} tokens; it has "
            f"{len(part):,} tokens: lower --context, or give more text"
        )
    packing = Packing(part, config.context, 1, 0)
    numbers = np.arange(count)[ranks.share]
    sums = torch.zeros(config.context, dtype=torch.float64, device=device)
    model.eval()
    for start in range(0, len(numbers), together):
        some = numbers[start : start + together]
        tokens = torch.from_numpy(packing.rows(some)).to(device).long()
        attentions = None if documents is None else documents.attentions(packing, some)
        found: Tensor = model(tokens[:, :-1], tokens[:, 1:], attentions, each=True)
        sums += found.double().sum(0)
    return Losses(ranks.sum_over_shares(sums).cpu().numpy(), count)


def write_positions(path: Path, found: Losses) -> None:
    write_csv(
        path,
        [
            {"begin": begin, "end": end, "loss": f"{loss:.5f}", "sequences": found.sequences}
            for begin, end, loss in found.by_position()
        ],
    )
