"""The bits of partial tiles: packing, unpacking, and storing each distinct tile once.

A tile is a `block_q x block_k` patch of the score matrix. A partial tile is stored with one bit per score: score `(q,
k)` of the tile is bit `k % 32` of word `k // 32` of row `q`. Blocks of 16 keys use the low half of their word.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseflash.blockmask.cache import bounded
from sparseflash.blockmask.unique import FEW, number_by_first_appearance

WORD = 32  # scores per word
WORDS_AT_ONCE = 1 << 22  # words processed at a time: 16 MB, and a few times as much in temporaries
_SERIAL = (1 << 15) - 1  # the most words that PyTorch processes on one thread: at::internal::GRAIN_SIZE - 1


def words_per_row(block_k: int) -> int:
    """Number of int32 words that hold one row of a tile."""
    return max(block_k // WORD, 1)


def full_word(block_k: int) -> int:
    """The word of 32 live scores; for blocks of 16 keys only the low half is set."""
    return -1 if block_k >= WORD else (1 << block_k) - 1


def pack(live: Tensor) -> Tensor:
    """Packs bool `[..., block_q, block_k]` into int32 `[..., block_q, words_per_row(block_k)]`.

    >>> live = torch.zeros(1, 16, 16, dtype=torch.bool)
    >>> live[0, 0, :3] = True
    >>> pack(live)[0, 0].tolist()
    [7]
    """
    shape = (*live.shape[:-1], words_per_row(live.shape[-1]))
    flat = live.reshape(-1).contiguous()
    if flat.storage_offset() % 8:
        flat = flat.clone()  # the view as int64 below needs an aligned offset
    # Each eight scores are eight bytes, 0 or 1, of one int64, lowest byte first. The factor has bits 7, 14, ..., 56,
    # so it moves byte i to the bits 8 i + 7 j, among them 56 + i. All are distinct, so nothing carries.
    octets = (flat.view(torch.int64) * 0x0102_0408_1020_4080 >> 56).to(torch.uint8)
    if live.shape[-1] < WORD:
        return (octets.view(torch.int16).to(torch.int32) & full_word(live.shape[-1])).view(shape)
    return octets.view(torch.int32).view(shape)


def unpack(words: Tensor, block_k: int) -> Tensor:
    """The inverse of `pack`: int32 `[..., block_q, words]` to bool `[..., block_q, block_k]`."""
    bits = min(WORD, block_k)
    shifts = torch.arange(bits, dtype=torch.int32, device=words.device)
    live = ((words.unsqueeze(-1) >> shifts) & 1).to(torch.bool)
    return live.reshape(*words.shape[:-1], block_k)


def choices(words: Tensor, block_k: int) -> Tensor:
    """The words of every kind of tile, the full one (0) first and a dead one last: int32 `[T + 2, block_q, W]`.

    >>> choices(torch.tensor([3]).view(1, 1, 1).expand(1, 16, 1).to(torch.int32), 16)[:, 0, 0].tolist()
    [65535, 3, 0]
    """
    full = words.new_full((1, *words.shape[1:]), full_word(block_k))
    return torch.cat([full, words, torch.zeros_like(full)])


def side_by_side(words: Tensor, block_k: int) -> Tensor:
    """The words of tiles whose keys follow one another: int32 `[C, tiles, block_q, W]` to `[C, block_q, W']`."""
    words = words.transpose(1, 2)
    if block_k < WORD:  # two pieces of 16 keys a word
        words = words[..., 0::2, :] | (words[..., 1::2, :] << 16)
    return words.flatten(2)


def transposed(words: Tensor, block_k: int) -> Tensor:
    """The words of transposed tiles: int32 `[T, block_q, W]` to `[T, block_k, W']`.

    A square of 32 x 32 bits is transposed by exchanging two of its quarters, then two of each quarter's quarters, and
    so on (Warren, Hacker's Delight, section 7-3).
    """
    count, block_q, width = words.shape
    if block_q < WORD:
        words = torch.cat([words, torch.zeros_like(words)], dim=1)
    across = words.shape[1] // WORD
    square = words.reshape(count, across, WORD, width).permute(0, 3, 2, 1)  # [T, W, 32 queries, block_q / 32]
    square = square.clone(memory_format=torch.contiguous_format)  # a copy, because the loop below writes to it
    for half, low in ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        upper, lower = square.view(count, width, WORD // (2 * half), 2, half, across).unbind(3)
        # `low` discards the copies of the sign bit that the shift of an int32 makes.
        differ = ((upper >> half) ^ lower) & low
        lower ^= differ
        upper ^= differ << half
    return square.flatten(1, 2)[:, :block_k].contiguous()


def live_scores(words: Tensor) -> Tensor:
    """Number of live scores of each tile: int32 `[T, block_q, words]` to int64 `[T]`."""
    return ones(words).sum(dim=(-2, -1), dtype=torch.int64)


def ones(x: Tensor) -> Tensor:
    """How many of the 32 lower bits of each integer are set; no others must be, except those of an int32's sign.

    >>> ones(torch.tensor([0, 5, -1], dtype=torch.int32)).tolist()
    [0, 2, 32]
    """
    # Parallel population count. The mask after each arithmetic shift discards the copied sign bits.
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 63


def deduplicate(words: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct tiles in order of first appearance, and the index of each tile among them.

    `words` int32 `[E, block_q, W]` -> `(unique, inverse)`: `[T, block_q, W]` and int64 `[E]`, with `unique[inverse] ==
    words`.
    """
    count = words.shape[0]
    if count <= 1:
        return words, torch.zeros(count, dtype=torch.int64, device=words.device)
    if count <= FEW and words.device.type == "cpu":
        numbers: dict[bytes, int] = {}
        inverse, representative = _numbered(words, numbers, 0)
        return words if len(numbers) == count else words.index_select(0, representative), inverse
    flat = words.flatten(1)
    # Sorting 64-bit fingerprints is far cheaper than sorting rows of hundreds of words. Tiles with equal fingerprints
    # are compared below; a collision falls back to sorting the rows.
    generator = torch.Generator("cpu").manual_seed(0x5F)
    factors = torch.randint(-(2**62), 2**62, (flat.shape[1],), generator=generator, device="cpu").to(words.device) | 1
    # On a CPU, chunks that fit in its caches are faster. They are also too small for PyTorch's threads, which would
    # wait for one another on a busy machine.
    rows_at_once = max(1, (_SERIAL if words.device.type == "cpu" else WORDS_AT_ONCE) // max(1, flat.shape[1]))
    fingerprint = torch.cat([(some.to(torch.int64) * factors).sum(1) for some in flat.split(rows_at_once)])
    inverse, representative = number_by_first_appearance(fingerprint)
    proposed = zip(flat.split(rows_at_once), representative[inverse].split(rows_at_once), strict=True)
    # index_select copies whole rows, and is faster than indexing.
    if not all(torch.equal(some, flat.index_select(0, same)) for some, same in proposed):
        _, inverse = torch.unique(flat, dim=0, return_inverse=True)
        inverse, representative = number_by_first_appearance(inverse)
    # No copy if all tiles are distinct: these arrays can be most of the memory.
    return words if len(representative) == count else words.index_select(0, representative), inverse


def _numbered(words: Tensor, known: dict[bytes, int], first_new: int) -> tuple[Tensor, Tensor]:
    """The number of each tile, int64 `[E]`, and the positions of new tiles, which are added to `known`."""
    inverse: list[int] = []
    representative: list[int] = []
    for place, tile in enumerate(words.numpy()):
        key = tile.tobytes()
        if key not in known:
            known[key] = first_new + len(representative)
            representative.append(place)
        inverse.append(known[key])
    return torch.from_numpy(np.array(inverse, dtype=np.int64)), torch.from_numpy(
        np.array(representative, dtype=np.int64)
    )


def classify(words_of: Callable[[Any], Tensor], recipes: Any, block_q: int, block_k: int) -> tuple[Tensor, Tensor]:
    """Sorts tiles into dead, full and partial, and deduplicates the partial ones.

    >>> words = torch.tensor([0, 3, 0xFFFF, 3]).view(4, 1, 1).expand(4, 16, 1).to(torch.int32)
    >>> kind, distinct = classify(lambda some: words[some], torch.arange(4), 16, 16)
    >>> kind.tolist(), distinct[:, 0, 0].tolist()
    ([-1, 1, 0, 1], [3])

    `recipes`: a tensor or array `[C, ...]`, one entry per tile. `words_of(recipes[...])` returns the words int32 `[C,
    block_q, W]` of some of the tiles; it is called for a bounded number at a time. Returns `(kind, distinct)`: kind
    int64 `[C]` is -1 for a dead tile, 0 for a full one and t for `distinct[t - 1]`.
    """
    kinds, found, count = [], [], 0
    size = block_q * words_per_row(block_k)
    at_once = max(1, WORDS_AT_ONCE // size)
    for start in range(0, max(1, len(recipes)), at_once):
        words = words_of(recipes[start : start + at_once])
        if len(recipes) <= min(FEW, at_once) and words.device.type == "cpu":
            full = full_word(block_k).to_bytes(4, sys.byteorder, signed=True) * size
            kind, new = _numbered(words, {bytes(4 * size): -1, full: 0}, 1)
            return kind, words if len(new) == len(words) else words.index_select(0, new)
        live = (words != 0).flatten(1).any(1)
        partial = live & (words != full_word(block_k)).flatten(1).any(1)
        distinct, inverse = deduplicate(words[partial])
        kind = live.to(torch.int64) - 1
        kind[partial] = inverse + 1 + count
        kinds.append(kind)
        found.append(distinct)
        count += len(distinct)
    if len(kinds) == 1:
        return kinds[0], found[0]
    kind, (distinct, inverse) = torch.cat(kinds), deduplicate(torch.cat(found))
    kind[kind > 0] = inverse[kind[kind > 0] - 1] + 1
    return kind, distinct


def rectangle(block_q: int, block_k: int, live_q: int, live_k: int, device: torch.device) -> Tensor:
    """The words `[block_q, W]` of a tile whose first `live_q` rows and first `live_k` columns are live."""
    live = torch.zeros(block_q, block_k, dtype=torch.bool, device=device)
    live[:live_q, :live_k] = True
    return pack(live)


def below(stop: int | NDArray[np.int64], block_k: int) -> NDArray[np.int32]:
    """The words `[..., W]` of tile rows whose first `stop` keys are live; `stop` `[...]` may have any value.

    >>> below(np.array([-3, 2, 40]), 32).tolist()
    [[0], [3], [-1]]
    """
    # Taking whole rows of a table is faster than computing the words.
    return _rows_below(block_k).take(stop, axis=0, mode="clip")


@bounded(maxsize=8)
def _rows_below(block_k: int) -> NDArray[np.int32]:
    live = np.arange(max(block_k, WORD)) < np.arange(block_k + 1)[:, None]
    return np.packbits(live, axis=1, bitorder="little").view(np.int32)
