"""A tensor that is added to the scores, stored for the live tiles of a mask alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparseflash.blockmask import BlockMask
from sparseflash.blockmask.csr import stored_tiles
from sparseflash.blockmask.numbering import number_of_tile, tile_numbers
from sparseflash.scores.change import Change, Learned, Place, Sizes, add_at, broadcasts, floating, shared_or_own


@dataclass(frozen=True, eq=False)
class StoredTiles(Change):
    """`tile_bias` as backends take it: adds `values[b, h, t, i % block_q, j % block_k]` in tile t."""

    kind = "tile_bias"
    order = 6
    values: Tensor  # [B or 1, Hq or 1, tiles, block_q, block_k]
    tile_numbers: Tensor  # int32 [P, Mq, ceil(Mk / 32), 2], see blockmask/numbering.py
    pattern: Tensor  # int32 [B or 1, Hq or 1]: the number of one of the P patterns

    def tensors(self) -> tuple[Tensor, ...]:
        return self.values, self.tile_numbers, self.pattern

    def changed(self, scores: Tensor, at: Place) -> Tensor:
        if self.values.numel() == 0:
            return scores + self.values.sum().to(scores.dtype)
        return scores + self.values[tuple(self._indices(at))].to(scores.dtype)

    def gradient(self, gradient: Tensor, scores: Tensor, changed: Tensor, at: Place, learned: Learned) -> Tensor:
        if self.values.numel():
            add_at(learned[0], self._indices(at), gradient)
        return gradient

    def _indices(self, at: Place) -> list[Tensor]:
        tiles, block_q, block_k = self.values.shape[2:]
        tile = at.tile
        if tile is None:
            pattern = self.pattern[tuple(shared_or_own(self.pattern, [at.batch, at.head]))].long()
            tile = number_of_tile(self.tile_numbers, pattern, at.query // block_q, at.key // block_k)
            tile = tile.clamp(max=tiles - 1)
        return [*shared_or_own(self.values, [at.batch, at.head]), tile, at.query % block_q, at.key % block_k]


@dataclass(frozen=True, eq=False)
class TileBias(Change, prepared=False):
    """Values for the live tiles of a mask; see `tile_bias`."""

    kind = "tile_bias"
    order = 6
    values: Tensor
    mask: BlockMask

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Change:
        return replace(self, values=tensors[0])

    def prepared(self, sizes: Sizes) -> StoredTiles:
        wanted = sizes.batch, sizes.heads, *self.values.shape[2:]
        broadcasts(self.values, "tile_bias", "B, Hq, tiles, block_q, block_k", wanted, sizes)
        if sizes.mask is None:
            raise ValueError("tile_bias must be used with the mask that it was made for; got no mask. Pass it.")
        if difference := _difference(self.mask, sizes.mask):
            raise ValueError(
                "tile_bias must be used with the mask that it was made for, or one with the same live tiles; "
                f"{difference}."
            )
        return StoredTiles(self.values, *tile_numbers(self.mask))


def _difference(made_for: BlockMask, mask: BlockMask) -> str:
    if mask.indices is made_for.indices:
        return ""
    if mask.device != made_for.device:
        return f"it was made for one on {made_for.device} and got one on {mask.device}"
    for name in ("q_len", "k_len", "block_q", "block_k"):
        if getattr(mask, name) != getattr(made_for, name):
            return f"its mask has {name} = {getattr(made_for, name)}; got {getattr(mask, name)}"
    if torch.compiler.is_compiling():
        return "in compiled code, which cannot compare them, it must be the same object; got another one"
    if mask.device.type == "meta":
        return "on the meta device, where masks cannot be compared, it must be the same object; got another one"
    same = all(
        a.shape == b.shape and torch.equal(a, b)
        for a, b in ((mask.indptr, made_for.indptr), (mask.indices, made_for.indices), (mask.pattern, made_for.pattern))
    )
    return "" if same else "got one whose live tiles are others"


def tile_bias(values: Tensor, mask: BlockMask) -> TileBias:
    """Adds `values[b, h, t, i % block_q, j % block_k]` to the score of query i and key j, where t is the number of its
    tile in the mask's list.

    It is stored, read and learned in live tiles only.

    >>> import torch
    >>> from sparseflash import attention, masks, scores
    >>> q, k, v = (torch.randn(2, 4, 100, 16) for _ in range(3))
    >>> mask = masks.local(100, window=32, block=16)
    >>> values = torch.zeros(1, 4, len(mask.indices), 16, 16, requires_grad=True)
    >>> attention(q, k, v, mask, scores=scores.tile_bias(values, mask)).shape
    torch.Size([2, 4, 100, 16])

    Args:
        values: `[B or 1, Hq or 1, tiles, block_q, block_k]`, which may be learned. Tile t is entry t of `mask.indices`,
            which goes through the block rows of the first pattern, each from left to right, then of the next pattern
            (`BlockMask`). If heads have different patterns, the list has the tiles of all of them, also where `values`
            has `Hq = 1`. Entries of live scores are finite, or -inf (dead); the gradients of other entries are 0.
        mask: the mask of the attention, not dynamic. Another mask is refused unless it has the same live tiles and
            patterns; bits and lengths may differ. Pass the same object, or one that `with_lengths` made of it: to
            compare two objects makes the host wait for the device.

    Blocks of fewer than 64 tokens are slower with it, because the Triton kernels cannot join them into larger tiles.
    The Hopper kernels need blocks of 128 and values in the dtype of q. If batch elements or heads share values, the
    gradient of each is stored in fp32 first.

    Raises TypeError or ValueError for values that do not fit the mask.
    """
    values = floating(values, "tile_bias")
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be the BlockMask whose live tiles have the values; got {type(mask).__name__}.")
    if mask.dynamic:
        raise ValueError(
            "mask must not be dynamic, because its list of tiles is new at every step; pass mask.canonical() here and "
            "to attention."
        )
    wanted = len(mask.indices), mask.block_q, mask.block_k
    if values.ndim != 5 or values.shape[2:] != wanted:
        raise ValueError(
            "tile_bias must have shape [B or 1, Hq or 1, tiles, block_q, block_k], for this mask "
            f"[B or 1, Hq or 1, {', '.join(map(str, wanted))}]; got {list(values.shape)}."
        )
    return TileBias(values, mask)


def tile_values(function: Callable[[Tensor, Tensor], Tensor], mask: BlockMask) -> Tensor:
    """`function(q, k)` for all scores of the live tiles of a mask, as `tile_bias` takes them.

    >>> import torch
    >>> from sparseflash import masks, scores
    >>> mask = masks.local(100, window=32, block=16)
    >>> scores.tile_values(lambda q, k: -0.1 * (q - k).abs(), mask).shape
    torch.Size([1, 1, 19, 16, 16])

    A dense bias, and one of low rank, which is never stored:

    >>> pair = torch.randn(2, 4, 100, 100)
    >>> scores.tile_values(lambda q, k: pair[:, :, q, k], mask).shape
    torch.Size([2, 4, 19, 16, 16])
    >>> left, right = torch.randn(100, 8), torch.randn(100, 8)
    >>> scores.tile_values(lambda q, k: left[q[:, :, 0]] @ right[k[:, 0]].mT, mask).shape
    torch.Size([1, 1, 19, 16, 16])

    Args:
        function: takes the positions of queries, int64 `[tiles, block_q, 1]`, and of keys, `[tiles, 1, block_k]`;
            positions past the ends are replaced by the last one. Returns a differentiable tensor that broadcasts to
            `[B or 1, Hq or 1, tiles, block_q, block_k]`.

    If the mask has several patterns, the tiles of pattern p are `mask.indptr[p * Mq] : mask.indptr[(p + 1) * Mq]`.

    Raises ValueError for a result of another shape.
    """
    if not callable(function):
        raise TypeError(f"a function of (q, k) must be given; got {type(function).__name__}.")
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a BlockMask; got {type(mask).__name__}.")
    rows, cols, _ = stored_tiles(mask)
    q = (rows % mask.blocks[0] * mask.block_q).view(-1, 1, 1) + torch.arange(mask.block_q, device=mask.device)[:, None]
    k = (cols * mask.block_k).view(-1, 1, 1) + torch.arange(mask.block_k, device=mask.device)
    found = function(q.clamp(max=mask.q_len - 1), k.clamp(max=mask.k_len - 1))
    wanted = len(rows), mask.block_q, mask.block_k
    shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if (
        not isinstance(found, Tensor)
        or found.ndim > 5
        or any(1 != own != size for own, size in zip(found.shape[::-1], wanted[::-1]))
    ):
        raise ValueError(
            "the function must return a tensor that broadcasts to [B or 1, Hq or 1, "
            f"{', '.join(map(str, wanted))}]; got {shape}."
        )
    leading = (1,) * (5 - max(3, found.ndim))
    return found.expand(*leading, *found.shape[:-3], *wanted).contiguous()
