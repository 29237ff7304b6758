"""The CPU backend: PyTorch over the live tiles only, with gradients, in fp16, bf16, fp32 and fp64.

Block rows with the same number of tiles are computed together: the keys and values of their tiles are gathered side by
side, and the rest is ordinary softmax attention over those. A bounded number of scores exists at a time (but at least
those of one block row), and the backward recomputes them, so memory grows with the inputs and the mask, not with `Nq *
Nk`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.problem import Problem
from sparseflash.backends.registration import Operator, empty_gradient, empty_lse, empty_out
from sparseflash.backends.scored import ScoredOperator
from sparseflash.blockmask import BlockMask, bitmask
from sparseflash.blockmask.cache import bounded, mask_cache, once
from sparseflash.blockmask.csr import row_of_entry
from sparseflash.dropout import GROUP, Dropout, amplification, kept
from sparseflash.scores.change import Place, Scores

_SCORES_AT_ONCE = 1 << 22  # 16 MB in fp32, which nearly fits the cache; larger chunks were not faster


Stop = tuple[int, int]


class _Rows(NamedTuple):
    """Block rows of one pattern that have the same number c of tiles, for the heads that use the pattern."""

    heads: Tensor  # [n], indices of (batch element, query head)
    rows: Tensor  # [R], block rows
    cols: Tensor  # [R, c], block columns
    tile: Tensor  # [R, c]
    stop: Stop | None  # the sequence's live queries and keys, if the mask has lengths


def _as_given(function: Callable[..., Any]) -> Callable[..., Any]:
    """Disables autocast: the inputs have been cast already, and what is computed in fp32 here must stay in fp32."""

    @wraps(function)
    def run(q: Tensor, *rest: Any) -> Any:
        with torch.autocast(q.device.type, enabled=False):
            return function(q, *rest)

    return run


@_as_given
def _forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, changes: Scores | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:
        return empty_out(q, v).zero_(), empty_lse(q).fill_(-torch.inf), _empty_kept(q)
    mask, scale, dropout = _Mask(q, k, problem), problem.scale, problem.dropout
    q_tiles, k_tiles = mask.cut(q, mask.height, last=True), mask.cut(k, mask.block_k, last=True)
    v_tiles = mask.cut(v, mask.block_k)
    out = q_tiles.new_zeros(*q_tiles.shape[:-1], v.shape[-1])  # [B * Hq, Mq, height, Dv]
    maximum, total = q_tiles.new_zeros(q_tiles.shape[:-1]), q_tiles.new_zeros(q_tiles.shape[:-1])
    for part in mask.parts():
        scores, _, keys = mask.products(part, q_tiles, k_tiles, scale)
        if changes is not None:
            scores = changes.changed(scores, mask.place(part))
        scores = mask.of_live(part, scores)
        highest = scores.amax(-1)  # [n, R, height]
        empty = highest == -torch.inf
        sink = mask.sink(part, changes)
        if sink is not None:
            highest = torch.maximum(highest, sink)
        # For a query without keys the maximum is -inf, and -inf - -inf is NaN; 0 gives exp(-inf) = 0.
        highest = highest.masked_fill(empty, 0.0)
        weights = torch.exp(scores - highest.unsqueeze(-1))
        where = part.heads[:, None], part.rows[None, :]
        maximum[where], total[where] = highest, weights.sum(-1)
        if sink is not None:
            total[where] += torch.exp(sink - highest).masked_fill(empty, 0.0)
        if dropout is not None:
            weights *= mask.kept(part, dropout)
        out[where] = _product(weights, mask.gather(v_tiles, keys, part.cols)) / _or_one(total[where]).unsqueeze(-1)
    lse = empty_lse(q).copy_(mask.join(maximum + torch.log(total), q))
    kept = _empty_kept(q)
    kept[0], kept[1] = mask.join(maximum, q), mask.join(total, q)
    return empty_out(q, v).copy_(mask.join(out, q)), lse, kept


@_as_given
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor,
    problem: Problem, changes: Scores | None = None, learned: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """learned: zeros for each tensor of `changes`, to which its gradient is added; None for no gradient."""
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    mask, scale, dropout = _Mask(q, k, problem), problem.scale, problem.dropout
    q_tiles, k_tiles = mask.cut(q, mask.height, last=True), mask.cut(k, mask.block_k, last=True)
    v_tiles = mask.cut(v, mask.block_k)
    dout_tiles = mask.cut(dout, mask.height)
    maximum, total = (mask.cut(x.unsqueeze(-1), mask.height).squeeze(-1) for x in kept)
    # A query without keys has weights 0, whatever its dlse, which may be NaN.
    dlse = torch.zeros_like(lse) if dlse is None else dlse.masked_fill(lse == -torch.inf, 0.0)
    dlse_tiles = mask.cut(dlse.unsqueeze(-1), mask.height).squeeze(-1)
    dq, dk, dv = torch.zeros_like(q_tiles), torch.zeros_like(k_tiles), torch.zeros_like(v_tiles)
    for part in mask.parts():
        scores, queries, keys = mask.products(part, q_tiles, k_tiles, scale)
        steps: list[Tensor] = []
        if changes is not None:
            steps = changes.steps(scores, mask.place(part))
            scores = steps[-1].clone()
        scores = mask.of_live(part, scores)
        where = part.heads[:, None], part.rows[None, :]
        weights = torch.exp(scores - maximum[where].unsqueeze(-1))  # [n, R, height, c * block_k]
        weights /= _or_one(total[where]).unsqueeze(-1)
        dout_rows = dout_tiles[where]
        dweights = dout_rows @ mask.gather(v_tiles, keys, part.cols).transpose(-1, -2)
        passed = weights
        if dropout is not None:
            kept_weights = mask.kept(part, dropout)
            dweights *= kept_weights
            passed = weights * kept_weights
        delta = (weights * dweights).sum(-1)
        # dlse is added last: if one key has all the weight, the other terms cancel exactly.
        dscores = weights * (dweights - delta.unsqueeze(-1) + dlse_tiles[where].unsqueeze(-1))
        if changes is not None:
            dscores = changes.gradient(dscores, steps, mask.place(part), learned)
        dscores = dscores * scale
        dq[where] = _product(dscores, mask.gather(k_tiles, keys, part.cols))
        mask.scatter_add(dv, keys, part.cols, _product(passed.transpose(-1, -2), dout_rows))
        mask.scatter_add(dk, keys, part.cols, _product(dscores.transpose(-1, -2), queries))
        if changes is not None:
            mask.add_sinks(part, changes, learned, maximum[where], total[where], dlse_tiles[where] - delta)
    return (
        empty_gradient(q).copy_(mask.join(dq, q)),
        empty_gradient(k).copy_(mask.join(dk, k)),
        empty_gradient(v).copy_(mask.join(dv, v)),
    )


def _empty_kept(q: Tensor) -> Tensor:
    """Room for the maximum and the sum of exponentials of every query: `[2, B, Hq, Nq]`."""
    return q.new_empty((2, *q.shape[:-1]), dtype=torch.promote_types(q.dtype, torch.float32))


attention = Operator("blockwise", _forward, _backward, _empty_kept)


def _scored_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor,
    changes: Scores, wanted: Sequence[bool], problem: Problem,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:  # fmt: skip
    """Gradients of tensors are summed in the precision in which everything is computed."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    learned = [
        torch.zeros(x.shape, dtype=torch.promote_types(dtype, x.dtype), device=x.device) if wants else None
        for x, wants in zip(changes.tensors(), wanted, strict=True)
    ]
    gradients = _backward(dout, dlse, q, k, v, out, lse, kept, problem, changes, learned)
    return *gradients, learned


scored_attention = ScoredOperator("blockwise", _forward, _scored_backward, _empty_kept)


class _Mask:
    """The mask's arrays together with the shapes of the inputs: cuts tensors into tiles and lists the rows to
    compute.
    """

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
        self.lengths = lengths
        self.block_q, self.block_k = block_q, block_k
        self.row_blocks = -(-self.q_len // block_q)
        # Queries per tile. With few queries and many keys, as in decoding, a tile has only as many as there are.
        self.height = self.q_len if self.row_blocks == 1 else block_q
        self.bits = words.view(-1, block_q, bitmask.words_per_row(block_k))[:, : self.height]
        self.dtype = torch.promote_types(q.dtype, torch.float32)  # half precision is computed in fp32

    def cut(self, x: Tensor, block: int, *, last: bool = False) -> Tensor:
        """Cuts `[B, H, N, D]` into tiles `[B * H, ceil(N / block), block, D]`, padded with zeros, or the last token.

        Queries and keys are padded with the last one: a change of scores must be finite, with its derivatives, for the
        scores of tokens, but need not be for 0.
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

    def products(self, part: _Rows, q_tiles: Tensor, k_tiles: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """All scores `[n, R, height, c * block_k]`, dead ones, too, the queries, and the key heads `[n]`."""
        keys = part.heads // self.heads * self.kv_heads + part.heads % self.heads // (self.heads // self.kv_heads)
        queries = q_tiles[part.heads[:, None], part.rows[None, :]]  # [n, R, height, D]
        return (queries @ self.gather(k_tiles, keys, part.cols).transpose(-1, -2)) * scale, queries, keys

    def of_live(self, part: _Rows, scores: Tensor) -> Tensor:
        """The scores with -inf for dead ones, in place."""
        live = self.live(part)
        return scores if live is None else scores.masked_fill_(~live, -torch.inf)

    def place(self, part: _Rows) -> Place:
        """Where the scores of these rows lie; those past the ends, which are dead, are placed at the ends."""
        rows, device = len(part.rows), part.rows.device
        q = part.rows[:, None] * self.block_q + torch.arange(self.height, device=device)
        k = part.cols[:, :, None] * self.block_k + torch.arange(self.block_k, device=device)
        heads = part.heads.view(-1, 1, 1, 1)
        return Place(
            heads // self.heads, heads % self.heads, q.clamp(max=self.q_len - 1).unsqueeze(-1),
            k.clamp(max=self.k_len - 1).view(rows, 1, -1), self.k_len - self.q_len,
        )  # fmt: skip

    def sink(self, part: _Rows, changes: Scores | None) -> Tensor | None:
        """The logits of the heads' sinks, `[n, 1, 1]`."""
        found = None if changes is None else changes.find("sink")
        return None if found is None else found.logits[part.heads % self.heads].view(-1, 1, 1).to(self.dtype)

    def add_sinks(
        self, part: _Rows, changes: Scores, learned: Sequence[Tensor | None], maximum: Tensor, total: Tensor,
        drow: Tensor,
    ) -> None:  # fmt: skip
        """Adds the gradients of the sinks; `drow`: of the score of a key without a value, divided by its weight."""
        sink = self.sink(part, changes)
        zeros = learned[-1] if sink is not None else None  # a sink is the last change and has one tensor
        if sink is None or zeros is None:
            return
        weights = torch.exp(sink - maximum) / total.masked_fill(total == 0, torch.inf)
        zeros.index_add_(0, part.heads % self.heads, (weights * drow).sum((1, 2)).to(zeros.dtype))

    def live(self, part: _Rows) -> Tensor | None:
        """The live scores, bool `[R, height, c * block_k]`, or None if every score of these rows is live."""
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
            q_stop, k_stop = part.stop
            inside = (q < q_stop)[:, :, None] & (k < k_stop).reshape(rows, 1, -1)
            live = inside if live is None else live & inside
        return live

    def kept(self, part: _Rows, dropout: Dropout) -> Tensor:
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
        """The transpose of `gather`."""
        slots = (heads[:, None, None] * into.shape[1] + cols[None]).reshape(-1)
        into.view(-1, *into.shape[2:]).index_add_(0, slots, values.reshape(-1, *into.shape[2:]))

    def parts(self) -> Iterator[_Rows]:
        """Yields the rows to compute, a bounded number of scores at a time."""
        for number, heads, stop in self._patterns():
            for rows, cols, tile in self._rows_by_count(number, stop):
                count = cols.shape[1]
                if count == 0:
                    continue  # these queries have no key
                a_row = self.block_q * self.block_k * count
                some_heads = max(1, min(len(heads), _SCORES_AT_ONCE // a_row))
                some_rows = max(1, _SCORES_AT_ONCE // (a_row * some_heads))
                for h in heads.split(some_heads):
                    for r in range(0, len(rows), some_rows):
                        here = slice(r, r + some_rows)
                        yield _Rows(h, rows[here], cols[here], tile[here], stop)

    def _patterns(self) -> Iterator[tuple[int, Tensor, Stop | None]]:
        """Yields each pattern in use, the indices of (batch element, head) that use it, and their lengths, if any."""
        keys = self.pattern.long().unsqueeze(0)
        if self.lengths is not None:
            keys = torch.cat([keys, self.lengths.long().repeat_interleave(self.heads, dim=1)])
        kinds, which = torch.unique(keys, dim=1, return_inverse=True)
        for kind, (number, *stop) in enumerate(kinds.T.tolist()):
            yield number, (which == kind).nonzero().squeeze(1), tuple(stop) or None

    def _rows_by_count(self, number: int, stop: Stop | None) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The block rows of a pattern, grouped by their number of tiles, without tiles past the lengths."""
        if stop is not None:
            return self._counted_rows(number, stop)
        return once(mask_cache(self.indices), ("rows by count", number), lambda: self._counted_rows(number, None))

    def _counted_rows(self, number: int, stop: Stop | None) -> list[tuple[Tensor, Tensor, Tensor]]:
        indptr = self.indptr[number * self.row_blocks : (number + 1) * self.row_blocks + 1].long()
        first, last = int(indptr[0]), int(indptr[-1])
        cols, tile = self.indices[first:last].long(), self.tile[first:last].long()
        rows = row_of_entry(indptr - first, last - first)
        if stop is not None:
            inside = (rows * self.block_q < stop[0]) & (cols * self.block_k < stop[1])
            rows, cols, tile = rows[inside], cols[inside], tile[inside]
        counts = torch.bincount(rows, minlength=self.row_blocks)
        groups = []
        for count in counts.unique().tolist():
            chosen = counts == count
            entries = chosen[rows]
            shape = (int(chosen.sum()), count)
            groups.append((chosen.nonzero().squeeze(1), cols[entries].view(shape), tile[entries].view(shape)))
        return groups


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, as exact for a single column as for several: BLAS sums that one term by term."""
    return a @ b if b.shape[-1] > 1 else (a * b.mT).sum(-1, keepdim=True)


def _or_one(total: Tensor) -> Tensor:
    """The sums, with 1 for queries without keys, whose weights are 0 anyway."""
    return total.masked_fill(total == 0, 1.0)


@bounded(maxsize=16)
def _dense(q_len: int, k_len: int, block_q: int, block_k: int, device: torch.device) -> BlockMask:
    return BlockMask.dense(q_len, k_len, block=(block_q, block_k)).to(device)
