"""Single tokens that see nothing, are not seen or see the future, from the tiles and bits of a walk."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.build import SCORES_AT_ONCE
from sparseflash.blockmask.walks import Walk, words_of

_TILES_AT_ONCE = 1 << 16


def blind_queries(walk: Walk) -> Tensor:
    """The queries with no live key: int64, increasing."""
    sees = torch.cat([torch.ones(1, walk.block_q, dtype=torch.bool, device="cpu"), (walk.bits != 0).any(-1)])
    return _uncovered(walk.rows, walk.kind, sees, walk.q_stop)


def unseen_keys(walk: Walk) -> Tensor:
    """The keys with no live query: int64, increasing."""
    united = torch.from_numpy(np.bitwise_or.reduce(walk.bits.numpy(), axis=1))
    seen = torch.cat(
        [torch.ones(1, walk.block_k, dtype=torch.bool, device="cpu"), bitmask.unpack(united, walk.block_k)]
    )
    return _uncovered(walk.cols, walk.kind, seen, walk.k_stop)


def _uncovered(where: Tensor, kind: Tensor, covers: Tensor, stop: int) -> Tensor:
    block = covers.shape[1]
    covered = torch.zeros(-(-stop // block), block, dtype=torch.bool, device="cpu")
    covered[where[kind == 0]] = True
    open_ = (kind > 0) & ~covered.all(1)[where]
    pairs = torch.unique(where[open_] * len(covers) + kind[open_])
    for some in pairs.split(_TILES_AT_ONCE):
        row, first = np.unique((some // len(covers)).numpy(), return_index=True)
        united = np.logical_or.reduceat(covers[some % len(covers)].numpy(), first, axis=0)
        covered[torch.from_numpy(row)] |= torch.from_numpy(united)
    return (~covered.view(-1)[:stop]).nonzero().squeeze(1)


def future_scores(walk: Walk, shift: int) -> tuple[int, tuple[int, int] | None]:
    """The number of live scores with `k > q + shift`, and the first of them, (q, k)."""
    # The distance of a tile's corner into the future: tiles of one kind with equal corners have equal leaks.
    corner = walk.cols * walk.block_k - walk.rows * walk.block_q - shift
    reaches = corner + walk.block_k - 1 > 0
    rows, cols, kind, corner = walk.rows[reaches], walk.cols[reaches], walk.kind[reaches], corner[reaches]
    lowest = int(corner.min()) if len(corner) else 0
    span = int(corner.max()) - lowest + 1 if len(corner) else 1
    pairs, which = torch.unique(kind * span + corner - lowest, return_inverse=True)
    inside = torch.arange(walk.block_k, device="cpu") - torch.arange(walk.block_q, device="cpu")[:, None]
    leaks = [torch.zeros(0, dtype=torch.int64, device="cpu")]
    for some in pairs.split(max(1, SCORES_AT_ONCE // (walk.block_q * walk.block_k))):
        live = bitmask.unpack(words_of(some // span, walk.bits, walk.block_k), walk.block_k)
        leaks.append((live & (inside > -(some % span + lowest)[:, None, None])).sum((1, 2)))
    count = torch.cat(leaks)[which]
    guilty = count.nonzero().squeeze(1)
    if not len(guilty):
        return 0, None
    # Tiles are ordered by rows, so the first leak is in one of the leaking tiles of the first such block row.
    best: tuple[int, int] | None = None
    for tile in guilty[rows[guilty] == rows[guilty[0]]].tolist():
        live = bitmask.unpack(words_of(kind[tile : tile + 1], walk.bits, walk.block_k), walk.block_k)[0]
        a, b = (live & (inside > -corner[tile])).nonzero()[0].tolist()
        found = int(rows[tile]) * walk.block_q + a, int(cols[tile]) * walk.block_k + b
        best = found if best is None else min(best, found)
    return int(count.sum()), best


def see_previous(walk: Walk) -> Tensor:
    """Whether each live query sees the key just before it: bool `[q_stop]`."""
    sees = torch.zeros(walk.q_stop, dtype=torch.bool, device="cpu")
    first_q, first_k = walk.rows * walk.block_q, walk.cols * walk.block_k
    near = ((first_k + 1 < first_q + walk.block_q) & (first_k + walk.block_k >= first_q)).nonzero().squeeze(1)
    a = torch.arange(walk.block_q, device="cpu")
    bits = min(walk.block_k, bitmask.WORD)
    for some in near.split(_TILES_AT_ONCE):
        q = first_q[some, None] + a
        k = q - 1 - first_k[some, None]
        inside = (k >= 0) & (k < walk.block_k) & (q < walk.q_stop)
        k, kind = k.clamp(0, walk.block_k - 1), walk.kind[some]
        live = (kind == 0)[:, None].expand(-1, walk.block_q).clone()
        partial = kind > 0
        words = walk.bits[(kind[partial] - 1)[:, None], a, k[partial] // bits]
        live[partial] = (words >> (k[partial] % bits)) & 1 == 1
        sees[q[live & inside]] = True
    return sees
