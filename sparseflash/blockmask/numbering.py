"""The number of a live tile in a mask's list, found by its block row and column.

Code that walks tiles in another order (kernels, over rows or columns, full tiles first) uses the number to find data
that is stored tile by tile, such as a bias. A table of numbers would take four bytes for every pair of blocks; this
takes two bits: for 32 block columns side by side, one word has the live ones, and one the number of live tiles before
them in the list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseflash.blockmask.bitmask import ones
from sparseflash.blockmask.cache import mask_cache, once
from sparseflash.blockmask.csr import stored_tiles

if TYPE_CHECKING:
    from sparseflash.blockmask import BlockMask

COLUMNS = 32  # block columns of a word


def tile_numbers(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """The input of `number_of_tile`, int32 `[P, Mq, ceil(Mk / 32), 2]`, and the mask's `pattern`.

    >>> from sparseflash import BlockMask
    >>> numbers, pattern = tile_numbers(BlockMask.from_function(lambda q, k: k <= q, 48, block=16))
    >>> numbers.tolist(), pattern.tolist()
    ([[[[1, 0]], [[3, 1]], [[7, 3]]]], [[0]])

    Cached with the mask, which must not be dynamic.
    """
    if torch.compiler.is_compiling():  # compiled code must not cache anything
        return _numbers(mask), mask.pattern
    # Of a copy of the pattern, because autograd cannot save arrays of a mask that was made in inference mode.
    return once(mask_cache(mask.indices), "tile numbers", lambda: (_numbers(mask), mask.pattern.clone()))


def _numbers(mask: BlockMask) -> Tensor:
    row_blocks, words = mask.blocks[0], -(-mask.blocks[1] // COLUMNS)
    rows, cols, _ = stored_tiles(mask)
    word = rows * words + cols // COLUMNS
    found = torch.zeros((len(mask.indptr) - 1) * words, 2, dtype=torch.int32, device=mask.device)
    bit = torch.ones_like(cols, dtype=torch.int32) << (cols % COLUMNS).to(torch.int32)
    found[:, 0].index_add_(0, word, bit)  # the sum of distinct bits is their union, also for the sign bit
    found[:, 1] = torch.searchsorted(word, torch.arange(len(found), device=mask.device))
    return found.view(-1, row_blocks, words, 2)


def number_of_tile(numbers: Tensor, pattern: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """The place of a live tile in the list, int64; for a dead tile, the place of the live tile after it.

    All arguments but the first are int64 and broadcast.

    >>> from sparseflash import BlockMask
    >>> numbers, _ = tile_numbers(BlockMask.from_function(lambda q, k: k <= q, 48, block=16))
    >>> number_of_tile(numbers, torch.tensor(0), torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 1, 2])).tolist()
    [0, 1, 2, 5]
    """
    found = numbers[pattern, row, column // COLUMNS].long()
    below = found[..., 0] & ((1 << column % COLUMNS) - 1)
    return found[..., 1] + ones(below)
