"""Assigns chunks of tokens to ranks: equal counts, balanced live tiles, few remote keys.

The cheapest of several assignments is taken: contiguous runs, two runs a rank (zigzag, which balances causal masks),
chunks dealt in turn or by live area, and runs balanced by exchanging chunks between the most and the least loaded rank.
All are computed in integers or a fixed order, so every rank finds the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.arguments import BLOCKS
from sparseflash.blockmask.stats import pattern_count
from sparseflash.distributed.shards import Integers, Shards

# The cost of a remote key, in live scores, forward and backward, by `costs.H100` in bf16: a key, a value and their
# gradients take 2 * 4 D / 300e9 s, a score 3.5 * 4 D operations at 400e12 a second; the quotient is 760. Estimated,
# without the part that attention hides.
SCORES_PER_REMOTE_KEY = 800
_CHUNKS = 512  # more chunks than this are merged, because planning takes time with their square, ...
_CHUNKS_A_RANK, _MOST_CHUNKS = 16, 4096  # ... unless there are too few for each rank to be balanced
_UNEVEN = 0.05  # chunks are merged less if the ranks' counts of tokens would differ by more than this share
_SWAPS = 64  # or four a rank
_TO_SWAP = 64  # chunks of a rank that are considered for a swap
_BALANCED = 0.02  # a difference of loads, relative to their mean, that is not worth a swap


@dataclass(frozen=True, eq=False)
class Assignment:
    """The shards of both sides, which are the same object if queries and keys are the same tokens."""

    queries: Shards
    keys: Shards
    name: str  # of the candidate

    @property
    def digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for shards in (self.queries, self.keys):
            digest.update(repr((shards.length, shards.chunk)).encode() + shards.rank_of_chunk.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class _Work:
    """`area`: float64 `[Cq, Ck]`, live tiles of each pair, in shares of all heads and batch elements; `packed`: uint8
    `[Cq, ceil(Ck / 8)]`, a bit for each pair with a live tile.
    """

    area: NDArray[np.float64]
    packed: NDArray[np.uint8]
    rows: NDArray[np.float64]  # [Cq], area of each chunk of queries
    scores_per_tile: int
    chunk_k: int


def assign(mask: BlockMask, ranks: int) -> Assignment:
    """The cheapest assignment of the tokens of a canonical mask without lengths, on the CPU, to `ranks` ranks.

    Equally many queries and keys are the same tokens. Raises ValueError if there are fewer blocks than ranks.
    """
    same = mask.q_len == mask.k_len
    block_q, block_k = (max(mask.block_q, mask.block_k),) * 2 if same else (mask.block_q, mask.block_k)
    chunk_q, chunk_k = _chunk(mask.q_len, block_q, ranks), _chunk(mask.k_len, block_k, ranks)
    count_q, count_k = -(-mask.q_len // chunk_q), -(-mask.k_len // chunk_k)
    for side, count, block in (("queries", count_q, block_q), ("keys", count_k, block_k)):
        if count < ranks:
            smaller = f", or smaller blocks: mask.reblock({block // 2})" if block > BLOCKS[0] else ""
            raise ValueError(
                f"mask must have at least one block of {side} for each of the {ranks} ranks; got {count} blocks of "
                f"{block} tokens. Use a smaller group{smaller}."
            )
    work = _work(mask, chunk_q, chunk_k, count_q, count_k)
    keys = None if same else contiguous(count_k, ranks)

    def cost(candidate: tuple[str, Integers]) -> float:
        queries = candidate[1]
        return _cost(work, queries, queries if keys is None else keys, ranks)

    name, queries = min(_candidates(work, ranks, same), key=cost)
    q_shards = Shards(mask.q_len, chunk_q, queries)
    return Assignment(q_shards, q_shards if keys is None else Shards(mask.k_len, chunk_k, keys), name)


def _chunk(length: int, block: int, ranks: int) -> int:
    """Tokens a chunk: the block, doubled until there are few chunks, unless they would then be dealt unevenly."""

    def count(times: int) -> int:
        return -(-length // (block * times))

    times, most = 1, max(_CHUNKS, min(_CHUNKS_A_RANK * ranks, _MOST_CHUNKS), 4 * ranks)
    while count(times) > most:
        times *= 2
    while times > 1 and count(times) < 2 * most and -(-count(times) // ranks) * ranks > (1 + _UNEVEN) * count(times):
        times //= 2
    return block * times


def _work(mask: BlockMask, chunk_q: int, chunk_k: int, count_q: int, count_k: int) -> _Work:
    row_blocks, patterns = mask.blocks[0], pattern_count(mask)
    counts = np.diff(mask.indptr.numpy())
    row_chunk = np.tile(np.arange(row_blocks) // (chunk_q // mask.block_q) * count_k, patterns)
    pair = row_chunk.repeat(counts)
    pair += mask.indices.numpy() // (chunk_k // mask.block_k)
    area = (
        np.bincount(pair, shares_of_tiles(mask, counts), minlength=count_q * count_k)
        .astype(np.float64)
        .reshape(count_q, count_k)
    )
    packed = np.packbits(area > 0, axis=1)
    return _Work(area, packed, area.sum(1), mask.block_q * mask.block_k, chunk_k)


def shares_of_tiles(mask: BlockMask, counts: Integers) -> NDArray[np.float64] | None:
    """The share of heads and batch elements that have each stored tile; None if all have all. counts: tiles of each
    block row of each pattern.
    """
    row_blocks, patterns = mask.blocks[0], pattern_count(mask)
    if patterns == 1:
        return None
    uses = np.bincount(mask.pattern.numpy().reshape(-1), minlength=patterns) / mask.pattern.numel()
    return uses.repeat(row_blocks).repeat(counts)


def _candidates(work: _Work, ranks: int, same: bool) -> Iterator[tuple[str, Integers]]:
    count = len(work.rows)
    runs = contiguous(count, ranks)
    yield "contiguous", runs
    if ranks == 1:
        return
    yield "zigzag", zigzag(count, ranks)
    yield "interleaved", np.arange(count) % ranks
    yield "dealt by live area", _dealt(work.rows, ranks)
    if same:
        yield "contiguous, balanced by swaps", _balanced(work, runs, ranks)


def contiguous(count: int, ranks: int) -> Integers:
    """The rank of each of `count` chunks: one run a rank, of sizes that differ by at most one.

    The last runs are the longer ones, because the last chunk may be ragged.

    >>> contiguous(5, 2).tolist()
    [0, 0, 1, 1, 1]
    """
    return np.arange(ranks).repeat(_quotas(count, ranks)[::-1])


def zigzag(count: int, ranks: int) -> Integers:
    """The rank of each of `count` chunks: a run from the front and one from the back a rank.

    >>> zigzag(8, 2).tolist()
    [0, 0, 1, 1, 1, 1, 0, 0]
    """
    quotas = _quotas(count, ranks)
    first = (quotas + 1) // 2
    numbers = np.arange(ranks)
    return np.concatenate([numbers.repeat(first), numbers[::-1].repeat((quotas - first)[::-1])])


def _quotas(count: int, ranks: int) -> Integers:
    return count // ranks + (np.arange(ranks) < count % ranks)


def _dealt(area: NDArray[np.float64], ranks: int) -> Integers:
    order = np.argsort(-area, kind="stable")
    turn, rank = np.divmod(np.arange(len(area)), ranks)
    dealt = np.empty_like(order)
    dealt[order] = np.where(turn % 2, ranks - 1 - rank, rank)
    return dealt


def _balanced(work: _Work, runs: Integers, ranks: int) -> Integers:
    """Swaps chunks between the most and the least loaded rank until they are nearly even, preferably chunks that stay
    beside those they share scores with."""
    rank_of = runs.copy()
    load = np.bincount(rank_of, work.rows, minlength=ranks)
    touches: NDArray[np.float32] | None = None
    for _ in range(max(_SWAPS, 4 * ranks)):
        most, least = int(load.argmax()), int(load.argmin())
        gap = load[most] - load[least]
        if gap <= _BALANCED * load.mean():
            break
        if touches is None:
            touches = ((work.area > 0) | (work.area > 0).T).astype(np.float32)
            near = np.stack([touches[:, rank_of == r].sum(1) for r in range(ranks)], axis=1)  # [C, R]
        given, taken = (_spread(np.flatnonzero(rank_of == rank), work.rows) for rank in (most, least))
        moved = work.rows[given][:, None] - work.rows[taken]
        gain = np.minimum(moved, gap - moved)
        if gain.max() <= 0:
            break
        lost = (near[given, most] - near[given, least])[:, None] + (near[taken, least] - near[taken, most])
        choice = int(np.where(gain >= 0.5 * gain.max(), lost, np.inf).argmin())
        a, b = given[choice // len(taken)], taken[choice % len(taken)]
        change = work.rows[a] - work.rows[b]
        load[most] -= change
        load[least] += change
        rank_of[a], rank_of[b] = least, most
        change_of_near = touches[:, b] - touches[:, a]
        near[:, most] += change_of_near
        near[:, least] -= change_of_near
    return rank_of


def _spread(chunks: Integers, area: NDArray[np.float64]) -> Integers:
    """All chunks if they are few, otherwise some with areas spread over the whole range."""
    if len(chunks) <= _TO_SWAP:
        return chunks
    chosen = np.arange(_TO_SWAP) * (len(chunks) - 1) // (_TO_SWAP - 1)
    return chunks[np.argsort(area[chunks], kind="stable")[chosen]]


def _cost(work: _Work, queries: Integers, keys: Integers, ranks: int) -> float:
    """The live scores of the most loaded rank, plus the cost of the most remote keys of a rank, in live scores."""
    load = np.bincount(queries, work.rows, minlength=ranks)
    order = np.argsort(queries, kind="stable")
    starts = np.searchsorted(queries[order], np.arange(ranks))
    needed = np.bitwise_or.reduceat(work.packed[order], starts, axis=0)
    remote = np.unpackbits(needed, axis=1, count=len(keys)).astype(np.bool_)  # [R, Ck]
    remote &= keys != np.arange(ranks)[:, None]
    received = remote.sum(1)
    sent = np.bincount(keys, remote.sum(0), minlength=ranks)
    busiest = max(int(received.max()), int(sent.max())) * work.chunk_k
    return float(load.max()) * work.scores_per_tile + SCORES_PER_REMOTE_KEY * busiest
