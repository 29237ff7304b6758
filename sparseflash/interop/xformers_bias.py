"""xformers' classes of `attn_bias`, for machines without xformers, under its names and with its constructors.

>>> from sparseflash.interop.xformers import memory_efficient_attention
>>> sequences = [torch.randn(1, n, 2, 16) for n in (5, 9)]
>>> bias, x = BlockDiagonalMask.from_tensor_list(sequences)
>>> out = memory_efficient_attention(x, x, x, attn_bias=bias.make_causal())
>>> [part.shape[1] for part in bias.split(out)]
[5, 9]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Diagonal = TypeVar("Diagonal", bound="_Diagonal")


class AttentionBias:
    """The base of all classes."""


class LowerTriangularMask(AttentionBias):
    """A query sees the keys up to its own number.

    >>> LowerTriangularMask().add_bias(torch.zeros(1, 2, 8, 8)).__class__.__name__
    'LowerTriangularMaskWithTensorBias'
    """

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """`LowerTriangularMask` and a tensor that is added to the scores."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """The last query sees the last key, the one before it the keys before, and so on."""

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """The same, of the last `_window_size` keys only."""

    def __init__(self, _window_size: int) -> None:
        self._window_size = _window_size


class LocalAttentionFromBottomRightMask(AttentionBias):
    """A window of `window_left` keys before and `window_right` keys after, aligned at the bottom right."""

    def __init__(self, window_left: int, window_right: int) -> None:
        self.window_left, self.window_right = window_left, window_right


class _SeqLenInfo(NamedTuple):
    seqstart_py: list[int]
    seqlen_py: list[int]

    @classmethod
    def of(cls, lengths: Sequence[int], starts: Sequence[int] | None = None) -> _SeqLenInfo:
        lengths = [int(n) for n in lengths]
        return cls([0, *accumulate(lengths)] if starts is None else [int(n) for n in starts], lengths)


class _Diagonal(AttentionBias):
    def __init__(
        self, q_seqinfo: _SeqLenInfo, k_seqinfo: _SeqLenInfo, window: tuple[int, int] | int | None = None
    ) -> None:
        self.q_seqinfo, self.k_seqinfo = q_seqinfo, k_seqinfo
        if isinstance(window, tuple):
            self.window_left, self.window_right = window
        elif window is not None:
            self._window_size = window

    def _as(self, kind: type[Diagonal], window: Any = None) -> Diagonal:
        return kind(self.q_seqinfo, self.k_seqinfo, window)


class BlockDiagonalMask(_Diagonal):
    """Packed sequences.

    >>> mask = BlockDiagonalMask.from_seqlens([3, 5]).make_local_attention(2)
    >>> type(mask).__name__, mask.q_seqinfo.seqstart_py
    ('BlockDiagonalCausalLocalAttentionMask', [0, 3, 8])
    """

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None) -> BlockDiagonalMask:
        """The lengths of the queries' sequences, and of the keys' (the same by default)."""
        return cls(_SeqLenInfo.of(q_seqlen), _SeqLenInfo.of(q_seqlen if kv_seqlen is None else kv_seqlen))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[BlockDiagonalMask, Tensor]:
        """The mask of sequences `[B, N, ...]`, and all of them as one, `[1, total, ...]`."""
        lengths = [n for x in tensors for n in [x.shape[1]] * x.shape[0]]
        made = cls.from_seqlens(lengths)
        made._sizes = [tuple(x.shape[:2]) for x in tensors]
        return made, torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], dim=1)

    _sizes: list[tuple[int, ...]] | None = None

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The sequences of `[1, total, ...]`, as `from_tensor_list` got them."""
        starts = self.q_seqinfo.seqstart_py
        sizes = self._sizes or [(1, stop - start) for start, stop in pairwise(starts)]
        parts = tensor.split([batch * n for batch, n in sizes], dim=1)
        return [x.reshape(*size, *x.shape[2:]) for x, size in zip(parts, sizes)]

    def _as(self, kind: type[Diagonal], window: Any = None) -> Diagonal:
        made = super()._as(kind, window)
        if isinstance(made, BlockDiagonalMask):
            made._sizes = self._sizes
        return made

    def make_causal(self) -> BlockDiagonalCausalMask:
        return self._as(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return self._as(BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return self._as(BlockDiagonalCausalLocalAttentionMask, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        return self._as(BlockDiagonalCausalLocalAttentionFromBottomRightMask, window_size)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Causal within each sequence, from its first query and key on."""


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Causal within each sequence, up to its last query and key."""


class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """The same with a window, from the first query and key on."""


class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """The same with a window, up to the last query and key."""


class BlockDiagonalPaddedKeysMask(_Diagonal):
    """Keys of each sequence lie in `kv_padding` places; the first ones count.

    >>> type(BlockDiagonalPaddedKeysMask.from_seqlens([1, 1], 16, [9, 4]).make_local_attention(4, 0)).__name__
    'BlockDiagonalLocalAttentionPaddedKeysMask'
    """

    @classmethod
    def from_seqlens(
        cls: type[Diagonal], q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int]
    ) -> Diagonal:
        starts = [kv_padding * n for n in range(len(kv_seqlen) + 1)]
        return cls(_SeqLenInfo.of(q_seqlen), _SeqLenInfo.of(kv_seqlen, starts))

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        return self._as(BlockDiagonalLocalAttentionPaddedKeysMask, (window_left, window_right))


class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same with a window, up to the last query and key."""


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Causal, up to the last query and key of each sequence: for generation with a cache."""


class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same with a window."""

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> BlockDiagonalCausalLocalAttentionPaddedKeysMask:
        return BlockDiagonalPaddedKeysMask.from_seqlens(q_seqlen, kv_padding, kv_seqlen)._as(cls, window_size)


class BlockDiagonalGappyKeysMask(_Diagonal):
    """Keys of each sequence begin at `kv_seqstarts`, which ends with the number of all keys.

    >>> BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [0, 10, 40], [9, 4]).k_seqinfo.seqstart_py
    [0, 10, 40]
    """

    @classmethod
    def from_seqlens(
        cls: type[Diagonal], q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int]
    ) -> Diagonal:
        return cls(_SeqLenInfo.of(q_seqlen), _SeqLenInfo.of(kv_seqlen, kv_seqstarts))


class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Causal, up to the last query and key of each sequence."""
