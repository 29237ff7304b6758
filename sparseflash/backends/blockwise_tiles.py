"""Cuts tensors into the tiles of a mask, and groups the block rows that `blockwise.py` computes together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.problem import Problem
from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.cache import bounded, mask_cache, once
from sparseflash.blockmask.csr import entries_of_pattern
from sparseflash.dropout import GROUP, Dropout, amplification, kept
from sparseflash.scores.change import Place, Scores

_SCORES_AT_ONCE = 1 << 22  # 16 MB in fp32, which nearly fits the cache; larger chunks were not faster

Blocks = tuple[int, int]  # how many blocks hold a sequence's live queries, and its live keys


class Rows(NamedTuple):
    """Block rows of one pattern that have the same number c of tiles."""

    heads: Tensor  # [n], indices of (batch element, query head)
    rows: Tensor  # [R], block rows
    cols: Tensor  # [R, c], block columns
    tile: Tensor  # [R, c]
    numbers: Tensor  # [R, c], indices of the tiles in the mask's list
    stop: Tensor | None  # [n, 2], the live queries and keys of the heads' sequences, if the mask has lengths


class Tiles:
    """A mask's tiles of tensors, and the block rows to compute."""

    def __init__(self, q: Tensor, k: Tensor, problem: Problem) -> None:
        self.batch, self.heads, self.q_len = q.shape[:3]
        self.kv_heads, self.k_len = k.shape[1:3]
        block_q, block_k = problem.block_q, problem.block_k
        if problem.indptr is None:
            dense = _dense(self.q_len, self.k_len, block_q, block_k, q.device)
            problem = Problem.of(dense, scale=problem.scale, batch=self.batch)
        indptr, indices, tile, words, pattern, lengths = problem[:6]
        if indptr is None or indices is None or tile is None or words is None or pattern is None:
            raise RuntimeError("either all arrays of a mask must be given, or none")
        self.indptr, self.indices, self.tile = indptr, indices, tile
        self.pattern = pattern.expand(self.batch, self.heads).reshape(-1)
        self.stops = None if lengths is None else lengths.long().T.repeat_interleave(self.heads, dim=0)  # [B * Hq, 2]
        self.block_q, self.block_k = block_q, block_k
        self.row_blocks = -(-self.q_len // block_q)
        # Queries per tile. With few queries and many keys, as in decoding, a tile is cut to the number of queries.
        self.height = self.q_len if self.row_blocks == 1 else block_q
        self.bits = words.view(-1, block_q, bitmask.words_per_row(block_k))[:, : self.height]
        self.dtype = torch.promote_types(q.dtype, torch.float32)

    def cut(self, x: Tensor, block: int, *, last: bool = False) -> Tensor:
        """Cuts `[B, H, N, D]` into tiles `[B * H, ceil(N / block), block, D]`. The padding is zeros, or the last token
        if `last`: a score modification need only be finite for scores of tokens.
        """
        batch, heads, length, dim = x.shape
        count = -(-length // block)
        padded = x.new_zeros(batch * heads, count * block, dim, dtype=self.dtype)
        padded[:, :length] = x.reshape(batch * heads, length, dim)
        if last:
            padded[:, length:] = padded[:, length - 1 : length]
        return padded.view(batch * heads, count, block, dim)

    def join(self, x: Tensor, like: Tensor) -> Tensor:
        """The inverse of `cut`, for the lengths of `like`: `[B * H, M, block, ...]` to `[B, H, N, ...]`."""
        batch, heads, length = like.shape[:3]
        return x.reshape(batch, heads, -1, *x.shape[3:])[:, :, :length]

    def products(self, part: Rows, q_tiles: Tensor, k_tiles: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """`(scores [n, R, height, c * block_k], queries, key heads [n])`. Dead scores are included."""
        keys = part.heads // self.heads * self.kv_heads + part.heads % self.heads // (self.heads // self.kv_heads)
        queries = q_tiles[part.heads[:, None], part.rows[None, :]]  # [n, R, height, D]
        return (queries @ self.gather(k_tiles, keys, part.cols).transpose(-1, -2)) * scale, queries, keys

    def of_live(self, part: Rows, scores: Tensor) -> Tensor:
        live = self.live(part)
        return scores if live is None else scores.masked_fill_(~live, -torch.inf)

    def place(self, part: Rows) -> Place:
        rows, device = len(part.rows), part.rows.device
        q = part.rows[:, None] * self.block_q + torch.arange(self.height, device=device)
        k = part.cols[:, :, None] * self.block_k + torch.arange(self.block_k, device=device)
        heads = part.heads.view(-1, 1, 1, 1)
        return Place(
            heads // self.heads, heads % self.heads, q.clamp(max=self.q_len - 1).unsqueeze(-1),
            k.clamp(max=self.k_len - 1).view(rows, 1, -1), self.k_len - self.q_len,
            part.numbers.repeat_interleave(self.block_k, dim=1).unsqueeze(1),
        )  # fmt: skip

    def sink(self, part: Rows, changes: Scores | None) -> Tensor | None:
        """The logits of the heads' sinks, `[n, 1, 1]`."""
        found = None if changes is None else changes.find("sink")
        return None if found is None else found.logits[part.heads % self.heads].view(-1, 1, 1).to(self.dtype)

    def sink_weights(self, part: Rows, changes: Scores | None, maximum: Tensor, total: Tensor) -> Tensor | None:
        """The softmax weights of the sinks, 0 for queries without keys; `[n, R, height, 1]`, as maximum and total."""
        sink = self.sink(part, changes)
        if sink is None:
            return None
        empty = total == 0  # queries without keys: their maximum of 0 does not bound the sink
        return torch.exp((sink.unsqueeze(-1) - maximum).masked_fill(empty, -torch.inf)) / total.masked_fill(empty, 1.0)

    def add_sinks(self, part: Rows, learned: Sequence[Tensor | None], weights: Tensor, drow: Tensor) -> None:
        """Adds the gradients of the sinks. `drow`: the gradient of a sink's score, divided by its weight."""
        zeros = learned[-1]
        if zeros is not None:
            zeros.index_add_(0, part.heads % self.heads, (weights * drow).sum((1, 2, 3)).to(zeros.dtype))

    def live(self, part: Rows) -> Tensor | None:
        """The live scores, bool `[R, height, c * block_k]`, or `[n, R, ...]` with lengths; None if all are live."""
        rows, count = part.cols.shape
        live = None
        if bool((part.tile > 0).any()):
            words = bitmask.choices(self.bits, self.block_k)
            live = bitmask.unpack(words[part.tile], self.block_k)  # [R, c, height, block_k]
            live = live.transpose(1, 2).reshape(rows, self.height, count * self.block_k)
        if part.stop is not None:
            device = part.rows.device
            k = part.cols[:, :, None] * self.block_k + torch.arange(self.block_k, device=device)
            q = part.rows[:, None] * self.block_q + torch.arange(self.height, device=device)
            q_stop, k_stop = part.stop.view(-1, 2, 1, 1).unbind(1)  # [n, 1, 1]
            inside = (q < q_stop).unsqueeze(-1) & (k.view(rows, -1) < k_stop).unsqueeze(-2)
            live = inside if live is None else live & inside
        return live

    def kept(self, part: Rows, dropout: Dropout) -> Tensor:
        """The factors of the weights under dropout, 0 or the amplification: `[n, R, height, c * block_k]`."""
        rows, device = len(part.cols), part.cols.device
        per_block = self.block_k // GROUP
        group = (part.cols[:, :, None] * per_block + torch.arange(per_block, device=device)).reshape(rows, 1, -1)
        query = (part.rows[:, None] * self.block_q + torch.arange(self.height, device=device)).unsqueeze(-1)
        keep = kept(dropout, part.heads.view(-1, 1, 1, 1), query, group)
        return keep.to(self.dtype) * amplification(dropout.dropped)

    def gather(self, x_tiles: Tensor, heads: Tensor, cols: Tensor) -> Tensor:
        """The tokens of the tiles `cols [R, c]`, side by side: `[n, R, c * block, D]`."""
        chosen = x_tiles[heads[:, None, None], cols[None]]  # [n, R, c, block, D]
        return chosen.reshape(len(heads), len(cols), -1, x_tiles.shape[-1])

    def scatter_add(self, into: Tensor, heads: Tensor, cols: Tensor, values: Tensor) -> None:
        slots = (heads[:, None, None] * into.shape[1] + cols[None]).reshape(-1)
        into.view(-1, *into.shape[2:]).index_add_(0, slots, values.reshape(-1, *into.shape[2:]))

    def parts(self) -> Iterator[Rows]:
        """Yields the rows to compute, a bounded number of scores at a time."""
        for number, heads, blocks in self._patterns():
            for rows, cols, tile, numbers in self._rows_by_count(number, blocks):
                count = cols.shape[1]
                if count == 0:
                    continue
                a_row = self.block_q * self.block_k * count
                some_heads = max(1, min(len(heads), _SCORES_AT_ONCE // a_row))
                some_rows = max(1, _SCORES_AT_ONCE // (a_row * some_heads))
                for h in heads.split(some_heads):
                    stop = None if self.stops is None else self.stops[h]
                    for r in range(0, len(rows), some_rows):
                        here = slice(r, r + some_rows)
                        yield Rows(h, rows[here], cols[here], tile[here], numbers[here], stop)

    def _patterns(self) -> Iterator[tuple[int, Tensor, Blocks | None]]:
        """With lengths, only sequences with the same number of live blocks are yielded together; `blocks` are those
        numbers.
        """
        keys = self.pattern.long().unsqueeze(1)
        if self.stops is not None:
            keys = torch.cat([keys, -(-self.stops // self.stops.new_tensor([self.block_q, self.block_k]))], dim=1)
        kinds, which = torch.unique(keys, dim=0, return_inverse=True)
        for kind, (number, *blocks) in enumerate(kinds.tolist()):
            yield number, (which == kind).nonzero().squeeze(1), tuple(blocks) or None

    def _rows_by_count(self, number: int, blocks: Blocks | None) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        if blocks is not None:
            return self._counted_rows(number, blocks)
        return once(mask_cache(self.indices), ("rows by count", number), lambda: self._counted_rows(number, None))

    def _counted_rows(self, number: int, blocks: Blocks | None) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        rows, span = entries_of_pattern(self.indptr, number, self.row_blocks)
        cols, tile = self.indices[span].long(), self.tile[span].long()
        numbers = torch.arange(span.start, span.stop, device=rows.device)
        if blocks is not None:
            inside = (rows < blocks[0]) & (cols < blocks[1])
            rows, cols, tile, numbers = rows[inside], cols[inside], tile[inside], numbers[inside]
        counts = torch.bincount(rows, minlength=self.row_blocks)
        groups = []
        for count in counts.unique().tolist():
            chosen = counts == count
            entries = chosen[rows]
            shape = (int(chosen.sum()), count)
            of_rows = cols[entries].view(shape), tile[entries].view(shape), numbers[entries].view(shape)
            groups.append((chosen.nonzero().squeeze(1), *of_rows))
        return groups


@bounded(maxsize=16)
def _dense(q_len: int, k_len: int, block_q: int, block_k: int, device: torch.device) -> BlockMask:
    return BlockMask.dense(q_len, k_len, block=(block_q, block_k)).to(device)
