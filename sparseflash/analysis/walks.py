"""The tiles that attention iterates over for each distinct head of a mask, without padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.arguments import checked_mask
from sparseflash.blockmask.csr import row_of_entry
from sparseflash.blockmask.stats import live_tokens


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
        return self.per_kind()[self.kind]

    def per_kind(self) -> Tensor:
        """Live scores of each kind: int64 `[1 + T]`."""
        return torch.cat([torch.tensor([self.block_q * self.block_k], device="cpu"), bitmask.live_scores(self.bits)])


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
    mask: BlockMask, pattern: int, stops: tuple[int, int], users: tuple[tuple[int, int], ...] = ()
) -> Walk:  # fmt: skip
    """The tiles of one pattern of a mask on the CPU, for a sequence of `stops = (queries, keys)` live tokens."""
    row_blocks, (block_q, block_k) = mask.blocks[0], (mask.block_q, mask.block_k)
    start, end = (int(mask.indptr[(pattern + step) * row_blocks]) for step in (0, 1))
    indptr = mask.indptr[pattern * row_blocks : (pattern + 1) * row_blocks + 1]
    rows, cols, tile = (
        row_of_entry(indptr - indptr[0], end - start),
        mask.indices[start:end].long(),
        mask.tile[start:end].long(),
    )
    kind, bits = tile, mask.bits
    q_stop, k_stop = stops
    if q_stop < mask.q_len or k_stop < mask.k_len:
        begins = (rows * block_q < q_stop) & (cols * block_k < k_stop)
        rows, cols, tile = rows[begins], cols[begins], tile[begins]
        at_end = ((rows + 1) * block_q > q_stop).long() + 2 * ((cols + 1) * block_k > k_stop).long()
        kind, bits = cut(tile, at_end, bits, q_stop % block_q or block_q, k_stop % block_k or block_k, block_k)
    return Walk(rows, cols, tile, kind, bits, q_stop, k_stop, block_q, block_k, users)


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
