"""`BlockMask`: the live scores of an attention, as data.

The block structure in compressed sparse rows (CSR), plus one bit per score for the partly live tiles. This file has the
type and the documentation of its methods; the modules beside it implement them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
from torch import Tensor

from sparseflash.blockmask import bitmask
from sparseflash.blockmask.arguments import Block, block_pair, checked_device, checked_mask, token_counts
from sparseflash.blockmask.build import Part, arrays_of
from sparseflash.blockmask.cache import attach_cache, belong_together, mask_cache, once
from sparseflash.blockmask.compiling import constant_if_its_mask_is, constant_when_compiled
from sparseflash.blockmask.constructors import of_dense, of_layout, of_tiles
from sparseflash.blockmask.csr import columns_of, may_vary_in_size, stored_tiles
from sparseflash.blockmask.dynamic import canonical_arrays_of
from sparseflash.blockmask.lengths import Lengths, lengths_of
from sparseflash.blockmask.remedies import no_attribute, refuse
from sparseflash.blockmask.rules import Candidates, Live, call_rule, tiles_of_rule
from sparseflash.blockmask.stats import live_scores, live_tokens, pattern_count
from sparseflash.blockmask.summary import summary
from sparseflash.blockmask.transfer import to_device
from sparseflash.blockmask.validate import check_arrays, validate

if TYPE_CHECKING:
    from typing import ClassVar

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """The set of live scores of an attention over `q_len` queries and `k_len` keys.

    A window of three keys over 40 tokens in blocks of 16. There are four distinct partial tiles: one on each side of
    the diagonal, one on it, and the ragged last one:

    >>> mask = BlockMask.from_function(lambda q, k: (q - k).abs() <= 1, 40, block=16)
    >>> mask
    BlockMask(40 x 40, blocks of 16, 7 tiles: 0 full + 7 partial (4 distinct), density 7.38 %)
    >>> mask.indptr.tolist(), mask.indices.tolist(), mask.tile.tolist()
    ([0, 2, 5, 7], [0, 1, 0, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3, 4])

    The dense matrix, rebuilt from the arrays in four lines:

    >>> dense = torch.zeros(48, 48, dtype=torch.bool)
    >>> for i in range(3):
    ...     for e in range(mask.indptr[i], mask.indptr[i + 1]):
    ...         j, words = int(mask.indices[e]), mask.bits[mask.tile[e] - 1]  # no tile of this mask is full
    ...         dense[16*i:16*i+16, 16*j:16*j+16] = (words >> torch.arange(16)) & 1 == 1
    >>> torch.equal(dense[:40, :40], mask.to_dense()[0, 0])
    True

    The score matrix is divided into tiles of `block_q x block_k` tokens: `Mq = ceil(q_len / block_q)` rows and `Mk =
    ceil(k_len / block_k)` columns of them. With P distinct patterns, nnz stored tiles and T distinct partial tiles:

    - `indptr`   int32 `[P * Mq + 1]`: the tiles of block row i of pattern p are `indptr[p*Mq + i] : indptr[p*Mq + i+1]`
    - `indices`  int32 `[nnz]`: their block columns, strictly increasing within a row
    - `tile`     int32 `[nnz]`: 0: every score is live; t > 0: the live scores are in `bits[t - 1]`
    - `bits`     int32 `[T, block_q, max(block_k // 32, 1)]`: bit `k % 32` of word `k // 32` of row q is score (q, k)
    - `pattern`  int32 `[B or 1, Hq or 1]`: the pattern of each batch element and query head; a size of 1 is shared
    - `lengths`  int32 `[2, B or 1]` or None: the number of live queries and of live keys of each sequence; tokens past
      them are dead (padding)

    Build a mask with `from_dense`, `from_layout`, `from_function`, `from_tiles`, `from_block_index`, `dense`, or a
    function of `sparseflash.masks`. Call the class itself only with arrays that obey these rules; `validate()` checks
    all of them.

    The arrays are canonical: empty tiles are not stored, full tiles have `tile == 0`, equal partial tiles and equal
    patterns are stored once, in order of first appearance, and ragged ends are partial tiles. So equal masks have equal
    arrays, and `==` and `hash` compare the arrays (`lengths` included), on any device. A mask is immutable: never write
    to its arrays.

    `dynamic`: a mask that is built on the GPU at every step cannot be canonical, because counting its tiles would
    synchronise with the device. Its arrays are safe to run but not canonical (see `blockmask/dynamic.py`);
    `canonical()` returns the equivalent canonical mask.
    """

    q_len: int
    k_len: int
    block_q: int
    block_k: int
    indptr: Tensor
    indices: Tensor
    tile: Tensor
    bits: Tensor
    pattern: Tensor
    lengths: Tensor | None = None
    dynamic: bool = field(default=False, kw_only=True)
    if TYPE_CHECKING:
        words: ClassVar[Tensor]  # an instance attribute that is not a field; see `_words`

    def __post_init__(self) -> None:
        check_arrays(self)
        object.__setattr__(self, "words", self._words())
        if belong_together(self.indices, self._others()):
            return  # FSDP rebuilds a module's dataclass inputs from their fields: keep the caches
        # Everything derived from the arrays is cached on the indices tensor. Another mask may share these indices but
        # differ in its other arrays, so each mask has its own tensor object over the same memory.
        object.__setattr__(self, "indices", self.indices.detach())
        for array in (self.indptr, self.indices, self.tile, self.words):
            may_vary_in_size(array)
        attach_cache(self.indices, may_wait=not self.dynamic, others=self._others())

    def _words(self) -> Tensor:
        """The bits as the operator takes them: one flat view, int32 `[T * block_q * W]`.

        If no tile is partial it is one dead tile, because torch.compile would specialise on a size of 0. It is not a
        field, because FSDP rebuilds a mask from its fields, and this one is derived from `bits`.
        """
        if self.bits.shape[0] > 0:
            return self.bits.view(-1)
        return self.bits.new_zeros(self.block_q * bitmask.words_per_row(self.block_k))

    @property
    def q_lengths(self) -> Tensor | None:
        """The number of live queries of each sequence, int32 `[B or 1]`; None if there is no padding.

        >>> BlockMask.dense(3, 5, block=16).with_lengths(k_lengths=[4, 2]).q_lengths.tolist()
        [3, 3]
        """
        return None if self.lengths is None else self.lengths[0]

    @property
    def k_lengths(self) -> Tensor | None:
        """The number of live keys of each sequence, int32 `[B or 1]`; None if there is no padding.

        >>> BlockMask.dense(3, 5, block=16).with_lengths(k_lengths=[4, 2]).k_lengths.tolist()
        [4, 2]
        """
        return None if self.lengths is None else self.lengths[1]

    # ------------------------------------------------------------------ constructors

    @classmethod
    @constant_when_compiled
    def from_dense(cls, dense: Any, *, block: Block = 128) -> BlockMask:
        """The mask with the live scores of a dense boolean matrix.

        >>> BlockMask.from_dense(torch.ones(64, 64, dtype=torch.bool).tril(), block=32)
        BlockMask(64 x 64, blocks of 32, 3 tiles: 1 full + 2 partial (1 distinct), density 50.8 %)

        Args:
            dense: bool tensor or array `[Nq, Nk]`, `[Hq, Nq, Nk]` or `[B, Hq, Nq, Nk]`; True is live, and a leading
                dimension of 1 is shared.
            block: tokens per tile, a power of two from 16 to 256, or `(block_q, block_k)`.

        Raises TypeError if `dense` is not boolean, ValueError for another rank, an empty matrix or a bad block.
        """
        return cls._of(*of_dense(dense, block))

    @classmethod
    @constant_when_compiled
    def from_layout(
        cls, layout: Any, *, block: Block = 128, q_len: int | None = None, k_len: int | None = None
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

    @classmethod
    @partial(constant_when_compiled, calls=call_rule)
    def from_function(
        cls,
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
        parts, numbers = tiles_of_rule(live, batch, heads, q_len, k_len, (block_q, block_k), candidates, device)
        *arrays, pattern = arrays_of(q_len, k_len, block_q, block_k, parts, 1, len(parts))
        indptr, indices, tile, bits = arrays
        pattern = pattern[0][numbers.to(pattern.device)].contiguous()
        return cls(q_len, k_len, block_q, block_k, indptr, indices, tile, bits, pattern)

    @classmethod
    @constant_when_compiled
    def from_tiles(
        cls,
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

    @classmethod
    def from_block_index(
        cls,
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

    @classmethod
    @constant_when_compiled
    def dense(cls, q_len: int, k_len: int | None = None, *, block: Block = 128) -> BlockMask:
        """The mask in which every score is live. `attention(q, k, v)` without a mask gives the same result and stores
        nothing.

        >>> BlockMask.dense(300, 200, block=128)
        BlockMask(300 x 200, blocks of 128, 6 tiles: 2 full + 4 partial (3 distinct), density 100 %)
        """
        block_q, block_k = block_pair(block)
        q_len, k_len = token_counts(q_len, q_len if k_len is None else k_len)
        layout = torch.ones(-(-q_len // block_q), -(-k_len // block_k), dtype=torch.bool, device="cpu")
        return cls.from_layout(layout, block=(block_q, block_k), q_len=q_len, k_len=k_len)

    def with_lengths(
        self,
        lengths: Lengths | None = None,
        *,
        q_lengths: Lengths | None = None,
        k_lengths: Lengths | None = None,
    ) -> BlockMask:
        """The same mask with padding: queries and keys at or past a sequence's length are dead.

        >>> mask = BlockMask.dense(64, block=32).with_lengths([40, 64])
        >>> mask.to_dense().sum((-2, -1)).tolist()
        [[1600], [4096]]

        Cross-attention: each of three queries sees four of five keys in one sequence and two in the other.

        >>> mask = BlockMask.dense(3, 5, block=16).with_lengths(k_lengths=[4, 2])
        >>> mask.to_dense()[:, 0].sum(-1).tolist()
        [[4, 4, 4], [2, 2, 2]]

        Args:
            lengths: the tokens of each sequence, integers `[B]` on the mask's device, for queries and keys, each
                counted from its own start. Values are clamped to `0 .. q_len` and `0 .. k_len`.
            q_lengths, k_lengths: the lengths of queries and of keys separately; without one of them, all queries, or
                all keys, of the mask stay.

        Lengths that the mask had before are replaced. One length (`[1]`) applies to all sequences of any batch.

        The call does not synchronise with the device, and the new mask shares the arrays and the caches, so it is cheap
        enough for every training step; kernels skip the blocks past the end. A list of ints is accepted too, but the
        host waits for its copy to the device.

        Lengths do not move the diagonal: a causal mask stays aligned at the bottom right of `q_len x k_len`. For four
        new tokens at the ends of caches with 10 and 6 tokens, in a buffer of ten, build one mask per sequence:

        >>> from sparseflash import masks
        >>> mask = masks.per_batch([masks.causal(4, 10, offset=length - 4) for length in (10, 6)])
        >>> mask.to_dense()[:, 0].sum(-1).tolist()
        [[7, 8, 9, 10], [3, 4, 5, 6]]

        Raises TypeError for lengths that are not integers or for `lengths` together with one of the others, ValueError
        for a wrong shape, device or batch size.
        """
        return self._padded(lengths_of(self, lengths, q_lengths, k_lengths))

    def _padded(self, lengths: Tensor | None) -> BlockMask:
        """The same mask and cache with these lengths, int32 `[2, B]` or None.

        Bypasses the constructor: its checks have been made, and repeating them would dominate the cost at every step.
        """
        mask = object.__new__(BlockMask)
        for name in (*_FIELDS, "words"):
            object.__setattr__(mask, name, getattr(self, name))
        object.__setattr__(mask, "lengths", lengths)
        return mask

    @classmethod
    def _of(
        cls, q_len: int, k_len: int, block_q: int, block_k: int, parts: list[Part], batch: int, heads: int
    ) -> BlockMask:
        return cls(q_len, k_len, block_q, block_k, *arrays_of(q_len, k_len, block_q, block_k, parts, batch, heads))

    # properties and comparison

    @property
    def device(self) -> torch.device:
        """The device of the arrays.

        >>> BlockMask.dense(100).device
        device(type='cpu')
        """
        return self.indices.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(B or 1, Hq or 1, q_len, k_len)`: the shape of `to_dense()`.

        >>> BlockMask.dense(100, 60).with_lengths([10, 20]).shape
        (2, 1, 100, 60)
        """
        batch = self.pattern.shape[0] if self.lengths is None else self.lengths.shape[1]
        return batch, self.pattern.shape[1], self.q_len, self.k_len

    @property
    def blocks(self) -> tuple[int, int]:
        """`(Mq, Mk)`: the number of block rows and of block columns.

        >>> BlockMask.dense(100, 60, block=32).blocks
        (4, 2)
        """
        return -(-self.q_len // self.block_q), -(-self.k_len // self.block_k)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, without cached data such as the transpose and plans.

        >>> BlockMask.from_function(lambda q, k: k <= q, 256, block=64).nbytes  # 5 + 10 + 10 + 128 + 1 int32 numbers
        616
        """
        return sum(a.numel() * a.element_size() for a in self._arrays() if a is not None)

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """The transpose: `(indptr [P * Mk + 1], indices [nnz], tile [nnz])` of the block columns, all int32.

        >>> indptr, indices, tile = BlockMask.from_function(lambda q, k: k <= q, 48, block=16).columns
        >>> indptr.tolist(), indices.tolist(), tile.tolist()
        ([0, 3, 5, 6], [0, 1, 2, 1, 2, 2], [1, 0, 0, 1, 0, 1])

        The tiles themselves are not transposed: `bits[tile - 1]` still has queries as rows. Computed once and cached.
        For a dynamic mask the arrays also have unused capacity.
        """
        return columns_of(self.indptr, self.indices, self.tile, *self.blocks)

    @property
    def T(self) -> BlockMask:
        """`transpose()`: the mask with queries and keys exchanged.

        >>> BlockMask.dense(100, 60, block=16).T.shape
        (1, 1, 60, 100)
        """
        return self.transpose()

    @property
    def density(self) -> float:
        """The share of live scores, averaged over heads and batch elements (1.0 for dense); padding counts as dead.

        >>> BlockMask.dense(100).with_lengths([50]).density
        0.25
        """
        if self.lengths is not None:  # the cache is shared by masks that differ only in their lengths
            return live_scores(self) / (self.q_len * self.k_len)
        cache = mask_cache(self.indices)
        if "density" not in cache:
            cache["density"] = live_scores(self) / (self.q_len * self.k_len)
        return float(cache["density"])

    def __repr__(self) -> str:
        return summary(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self is other:
            return True
        if self._numbers() != other._numbers():
            return False
        mine, theirs = self.canonical()._arrays(), other.canonical()._arrays()
        return all(
            (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b.to(a.device)))
            for a, b in zip(mine, theirs, strict=True)
        )

    def __bool__(self) -> NoReturn:
        # Without this every mask is true, so `near and far` would silently be `far`.
        raise TypeError(
            "masks must be combined by &, | and ~; got one where Python needs True or False (and, or, not, if). Write "
            "mask is not None to ask whether there is one, mask.density > 0 whether anything is live."
        )

    if not TYPE_CHECKING:  # a type checker would accept any attribute of a class with this method

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute(name)

    def __getitem__(self, index: object) -> NoReturn:
        # Iteration calls this, too. __iter__ would make a mask an Iterable, which stands for several masks elsewhere.
        refuse("index")

    def __len__(self) -> NoReturn:
        refuse("len")

    def __array__(self, *_: object, **__: object) -> NoReturn:
        # Without this, NumPy would make an object array that holds the mask.
        refuse("array")

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of the contents: equal for equal masks, on any device and in any process.

        >>> from sparseflash import masks
        >>> masks.causal(100, block=32).digest == BlockMask.from_function(lambda q, k: k <= q, 100, block=32).digest
        True

        Use it to compare masks of several processes, or to name files; `hash` differs between processes. Takes
        O(nnz + T) time once; synchronises with the device.
        """
        if self.canonical() is not self:
            return self.canonical().digest
        cache = mask_cache(self.indices)
        if "digest" not in cache:
            digest = hashlib.blake2b(digest_size=8)
            for array in (self.indptr, self.indices, self.tile, self.bits, self.pattern):
                digest.update(repr(tuple(array.shape)).encode())
                digest.update(array.cpu().numpy().tobytes())
            cache["digest"] = digest.digest()
        lengths = None if self.lengths is None else tuple(live_tokens(self))
        others = repr((self._numbers(), lengths)).encode()
        return hashlib.blake2b(others, key=cache["digest"], digest_size=8).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def _others(self) -> tuple[Any, ...]:
        """Everything, besides the indices, that the cached derivatives depend on: all fields but the lengths."""
        return *self._numbers(), self.dynamic, self.indptr, self.tile, self.bits, self.pattern

    def _numbers(self) -> tuple[int, int, int, int]:
        return self.q_len, self.k_len, self.block_q, self.block_k

    def _arrays(self) -> tuple[Tensor | None, ...]:
        return self.indptr, self.indices, self.tile, self.bits, self.pattern, self.lengths

    def __copy__(self) -> BlockMask:
        return self  # immutable

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockMask:
        return self  # immutable: copying a model shares its masks

    def __reduce__(self) -> tuple[Any, ...]:
        # Leaves out the cache and the unused capacity of a dynamic mask. Each array is pickled in memory that lives as
        # long as the mask: PyTorch passes tensors to a child process as file descriptors, and the descriptors of a
        # temporary copy would be closed by then.
        mask = self.canonical() if self.dynamic else self
        arrays = tuple(None if a is None else _alone(mask.indices, a) for a in mask._arrays())
        return BlockMask, (*self._numbers(), *arrays)

    # operations

    @constant_if_its_mask_is
    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> BlockMask:
        """The mask on another device; itself if it is already there.

        >>> mask = BlockMask.dense(100)
        >>> mask.to("cpu") is mask
        True

        `non_blocking` is accepted because trainers pass it to `to` of a batch; it changes nothing. A copy to a GPU
        never waits for the kernels in its queue, and a copy to the CPU always waits.
        """
        device = checked_device(device)
        if device == torch.device("cuda"):  # the current device
            device = torch.device("cuda", torch.cuda.current_device())
        if device == self.device:
            return self
        if self.device.type == "meta":
            raise ValueError(f"mask must have contents to be moved to {device}; it is on the meta device, without any.")
        arrays = [a for a in self._arrays() if a is not None]
        moved: list[Tensor | None] = [*to_device(arrays, device)]
        if self.lengths is None:
            moved.append(None)
        mask = BlockMask(*self._numbers(), *moved, dynamic=self.dynamic)  # type: ignore[arg-type]
        if device.type == "cuda" and self.device.type == "cpu" and self.nbytes <= _HOST_BYTES and not self.dynamic:
            mask_cache(mask.indices)["host"] = self._padded(None)  # plans of small masks are made on the host
        return mask

    def canonical(self) -> BlockMask:
        """The canonical mask with the same live scores; itself unless it is `dynamic`.

        >>> scores = torch.tensor([[0.9, 0.0, 0.0], [0.2, 0.8, 0.0], [0.1, -torch.inf, -torch.inf]])
        >>> from sparseflash import masks
        >>> chosen = masks.top_k_blocks(scores, k=2, q_len=96, block=32, causal=True)
        >>> chosen.indptr.tolist(), chosen.indices.tolist()  # capacity for five tiles; four are used
        ([0, 1, 3, 4], [0, 0, 1, 0, 2])
        >>> chosen.canonical().indices.tolist()
        [0, 0, 1, 0]

        Synchronises with the device. Computed once and cached, also for comparing, hashing and printing a dynamic mask.

        Raises ValueError on the meta device, as does everything that needs the contents: the algebra, `==`, `hash`.
        """
        if self.device.type == "meta":
            raise ValueError("mask must lie on a device that holds its contents; got the meta device, which has none.")
        if not self.dynamic:
            return self
        mask = once(
            mask_cache(self.indices), "canonical", lambda: BlockMask(*self._numbers(), *canonical_arrays_of(self))
        )
        return mask if self.lengths is None else mask._padded(self.lengths)

    def to_dense(self) -> Tensor:
        """The dense matrix: bool `[B or 1, Hq or 1, q_len, k_len]`, True where a score is live.

        >>> BlockMask.from_function(lambda q, k: k <= q, 3, block=16).to_dense()[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

        Takes `N x N` memory: for tests and pictures.
        """
        (row_blocks, col_blocks), device, patterns = self.blocks, self.device, pattern_count(self)
        dense = torch.zeros(
            patterns * row_blocks, col_blocks, self.block_q, self.block_k, dtype=torch.bool, device=device
        )
        rows, cols, tile = stored_tiles(self)
        dense[rows, cols] = bitmask.unpack(bitmask.choices(self.bits, self.block_k), self.block_k)[tile]
        dense = dense.reshape(patterns, row_blocks, col_blocks, self.block_q, self.block_k).transpose(2, 3)
        dense = dense.reshape(patterns, row_blocks * self.block_q, col_blocks * self.block_k)
        live = dense[:, : self.q_len, : self.k_len][self.pattern.long()]  # [B or 1, Hq or 1, Nq, Nk]
        if self.lengths is not None:
            q_stop, k_stop = self.lengths.view(2, -1, 1, 1, 1)
            live = live & (torch.arange(self.q_len, device=device).view(-1, 1) < q_stop)
            live = live & (torch.arange(self.k_len, device=device) < k_stop)
        return live

    def to_layout(self) -> Tensor:
        """Bool `[B or 1, Hq or 1, Mq, Mk]`, True where any score of the tile is live: the input of `from_layout`.

        >>> layout = torch.eye(4, dtype=torch.bool)
        >>> BlockMask.from_layout(layout, block=32).to_layout()[0, 0].equal(layout)
        True
        """
        mask = self.bake_lengths()
        (row_blocks, col_blocks), patterns = mask.blocks, pattern_count(mask)
        layout = torch.zeros(patterns * row_blocks, col_blocks, dtype=torch.bool, device=self.device)
        rows, cols, _ = stored_tiles(mask)
        layout[rows, cols] = True
        return layout.view(patterns, row_blocks, col_blocks)[mask.pattern.long()]

    def to_string(
        self,
        width: int | None = None,
        *,
        heads: int | Iterable[int] | None = None,
        batch: int | Iterable[int] | None = None,
        ascii: bool = False,
    ) -> str:
        """A drawing in characters under a summary line, at most `width` columns wide (by default the terminal's width).

        >>> print(BlockMask.from_function(lambda q, k: k <= q, 500, block=64).to_string(40))
        BlockMask(500 x 500, blocks of 64, 36 tiles: 21 full + 15 partial (3 distinct), density 50.1 %)
        ▒▒··············
        ██▒▒············
        ████▒▒··········
        ██████▒▒········
        ████████▒▒······
        ██████████▒▒····
        ████████████▒▒··
        ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▒▒
        █ full  ▓▒░ partly live: 2/3, 1/3, less  · empty; a cell is 64 x 64 tokens

        Args:
            width: columns, at least 2; by default the terminal's width.
            heads, batch: the selection, by index; by default all. Each distinct pattern is drawn once, at most 16 of
                them.
            ascii: draw with `#*+-.` instead.

        Queries run down and keys to the right. A cell is a tile, or a square of 2 x 2, 4 x 4, ... tiles if they do not
        fit, and shows the exact mean. `█`: only full tiles; `▓`, `▒`, `░`: at least 2/3, at least 1/3, less than 1/3 of
        the scores live; `·`: none.

        Raises ValueError if width is below 2, or a head or batch element is out of range.
        """
        from sparseflash.draw.text import to_string

        return to_string(self.canonical(), width, heads=heads, batch=batch, ascii=ascii)

    @overload
    def plot(
        self, ax: None = None, *, heads: int | Iterable[int] | None = None, batch: int | Iterable[int] | None = None,
        elements: bool | None = None, cells: int = 512, legend: bool = True, by_head: bool = False,
    ) -> Figure: ...  # fmt: skip

    @overload
    def plot(
        self, ax: Axes, *, heads: int | Iterable[int] | None = None, batch: int | Iterable[int] | None = None,
        elements: bool | None = None, cells: int = 512, legend: bool = True, by_head: bool = False,
    ) -> Axes: ...  # fmt: skip

    def plot(
        self,
        ax: Axes | None = None,
        *,
        heads: int | Iterable[int] | None = None,
        batch: int | Iterable[int] | None = None,
        elements: bool | None = None,
        cells: int = 512,
        legend: bool = True,
        by_head: bool = False,
    ) -> Figure | Axes:
        """A matplotlib picture: queries down, keys to the right, both in tokens.

        >>> figure = BlockMask.dense(4096).plot()
        >>> figure.axes[0].get_xlabel(), figure.axes[0].get_title()
        ('key (token)', '100 % live')

        Args:
            ax: axes for the one selected pattern, which are returned: `mask.plot(plt.gca())`. Without it, returns a new
                Figure with a panel for each distinct pattern (at most 16); it is not registered with pyplot and opens
                no window. Save it with `figure.savefig("mask.png")`.
            heads, batch: the selection, by index; by default all.
            elements: draw every single score instead of tiles: by default up to 1,024 tokens, on request up to 4,096.
            cells: the largest number of cells on a side. If a side has more tiles, one cell shows a square of 2 x 2,
                4 x 4, ... tiles, in a tint that shows its exact share of live scores.
            legend: draw the meanings of the colours.
            by_head: a panel for each head instead, equal ones, too (at most 64); batch elements begin a row of their
                own.

        Full tiles are blue. Partial tiles are orange, paler with fewer live scores. Time is proportional to the live
        tiles.

        Needs the extra `plot`. Raises ImportError without matplotlib; ValueError for several patterns on one `ax`, a
        head or batch element out of range, or `elements` for a mask that is too long.
        """
        from sparseflash.draw.figure import plot

        return plot(
            self.canonical(), ax, heads=heads, batch=batch, elements=elements, cells=cells, legend=legend,
            by_head=by_head,
        )  # fmt: skip

    def _repr_html_(self) -> str:
        """The summary line and a small drawing, for notebooks: at most 64 KB, without matplotlib."""
        from sparseflash.draw.html import to_html

        return to_html(self.canonical())

    @constant_when_compiled
    def __and__(self, other: BlockMask) -> BlockMask:
        """`a & b`: the scores that are live in both.

        >>> from sparseflash import masks
        >>> both = masks.local(256, window=65, block=32) & masks.causal(256, block=32)
        >>> both == masks.local(256, window=33, causal=True, block=32)
        True

        For `&`, `|`, `^` and `-` alike, the masks must have equal `q_len`, `k_len` and device, or a ValueError is
        raised; batch sizes and heads broadcast. If the block sizes differ, the result has the smaller one in each
        dimension. Bits are combined once per distinct pair of tiles.

        For `&`, padding stays padding: the smaller of the two lengths applies. Time and memory are proportional to the
        live tiles of the sparser mask (for `|` and `^`: of both masks; for `-`: of the left one).
        """
        from sparseflash.blockmask.ops.boolean import intersection

        return intersection(self, checked_mask(other))

    def __rand__(self, other: object) -> BlockMask:
        return checked_mask(other)  # raises: Python calls this only if the left operand is not a mask

    __ror__ = __rxor__ = __rsub__ = __rand__
    __array_ufunc__ = None  # makes NumPy call __rand__ for `array & mask`

    @constant_when_compiled
    def __or__(self, other: BlockMask) -> BlockMask:
        """`a | b`: the scores that are live in a, in b, or in both. See `&`.

        >>> from sparseflash import masks
        >>> masks.local(4096, window=256) | masks.butterfly(4096)
        BlockMask(4096 x 4096, blocks of 128, 222 tiles: 192 full + 30 partial (2 distinct), density 20.2 %)

        Equal lengths stay lengths; different ones are first written into the tiles (`bake_lengths`).
        """
        from sparseflash.blockmask.ops.boolean import union

        return union(self, checked_mask(other))

    @constant_when_compiled
    def __xor__(self, other: BlockMask) -> BlockMask:
        """`a ^ b`: the scores that are live in exactly one. See `&`, and `|` for lengths.

        >>> from sparseflash import masks
        >>> (masks.causal(64, block=32) ^ masks.causal(64, block=32)).density
        0.0
        """
        from sparseflash.blockmask.ops.boolean import symmetric_difference

        return symmetric_difference(self, checked_mask(other))

    @constant_when_compiled
    def __sub__(self, other: BlockMask) -> BlockMask:
        """`a - b`: the scores that are live in a but not in b, that is `a & ~b` without building `~b`. See `&`.

        >>> from sparseflash import masks
        >>> masks.causal(100, block=32) - masks.local(100, window=8, causal=True, block=32) == BlockMask.from_function(
        ...     lambda q, k: k <= q - 8, 100, block=32)
        True

        The lengths of a stay lengths. If any length of b is shorter than a's, the lengths of b are first written into
        its tiles: a score that is padding in b is not live in b, so it stays live.
        """
        from sparseflash.blockmask.ops.boolean import difference

        return difference(self, checked_mask(other))

    @constant_when_compiled
    def __invert__(self) -> BlockMask:
        """`~a`: the scores that are dead in a; the negation of `to_dense()`.

        >>> from sparseflash import masks
        >>> ~masks.causal(256, block=64) == BlockMask.from_function(lambda q, k: k > q, 256, block=64)
        True

        Padding becomes live, so lengths are first written into the tiles (`bake_lengths`). Positions past `q_len` and
        `k_len` do not exist and stay dead. The complement of a sparse mask is dense: time and memory are proportional
        to all `Mq * Mk` tiles. For `a & ~b` write `a - b`.
        """
        from sparseflash.blockmask.ops.boolean import complement

        return complement(self.canonical())

    @constant_when_compiled
    def reblock(self, block: Block) -> BlockMask:
        """The same live scores in tiles of another size, finer or coarser in each dimension.

        >>> from sparseflash import masks
        >>> masks.local(1024, window=64, block=64).reblock(128)
        BlockMask(1024 x 1024, blocks of 128, 22 tiles: 0 full + 22 partial (3 distinct), density 6.25 %)
        >>> masks.local(1024, window=64, block=64).reblock(128) == masks.local(1024, window=64, block=128)
        True

        Args:
            block: tokens per tile, a power of two from 16 to 256, or `(block_q, block_k)`.

        Finer tiles let kernels skip more, coarser tiles are fewer; lengths are unchanged. Returns the mask itself if
        the size is the same. Time and memory are proportional to the tiles before and after.
        """
        from sparseflash.blockmask.ops.reblock import reblock

        return reblock(self.canonical(), block)

    @constant_when_compiled
    def crop(self, *, q: Sequence[int | None] | None = None, k: Sequence[int | None] | None = None) -> BlockMask:
        """The mask of a range of the queries and a range of the keys: `to_dense()[:, :, q0:q1, k0:k1]`.

        >>> from sparseflash import masks
        >>> masks.causal(1000, block=64).crop(q=(900, 1000)) == masks.causal(100, 1000, block=64)
        True
        >>> masks.local(1000, window=5, block=32).crop(q=(7, 300), k=(7, 300)) == masks.local(293, window=5, block=32)
        True

        Args:
            q, k: `(start, stop)` in tokens with `0 <= start < stop <= length`; None for a bound or a range: all of it.
                Negative numbers are refused; they do not count from the end.

        If the start is a multiple of the block only tiles move; otherwise bits are shifted, once per distinct pair of
        neighbours. Lengths are reduced by the starts. Time and memory are proportional to the tiles of the selected
        queries.

        Raises ValueError for an empty range or one that exceeds the mask, TypeError for anything but a pair of
        integers.
        """
        from sparseflash.blockmask.ops.crop import crop

        return crop(self.canonical(), q, k)

    @constant_when_compiled
    def select(self, *, batch: Any = None, heads: Any = None) -> BlockMask:
        """The mask of some batch elements and some heads: `to_dense()[batch][:, heads]`.

        >>> from sparseflash import masks
        >>> local, causal = masks.local(256, window=64, block=64), masks.causal(256, block=64)
        >>> mask = masks.per_head([local, local, causal, causal])
        >>> mask.select(heads=slice(2, 4)) == masks.per_head([causal, causal])
        True
        >>> mask.with_lengths([256, 100, 7]).select(batch=[1, 2]) == mask.with_lengths([100, 7])
        True

        Args:
            batch, heads: an index, a slice, or several indices (a list, tensor or array) in any order; None: all.
                Negative indices are refused.

        Use it for a rank of a tensor-parallel model, a micro-batch, or the smaller last batch. A mask that is shared by
        all heads, or by all batch elements, stays shared. Lengths follow the batch elements. Time is proportional to
        the tiles of the selection.

        Raises ValueError for an empty selection or an index out of range, TypeError for an index that is not an
        integer.
        """
        from sparseflash.blockmask.ops.select import select

        return select(self.canonical(), batch, heads)

    @constant_when_compiled
    def permute(self, order: Any = None, *, q: Any = None, k: Any = None) -> BlockMask:
        """The mask for tokens in another order: new token t is old token `order[t]`, on both sides.

        >>> mask = BlockMask.from_function(lambda q, k: q % 4 == k % 4, 1024, block=64)  # a stride: no tile is full
        >>> order = torch.arange(1024).reshape(256, 4).T.flatten()  # groups the tokens by their remainder mod 4
        >>> mask
        BlockMask(1024 x 1024, blocks of 64, 256 tiles: 0 full + 256 partial (1 distinct), density 25 %)
        >>> mask.permute(order)
        BlockMask(1024 x 1024, blocks of 64, 64 tiles: 64 full + 0 partial, density 25 %)
        >>> mask.permute(order).permute(order.argsort()) == mask
        True

        Args:
            order: a permutation of the tokens, an integer tensor, array or list `[N]`.
            q, k: permutations of each side, `[q_len]` and `[k_len]`, or of one side alone: `to_dense()[:, :, q][...,
                k]`.

        If q, k and v are reordered in the same way, as in `q[:, :, order]`, attention with `mask.permute(order)` gives
        the old result in the new order.

        An order that moves whole blocks only moves tiles. Any other rebuilds the bits of each tile, in time
        proportional to the queries and keys of the live tiles, and may scatter the live scores over many more tiles.
        Lengths are first written into the tiles (`bake_lengths`), because the padding is no longer at the end.

        Raises ValueError if `order` is not a permutation of the tokens, TypeError if it is not of integers.
        """
        from sparseflash.blockmask.ops.permute import permute

        return permute(self.canonical(), order, q, k)

    @constant_when_compiled
    def transpose(self) -> BlockMask:
        """The mask with queries and keys exchanged: `to_dense().transpose(-1, -2)`. Twice is the identity.

        >>> mask = BlockMask.from_function(lambda q, k: k <= q, 100, 60, block=(32, 16))
        >>> mask.transpose()
        BlockMask(60 x 100, blocks of 16 x 32, 14 tiles: 5 full + 9 partial (6 distinct), density 70.5 %)
        >>> mask.transpose().transpose() == mask
        True

        Block sizes and lengths are exchanged too. `columns` lists the same tiles without transposing their bits.
        """
        from sparseflash.blockmask.ops.transpose import transpose

        return transpose(self.canonical())

    @constant_when_compiled
    def bake_lengths(self) -> BlockMask:
        """The same mask with its padding written into the tiles and no `lengths`; itself if it has none.

        >>> padded = BlockMask.dense(64, block=32).with_lengths(torch.tensor([40, 64]))
        >>> padded.bake_lengths()  # doctest: +ELLIPSIS
        BlockMask(64 x 64, blocks of 32, 8 tiles: 5 full + 3 partial (3 distinct), ... 2 patterns for 2 x 1 ...)
        >>> torch.equal(padded.bake_lengths().to_dense(), padded.to_dense())
        True

        For uses that cannot handle lengths: an export, a comparison of live scores. Every distinct pair of a pattern
        and its lengths becomes a pattern, so there may be up to B times as many tiles. Reads the lengths, so it
        synchronises with the device.

        Raises ValueError if the lengths have B = 0.
        """
        from sparseflash.blockmask.ops.padding import bake_lengths

        return bake_lengths(self.canonical())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the mask to one file: an uncompressed npz (no pickle) with a format version. Equal masks give equal
        bytes.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     BlockMask.dense(100).save(f"{folder}/dense.mask")
        ...     BlockMask.load(f"{folder}/dense.mask") == BlockMask.dense(100)
        True

        No extension is added to `path`. The write is atomic (a temporary file in the same folder is renamed), and an
        existing file is replaced. Raises OSError, with the path, if the file cannot be written.
        """
        from sparseflash.blockmask.serialization import save

        save(self.canonical(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> BlockMask:
        """Reads a mask that `save` wrote and validates all of it: a damaged or malicious file raises an error.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     BlockMask.dense(100).save(f"{folder}/dense.mask")
        ...     BlockMask.load(f"{folder}/dense.mask")
        BlockMask(100 x 100, blocks of 128, 1 tile: 0 full + 1 partial (1 distinct), density 100 %)

        Args:
            path: the file.
            device: the device of the mask; the CPU by default.

        Memory is proportional to the actual size of the file, whatever its headers claim. Raises ValueError if the
        contents are not an intact mask, OSError if the file cannot be read; both name the path.
        """
        from sparseflash.blockmask.serialization import load

        return load(path, device=device)

    def validate(self) -> BlockMask:
        """Checks every invariant of the arrays and returns the mask.

        >>> BlockMask.dense(100).validate().density
        1.0

        Takes O(nnz + T) time and synchronises with the device. Raises ValueError naming the first broken invariant. A
        mask from an unknown source that passes is safe to run (no index is out of range) and canonical (so `==` and
        `hash` are meaningful); a dynamic mask that passes is safe to run.
        """
        validate(self)
        return self


_FIELDS = tuple(each.name for each in fields(BlockMask))
_HOST_BYTES = 1 << 20  # a mask up to this size keeps its host copy when it is moved to a GPU


def _alone(indices: Tensor, array: Tensor) -> Tensor:
    """A plain tensor of an array of a mask, in its own memory, which lives as long as the indices."""
    if array.untyped_storage().nbytes() == array.numel() * array.element_size():
        return array.detach()
    # The cache entry holds a reference to the array's memory, so that no other tensor can have the same address and
    # thus the same key. It must not hold the array itself: it may be the indices tensor, which owns the cache, and the
    # cycle would never be freed.
    key = ("alone", array.data_ptr(), array.shape, array.stride())
    _, copy = once(mask_cache(indices), key, lambda: (array.detach(), array.clone()))
    return copy.detach()
