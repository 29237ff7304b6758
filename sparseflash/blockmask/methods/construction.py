"""The constructors of `BlockMask`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.arguments import Block, block_pair, checked_device, token_counts
from sparseflash.blockmask.build import SCORES_AT_ONCE, arrays_of_rows
from sparseflash.blockmask.by_name import by_name
from sparseflash.blockmask.compiling import constant_when_compiled
from sparseflash.blockmask.constructors import of_dense, of_layout, of_tiles
from sparseflash.blockmask.methods import mask_method, method
from sparseflash.blockmask.rules import Candidates, Live, call_rule, tiles_of_rule
from sparseflash.blockmask.threads import one_thread
from sparseflash.limits import check_count

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask


@by_name
@partial(constant_when_compiled, calls=call_rule)
@method
def from_function(
    cls: type[BlockMask],
    live: Live,
    q_len: int,
    k_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    block: Block = 128,
    candidates: Candidates | None = None,
    device: torch.device | str | None = None,
) -> BlockMask:
    """The mask of the scores where `live(q_idx, k_idx)` is true, shared by all heads and batch elements. With
    `batch` or `heads`, the rule is `live(b, h, q_idx, k_idx)`, FlexAttention's `mask_mod`.

    >>> BlockMask.from_function(lambda q, k: k <= q, 256, block=64)
    BlockMask(256 x 256, blocks of 64, 10 tiles: 6 full + 4 partial (1 distinct), density 50.2 %)
    >>> near = BlockMask.from_function(
    ...     lambda q, k: (q - k).abs() <= 8, 4096, block=64, candidates=lambda i, j: (i - j).abs() <= 1)
    >>> near == BlockMask.from_function(lambda q, k: (q - k).abs() <= 8, 4096, block=64)
    True
    >>> from torch.nn.attention.flex_attention import and_masks
    >>> mask_mod = and_masks(lambda b, h, q, k: k <= q, lambda b, h, q, k: q - k < 64 << h)
    >>> BlockMask.from_function(mask_mod, 256, heads=4, block=64)
    BlockMask(256 x 256, blocks of 64, 26 tiles: 9 full + 17 partial (2 distinct), density 40 %,
    3 patterns for 1 x 4 (batch x heads))

    Args:
        live: the rule, written for one score: `live(q_idx, k_idx)` takes two int64 tensors without dimensions and
            returns one bool. With `batch` or `heads` it is `live(b, h, q_idx, k_idx)`, as a `mask_mod` of
            FlexAttention. It may read tensors: `table[q][k]`, `(labels[q] & labels[k]).any()`, `x, y = grid[q]`.
            Write it with `&`, `|`, `~`, `torch.minimum`, `torch.maximum` and `torch.where`; on positions `and`,
            `or`, `not`, `min`, `max`, `if` and chained comparisons such as `0 <= q - k < 64` do not work.
        q_len, k_len: tokens; `k_len` defaults to `q_len`.
        batch, heads: the numbers of batch elements and of heads with masks of their own. A rule of four arguments
            needs at least one of them, 1 if all share one mask; the other one is then 1 by default. A rule of two
            arguments takes neither. Unlike positions, b and h may be read by Python: `slopes[int(h)]`, `if h == 3`.
            A rule that never reads `h` is evaluated once for all heads, and likewise for `b`; equal patterns are
            stored once. A rule that accepts both two and four arguments (`*args`) receives four if `batch` or
            `heads` is given.
        block: tokens per tile, a power of two from 16 to 256, or `(block_q, block_k)`.
        candidates: the tiles in which `live` is evaluated; all other tiles are dead. A bool block layout
            `[Mq, Mk]`; or a function of block indices `(i, j)` that returns a bool, itself called for all
            `Mq * Mk` tiles; or a list of tiles `(rows, cols)`, two int tensors `[E]` in any order without
            duplicates, for a time proportional to E. They must cover every live score; this is not checked.
        device: the device of the positions and of the mask; the CPU by default. Tensors that `live` reads must be
            there, too.

    `torch.vmap` calls the rule for about 2 million scores at once, never for the whole `N x N` matrix, so memory is
    bounded, and time is proportional to the number of tiles evaluated. If vmap cannot call the rule, it is called
    with tensors of many positions, which broadcast to one another, and must return a bool for each; samples of the
    results are compared with single calls.

    Build masks outside of functions that `torch.compile` compiles. Inside, the call is made once, at compile time,
    and the mask is a constant of the compiled code. The code is compiled again if a Python number that `live` or
    `candidates` reads has changed. Rules that read tensors, or that the compiler cannot trace, are refused there;
    pass the size of a tensor through `operator.index`.
    """
    block_q, block_k = block_pair(block)
    q_len, k_len = token_counts(q_len, q_len if k_len is None else k_len)
    device = checked_device("cpu" if device is None else device)
    if device.type == "meta":
        raise ValueError("device must be one that holds the mask's contents; got the meta device, which has none.")
    with one_thread(q_len * k_len <= SCORES_AT_ONCE):
        parts, numbers = tiles_of_rule(live, batch, heads, q_len, k_len, (block_q, block_k), candidates, device)
    with one_thread():
        return cls._of(q_len, k_len, block_q, block_k, parts, numbers)


@by_name
@constant_when_compiled
@method
def from_dense(cls: type[BlockMask], dense: Any, *, block: Block = 128) -> BlockMask:
    """The mask with the live scores of a dense boolean matrix.

    >>> BlockMask.from_dense(torch.ones(64, 64, dtype=torch.bool).tril(), block=32)
    BlockMask(64 x 64, blocks of 32, 3 tiles: 1 full + 2 partial (1 distinct), density 50.8 %)

    Args:
        dense: bool tensor or array `[Nq, Nk]`, `[Hq, Nq, Nk]` or `[B, Hq, Nq, Nk]`; True is live, and a leading
            dimension of 1 is shared.
        block: tokens per tile, a power of two from 16 to 256, or `(block_q, block_k)`.

    Raises TypeError if `dense` is not boolean, ValueError for another rank, an empty matrix or a bad block.
    """
    tiles = of_dense(dense, block)
    with one_thread():
        return cls._of(*tiles)


@by_name
@mask_method
def from_layout(
    cls: type[BlockMask], layout: Any, *, block: Block = 128, q_len: int | None = None, k_len: int | None = None
) -> BlockMask:
    """The mask of a boolean block layout: every tile is either fully live or fully dead.

    >>> BlockMask.from_layout(torch.eye(4, dtype=torch.bool), block=32, q_len=100, k_len=100)
    BlockMask(100 x 100, blocks of 32, 4 tiles: 3 full + 1 partial (1 distinct), density 30.9 %)

    Args:
        layout: bool tensor or array `[Mq, Mk]`, `[Hq, Mq, Mk]` or `[B, Hq, Mq, Mk]`, one entry per tile.
        block: tokens per tile, a power of two from 16 to 256, or `(block_q, block_k)`.
        q_len, k_len: tokens, by default `Mq * block_q` and `Mk * block_k`. They need not be multiples of the block,
            but must take exactly `Mq` and `Mk` blocks.
    """
    return cls._of(*of_layout(layout, block, q_len, k_len))


@by_name
@mask_method
def from_tiles(
    cls: type[BlockMask],
    rows: Any,
    cols: Any,
    q_len: int,
    k_len: int | None = None,
    *,
    block: Block = 128,
    tile: Any = None,
    live: Any = None,
) -> BlockMask:
    """The mask of a list of tiles, in any order and without duplicates; pattern builders use it.

    >>> i = torch.arange(8192)
    >>> BlockMask.from_tiles(i, i, 1_048_576)
    BlockMask(1048576 x 1048576, blocks of 128, 8192 tiles: 8192 full + 0 partial, density 0.0122 %)
    >>> triangle = torch.ones(64, 64, dtype=torch.bool).tril()
    >>> BlockMask.from_tiles([0, 1, 1], [0, 0, 1], 128, block=64, tile=[1, 0, 1], live=triangle[None])
    BlockMask(128 x 128, blocks of 64, 3 tiles: 1 full + 2 partial (1 distinct), density 50.4 %)

    Args:
        rows, cols: the block row and block column of each tile, integers `[E]`: tensors, arrays or lists.
        q_len, k_len: tokens; `k_len` defaults to `q_len`.
        block: tokens per tile, a power of two from 16 to 256, or `(block_q, block_k)`.
        tile: integers `[E]`, 0 for a full tile, t > 0 for a tile with the scores `live[t - 1]`. By default tile e
            has the scores `live[e]`, and T must be E.
        live: bool tensor or array `[T, block_q, block_k]`; its entries need not be distinct or partial. Without it
            and `tile`, all tiles are full.

    Scores past the ends are dropped. Time and memory are proportional to E and to the size of `live`.

    Raises TypeError if `rows`, `cols` or `tile` are not integers or `live` is not boolean, ValueError if a tile is
    out of range or listed twice, or if the shapes do not fit together.
    """
    return cls._of(*of_tiles(rows, cols, q_len, k_len, block, tile, live))


@by_name
@method
def from_block_index(
    cls: type[BlockMask],
    index: Tensor,
    counts: Tensor | None = None,
    *,
    block: Block = 128,
    q_len: int,
    k_len: int | None = None,
    causal: bool = False,
    group: int = 1,
) -> BlockMask:
    """The mask of chosen blocks: for each block of queries, a list of blocks of keys.

    >>> index = torch.tensor([[0, -1, -1], [1, 0, -1], [2, 0, 2]], dtype=torch.int32)
    >>> mask = BlockMask.from_block_index(index, block=32, q_len=96, causal=True)
    >>> mask.to_layout()[0, 0].int().tolist(), mask.dynamic
    ([[1, 0, 0], [1, 1, 0], [1, 0, 1]], True)
    >>> counts = torch.tensor([1, 2, 1])  # entries of each row that count
    >>> BlockMask.from_block_index(index, counts, block=32, q_len=96).to_layout()[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]

    Score (q, t) of head h, with `i = q // block_q`, is live iff

        t // block_k is in index[b, h, i, :counts[b, h, i]]   (and, if causal, t <= q + k_len - q_len)

    Args:
        index: numbers of blocks of keys, integers `[Mq, K]`, `[H, Mq, K]` or `[B, H, Mq, K]`, in any order, with or
            without repetitions. A number that no block has, such as -1, is ignored.
        counts: how many entries of each row are used, integers of the same shape without K; by default all K.
        block: tokens per tile, a power of two from 16 to 256, or `(block_q, block_k)`.
        q_len, k_len: tokens; `k_len` defaults to `q_len`.
        causal: drop keys after the query; the last query is at the last key.
        group: the number of query heads that share the choice of one head of `index`.

    This is the layout of cuDNN's and FlashInfer's block-sparse attention and of FastVideo's
    (`q2k_block_index`, `q2k_block_num`). For choices of each query (NSA's `topk_idx`, lists of tokens) see
    `masks.selected_keys`, for MoBA's gates `masks.top_k_keys`.

    The mask is dynamic and lies on the device of `index`. The host does not wait for the device: memory is reserved
    for K tiles in each row (if causal, for at most the causal tiles). A CUDA graph can record the call and replay
    it with other numbers in the same tensors. Time and memory are proportional to the lists.

    Raises TypeError for tensors that are not of integers, ValueError if `index` does not have one row for each
    block of queries or `counts` does not fit it.
    """
    from sparseflash.masks.block_index import mask_of_index

    return mask_of_index(index, counts, block, q_len, q_len if k_len is None else k_len, causal, group)


@by_name
@mask_method
def dense(cls: type[BlockMask], q_len: int, k_len: int | None = None, *, block: Block = 128) -> BlockMask:
    """The mask in which every score is live. `attention(q, k, v)` without a mask gives the same result and stores
    nothing.

    >>> BlockMask.dense(300, 200, block=128)
    BlockMask(300 x 200, blocks of 128, 6 tiles: 2 full + 4 partial (3 distinct), density 100 %)
    """
    block_q, block_k = block_pair(block)
    q_len, k_len = token_counts(q_len, q_len if k_len is None else k_len)
    row_blocks, col_blocks = -(-q_len // block_q), -(-k_len // block_k)
    check_count("tiles of a mask", row_blocks, col_blocks, remedy="Use larger blocks.")
    indptr = np.arange(row_blocks + 1) * col_blocks
    cols, full = np.tile(np.arange(col_blocks, dtype=np.int32), row_blocks), np.zeros(indptr[-1], dtype=np.int32)
    no_words = torch.zeros(0, block_q, bitmask.words_per_row(block_k), dtype=torch.int32, device="cpu")
    arrays = arrays_of_rows(q_len, k_len, block_q, block_k, indptr, cols, full, 0, no_words)
    return cls(q_len, k_len, block_q, block_k, *arrays)
