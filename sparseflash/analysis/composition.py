"""The exact composition of relations between tokens.

The bit matrices alone settle nearly all tiles. Bits are multiplied only for tiles that may end up partial, once for
each distinct pair of factors.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparseflash.analysis import bitrows
from sparseflash.analysis.bitrows import Index
from sparseflash.analysis.relation import TARGETS_AT_ONCE, Relation, settled, union
from sparseflash.blockmask import bitmask
from sparseflash.blockmask.build import SCORES_AT_ONCE
from sparseflash.blockmask.walks import words_of

MOST_PARTIAL = 1 << 24
_BITS_AT_ONCE = 1 << 26  # 8 MB of bits
_PRODUCTS_KEPT = 1 << 12  # 8 MB of words, in blocks of 128


class TooManyTiles(ValueError):
    """The result would need too much memory."""


def compose(a: Relation, b: Relation) -> Relation:
    """Who sees whom in two steps: token q sees k iff some t has a[q, t] and b[t, k]."""
    count = a.count
    live_a, live = a.live(), bitrows.product(a.live(), b.live())
    # A full tile times one without empty columns is full, and so is one without empty rows times a full tile.
    rows_a, columns_b = a.fills_rows(), b.fills_columns()
    weak = bitrows.product(a.partial(), b.partial())
    weak |= bitrows.product(a.full, b.partial(~columns_b)) | bitrows.product(a.partial(~rows_a), b.full)
    if (found := bitrows.count(weak, count)) > MOST_PARTIAL:
        raise TooManyTiles(
            f"the tiles whose bits have to be multiplied must be at most {MOST_PARTIAL}; got {found} of {a.block} x "
            f"{a.block}. Pass masks with larger blocks."
        )
    open_rows, open_cols = bitrows.pairs(weak, count)
    if not len(open_rows):
        return settled(a.block, count, live, [])
    across = bitrows.transpose(b.full, count)
    strong = bitrows.meet(a.full, across | b.partial(columns_b, transposed=True), open_rows, open_cols)
    strong |= bitrows.meet(a.full | a.partial(rows_a), across, open_rows, open_cols)
    open_rows, open_cols = open_rows[~strong], open_cols[~strong]
    full = live & ~bitrows.of_pairs(open_rows, open_cols, count, count)
    across |= b.partial(transposed=True)
    kinds_b = len(b.words) + 1

    def look_up(codes: Index) -> Tensor:
        left, which_left = torch.unique(torch.from_numpy(codes // kinds_b), return_inverse=True)
        right, which_right = torch.unique(torch.from_numpy(codes % kinds_b), return_inverse=True)
        of_a, of_b = words_of(left, a.words, a.block), words_of(right, b.words, b.block)
        return multiply(of_a, of_b, which_left, which_right, a.block)

    every_code = (len(a.words) + 1) * kinds_b
    few = every_code <= min(_PRODUCTS_KEPT, len(open_rows))
    products = look_up(np.arange(every_code)) if few else None

    def product_of(codes: Index) -> Tensor:
        return look_up(codes) if products is None else products.index_select(0, torch.from_numpy(codes))

    unions = []
    step = max(1, min(TARGETS_AT_ONCE, _BITS_AT_ONCE // max(count, 1)))
    for first in range(0, len(open_rows), step):
        i, j = open_rows[first : first + step], open_cols[first : first + step]
        target, through = bitrows.pairs(live_a[i] & across[j], count)
        code = a.kind_at(i[target] * count + through) * kinds_b + b.kind_at(through * count + j[target])
        sizes = np.bincount(target, minlength=len(i))
        state, words = union(sizes, code.__getitem__, product_of, a.block)
        unions.append((i * count + j, state, words))
    return settled(a.block, count, full, unions)


def multiply(a: Tensor, b: Tensor, which_a: Tensor, which_b: Tensor, block: int) -> Tensor:
    """Boolean products of the tiles `a[which_a[e]]` and `b[which_b[e]]`: words `[E, block, W]`."""
    found = [a[:0]]
    for some in torch.arange(len(which_a), device="cpu").split(max(1, SCORES_AT_ONCE // 8 // block**2)):
        # Each factor is unpacked once per batch. Sums of at most 256 products of 0 and 1 are exact in fp32.
        left, at_left = torch.unique(which_a[some], return_inverse=True)
        right, at_right = torch.unique(which_b[some], return_inverse=True)
        of_a, of_b = bitmask.unpack(a[left], block).float(), bitmask.unpack(b[right], block).float()
        found.append(bitmask.pack(torch.bmm(of_a[at_left], of_b[at_right]) > 0))
    return torch.cat(found)
