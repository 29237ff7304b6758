"""The blocks with the highest scores of each query, the earlier of equals, as a list of their numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparseflash.selection.frame import Frame

AT_ONCE = 1 << 26  # scores in memory together


def chunks(count: int, per_row: int) -> list[slice]:
    """Slices of `count` rows, of about `AT_ONCE` scores."""
    step = max(1, AT_ONCE // max(1, per_row))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


@torch.no_grad()
def best_blocks(
    scores_of: Callable[[slice], Tensor], frame: Frame, *, blocks: int, k: int, span: int, per_row: int, first: int = 0,
    last: int = 0, whole: bool = False,
) -> Tensor:  # fmt: skip
    """Numbers `[B, H, Nq, min(k, blocks)]` of blocks of `span` keys, -1 where a query has fewer.

    Args:
        scores_of: takes a slice of queries and returns scores `[B, H, rows, blocks]`; their values for blocks that a
            query may not see do not matter.
        per_row: scores that `scores_of` has in memory for a query.
        first, last: of a query's document, the first blocks, and the last blocks up to its own; they are always chosen.
        whole: a query sees only blocks that have ended, not the one that it is in.
    """
    number = torch.arange(blocks, device=frame.device)
    found = []
    for rows in chunks(frame.q_len, per_row):
        place, begin = frame.places(rows), frame.firsts(rows) // span
        own = place // span
        is_open = (number >= begin) & (number <= ((place + 1) // span - 1 if whole else own))
        forced = is_open & ((number < begin + first) | (number > own - last))
        scores = scores_of(rows).masked_fill(~is_open, -torch.inf).masked_fill(forced, torch.inf)
        order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
        found.append(order.masked_fill(scores.gather(-1, order) == -torch.inf, -1))
    return torch.cat(found, 2)


def keys_of(index: Tensor, frame: Frame, span: int, rows: Tensor) -> Tensor:
    """Which keys are in the chosen blocks of some queries: bool `[B, H, rows, Nk]`."""
    blocks = -(-frame.k_len // span)
    some = index[:, :, rows].long()
    some = some.masked_fill(some < 0, blocks)
    table = torch.zeros(*some.shape[:3], blocks + 1, dtype=torch.bool, device=index.device).scatter_(3, some, True)
    return table[..., :-1].repeat_interleave(span, 3)[..., : frame.k_len]
