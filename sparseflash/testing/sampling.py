"""Chooses the part of a long sequence to compare: some heads, and for those the rows of some blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """The part of a head that is compared.

    >>> print(Part(torch.tensor([True, False]), torch.tensor([False, True]), 128, 128))
    1 of 2 query blocks and 1 of 2 key blocks

    `rows`: the block rows whose outputs and query gradients are compared; `columns`: the key blocks whose gradients of
    keys and values are. A part is whole if it has all of both.
    """

    rows: Tensor  # bool [Mq]
    columns: Tensor  # bool [Mk]: blocks that only `rows` see, so that their gradients are complete
    block_q: int
    block_k: int

    @property
    def whole(self) -> bool:
        return bool(self.rows.all()) and bool(self.columns.all())

    def of(self, name: str, result: Tensor) -> Tensor:
        dim = result.ndim - (1 if name == "lse" else 2)
        tokens = self.tokens(name)[: result.shape[dim]].nonzero()[:, 0]
        return result.index_select(dim, tokens.to(result.device))

    def tokens(self, name: str) -> Tensor:
        """The tokens whose result is compared: bool `[N]`, with N rounded up to whole blocks."""
        if name in ("dk", "dv"):
            return self.columns.repeat_interleave(self.block_k)
        return self.rows.repeat_interleave(self.block_q)

    def __str__(self) -> str:
        if self.whole:
            return "in full"
        return (
            f"{int(self.rows.sum())} of {len(self.rows)} query blocks and {int(self.columns.sum())} of "
            f"{len(self.columns)} key blocks"
        )


def sampled_part(layout: Tensor, block_q: int, block_k: int, *, blocks: int, seed: int = 0) -> Part:
    """`blocks` block rows, and as many key blocks together with every block row that sees one of them.

    >>> layout = torch.eye(100, dtype=torch.bool)
    >>> print(sampled_part(layout, 128, 128, blocks=4))  # the first and the last are the same for both
    6 of 100 query blocks and 6 of 100 key blocks

    `layout`: bool `[Mq, Mk]`, the live tiles. The first and the last block are always chosen, the others drawn.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    chosen = []
    for count in layout.shape:
        drawn = torch.randperm(count, generator=generator, device="cpu")[: max(blocks - 2, 0)]
        some = torch.zeros(count, dtype=torch.bool, device="cpu")
        some[drawn] = some[0] = some[-1] = True
        chosen.append(some.to(layout.device))
    rows, columns = chosen
    rows |= layout[:, columns].any(1)
    # Gradients are complete for the key blocks that only chosen rows see.
    return Part(rows, ~layout[~rows].any(0), block_q, block_k)


def sampled_heads(batch: int, kv_heads: int, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """`count` pairs (batch element, key head): the first, the last, and random others; all if there are no more.

    >>> sampled_heads(2, 3, 2)
    [(0, 0), (1, 2)]
    """
    total = batch * kv_heads
    generator = torch.Generator("cpu").manual_seed(seed)
    between = (torch.randperm(max(total - 2, 0), generator=generator, device="cpu") + 1).tolist()
    chosen = [0, total - 1, *between][: max(1, count)] if total > 1 else [0]
    return [divmod(index, kv_heads) for index in chosen]
