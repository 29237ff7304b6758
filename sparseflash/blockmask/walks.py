"""The tiles that attention iterates over for each distinct head of a mask, without padding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.arguments import checked_mask
from sparseflash.blockmask.csr import entries_of_pattern, stored_tiles
from sparseflash.blockmask.stats import live_tokens, pattern_count

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


@dataclass(frozen=True)
class Walk:
    """The tiles of one pattern that begin before a length, ordered by rows; all int64, on the CPU.

    `rows`, `cols`, `tile` `[E]` are as stored. `kind [E]`: 0 for a full tile, t for the words `bits[t - 1]` of the part
    inside the length, which may be empty. `users`: the (batch element, head) pairs, numbered as in `mask.shape`.
    `q_stop`, `k_stop`: live queries and keys, in tokens.
    """

    rows: Tensor
    cols: Tensor
    tile: Tensor
    kind: Tensor
    bits: Tensor
    q_stop: int
    k_stop: int
    block_q: int
    block_k: int
    users: tuple[tuple[int, int], ...]

    def live(self) -> Tensor:
        """Live scores of each tile: int64 `[E]`."""
        return bitmask.live_scores(bitmask.choices(self.bits, self.block_k))[self.kind]


def walks(mask: BlockMask) -> Iterator[Walk]:
    """Yields one walk for each distinct (pattern, length), in order of first appearance."""
    mask = checked_mask(mask).canonical().to("cpu")
    batch, heads = mask.shape[:2]
    patterns = mask.pattern.expand(batch, heads).tolist()
    stops = live_tokens(mask)
    users: dict[tuple[int, tuple[int, int]], list[tuple[int, int]]] = {}
    for b in range(batch):
        for h in range(heads):
            users.setdefault((patterns[b][h], stops[b]), []).append((b, h))
    for (pattern, tokens), who in users.items():
        yield walk(mask, pattern, tokens, tuple(who))


def walk(
    mask: BlockMask, pattern: int, stops: tuple[int, int] | None = None, users: tuple[tuple[int, int], ...] = ()
) -> Walk:  # fmt: skip
    """The tiles of one pattern of a mask on the CPU, for a sequence of `stops = (queries, keys)` live tokens."""
    block_q, block_k = mask.block_q, mask.block_k
    rows, span = entries_of_pattern(mask.indptr, pattern, mask.blocks[0])
    cols, tile = mask.indices[span].long(), mask.tile[span].long()
    kind, bits = tile, mask.bits
    q_stop, k_stop = stops or (mask.q_len, mask.k_len)
    if q_stop < mask.q_len or k_stop < mask.k_len:
        begins = (rows * block_q < q_stop) & (cols * block_k < k_stop)
        rows, cols, tile = rows[begins], cols[begins], tile[begins]
        at_end = ((rows + 1) * block_q > q_stop).long() + 2 * ((cols + 1) * block_k > k_stop).long()
        kind, bits = cut(tile, at_end, bits, q_stop % block_q or block_q, k_stop % block_k or block_k, block_k)
    return Walk(rows, cols, tile, kind, bits, q_stop, k_stop, block_q, block_k, users)


def live_scores(mask: BlockMask) -> float:
    """Live scores per head, averaged over heads and batch elements."""
    if mask.lengths is not None:
        return sum(len(each.users) * int(each.live().sum()) for each in walks(mask)) / max(math.prod(mask.shape[:2]), 1)
    rows, _, tile = stored_tiles(mask)
    of_kind = bitmask.live_scores(bitmask.choices(mask.bits, mask.block_k))
    per_pattern = torch.zeros(pattern_count(mask), dtype=torch.int64, device=mask.device)
    per_pattern.index_add_(0, rows // mask.blocks[0], of_kind[tile])
    return float(per_pattern[mask.pattern.long()].double().mean())


def cut(kind: Tensor, at_end: Tensor, bits: Tensor, live_q: int, live_k: int, block_k: int) -> tuple[Tensor, Tensor]:
    """Removes scores past the ends: `(kind, bits)`, with the cut kinds appended.

    `at_end [E]`: 1 for a tile with only its first `live_q` rows inside, 2 with only its first `live_k` columns, 3 both,
    0 neither.
    """
    block_q, chosen = bits.shape[1], at_end > 0
    pairs, which = torch.unique(kind[chosen] * 4 + at_end[chosen], return_inverse=True)
    ends = torch.stack(
        [
            bitmask.rectangle(
                block_q, block_k, live_q if end & 1 else block_q, live_k if end & 2 else block_k, bits.device
            )
            for end in range(4)
        ]
    )
    left = words_of(pairs // 4, bits, block_k) & ends[pairs % 4]
    kind = kind.clone()
    kind[chosen] = which + len(bits) + 1
    return kind, torch.cat([bits, left])


def words_of(kind: Tensor, bits: Tensor, block_k: int) -> Tensor:
    """The words of these kinds: int32 `[E, block_q, words_per_row(block_k)]`."""
    words = bits.new_full((len(kind), *bits.shape[1:]), bitmask.full_word(block_k))
    words[kind > 0] = bits[kind[kind > 0] - 1]
    return words
