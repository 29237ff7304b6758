"""The scores of all blocks of some lists of `select_blocks`: for lists too long for registers, and for few queries of
many keys, which are shared by many programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.backends.triton.launcher import launches_of
from sparseflash.masks.fused.largest import write_largest
from sparseflash.masks.fused.select import columns_of_a_tile, constants_of
from sparseflash.masks.fused.tile_scores import loaded_rows, scores_of_blocks

if TYPE_CHECKING:
    from sparseflash.masks.tiling.columns import Columns

_AT_ONCE = 1 << 26  # scores in memory together


def lists_by_scores(
    q: Tensor, k: Tensor, of: Columns, top_k: int, factor: float, bounds: Tensor | None, in_order: bool
) -> Tensor:  # fmt: skip
    """int32 `[B, Hq, lists, top_k]`, as `lists_of_blocks`, for any `top_k`: some lists at a time.

    in_order: by score; otherwise by number, which saves a sort.
    """
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    batch, heads, rows, _ = q.shape
    block_n = columns_of_a_tile(q, of)
    constants = constants_of(q, k, of, bounds, max(of.rows, 64), block_n)
    index = torch.empty(batch * heads, of.lists, top_k, dtype=torch.int32, device=q.device)
    tile = constants.block_m // of.rows  # lists
    step = max(1, _AT_ONCE // (batch * heads * max(1, of.blocks)) // tile) * tile
    kernel = _kernel(
        q.device, constants, q.dtype, q.stride()[:3], k.stride()[:3], q.data_ptr() % 16, k.data_ptr() % 16,
        0 if bounds is None else bounds.data_ptr() % 16,
    )  # fmt: skip
    for start in range(0, of.lists, step):
        count = min(step, of.lists - start)
        scores = torch.empty(batch * heads, count, of.blocks, dtype=torch.float32, device=q.device)
        row_tiles, col_tiles = -(-count // tile), -(-of.blocks // constants.candidates)
        kernel.start(
            batch * heads * row_tiles * col_tiles, q, k, bounds, scores, heads, heads // k.shape[1], row_tiles,
            col_tiles, start, count, rows, k.shape[2], of.q_len, of.k_len - of.q_len, of.row_tokens, of.column_tokens,
            of.blocks, of.sinks, of.near, factor, *q.stride()[:3], *k.stride()[:3], *constants,
        )  # fmt: skip
        write_largest(scores, None, None, index, start)
        if in_order:
            part = index[:, start : start + count]
            found = scores.gather(2, part.clamp(min=0).long()).masked_fill(part < 0, -torch.inf)
            order = found.sort(dim=2, descending=True, stable=True).indices
            index[:, start : start + count] = part.gather(2, order)
    return index.view(batch, heads, of.lists, top_k)


@triton.jit(
    do_not_specialize=[
        "heads", "group", "row_tiles", "col_tiles", "start", "count", "rows", "cols", "q_len", "shift", "row_tokens",
        "column_tokens", "blocks", "sinks", "near", "factor",
    ]
)  # fmt: skip
def block_scores_kernel(
    q_ptr, k_ptr,  # [B, Hq, rows, D], [B, Hkv, cols, D]
    bounds_ptr,  # int32 [2, rows]: where the document of each row begins and ends; None without DOCUMENTS
    scores_ptr,  # fp32 [B, Hq, count, blocks], written
    heads, group, row_tiles, col_tiles, start, count, rows, cols, q_len, shift, row_tokens, column_tokens, blocks,
    sinks, near, factor, q_stride_b, q_stride_h, q_stride_n, k_stride_b, k_stride_h, k_stride_n,
    ROWS: tl.constexpr, SPAN: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr,
    PADDED_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CANDIDATES: tl.constexpr,
    PRECISION: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Writes the scores of CANDIDATES blocks for the lists of a tile, of the `count` lists from `start` on."""
    LISTS: tl.constexpr = BLOCK_M // ROWS
    PARTS: tl.constexpr = SPAN * CANDIDATES // BLOCK_N  # tiles of keys of a block
    program = tl.program_id(0)
    col_tile, program = program % col_tiles, program // col_tiles
    row_tile, batch_head = program % row_tiles, program // row_tiles
    batch, head = (batch_head // heads).to(tl.int64), batch_head % heads
    row = start * ROWS + row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    position = tl.minimum((row + 1) * row_tokens, q_len) - 1 + shift
    q_ptr += batch * q_stride_b + head.to(tl.int64) * q_stride_h
    k_ptr += batch * k_stride_b + (head // group).to(tl.int64) * k_stride_h
    q = loaded_rows(q_ptr, row, rows, q_stride_n, D, PADDED_D, FAR)
    number = row_tile * LISTS + tl.arange(0, LISTS)
    first = (start + number) * (ROWS * row_tokens)
    last = tl.minimum(first + ROWS * row_tokens, q_len) - 1 + shift
    first += shift
    begin, stop = position, position  # not read without DOCUMENTS
    if DOCUMENTS:
        begin = tl.load(bounds_ptr + row, mask=row < rows, other=0)
        stop = tl.load(bounds_ptr + rows + row, mask=row < rows, other=0)
    block = col_tile * CANDIDATES
    found = tl.full([LISTS, CANDIDATES], float("-inf"), tl.float32)
    parts = PARTS
    if DOCUMENTS:  # past the documents there is nothing to score
        parts = tl.where(block * SPAN * column_tokens < tl.max(stop, 0), PARTS, 0)
    for part in range(0, parts):
        of_part = scores_of_blocks(
            q, k_ptr, row, first, last, position, begin, stop, block * SPAN + part * BLOCK_N, block, rows, cols, blocks,
            sinks, near, column_tokens, factor, k_stride_n,
            ROWS, SPAN, CAUSAL, DOCUMENTS, D, PADDED_D, BLOCK_M, BLOCK_N, CANDIDATES, PRECISION, FAR,
        )  # fmt: skip
        found = tl.maximum(found, of_part)
    each = block + tl.arange(0, CANDIDATES)
    to = (batch_head.to(tl.int64) * count + number)[:, None] * blocks + each[None, :]
    tl.store(scores_ptr + to, found, mask=(number < count)[:, None] & (each < blocks)[None, :])


_kernel = launches_of(block_scores_kernel, num_warps=8, num_stages=2)
