"""What the choices of `select` and of `block_scores` share: loads, and scores of the blocks of one tile of keys."""

import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.arithmetic import floor_divide


@triton.jit
def loaded_rows(x_ptr, row, rows, stride, D: tl.constexpr, PADDED_D: tl.constexpr, FAR: tl.constexpr):
    """Rows of queries or keys, `[ROWS, PADDED_D]`; 0 past the last of `rows`. FAR: offsets need 64 bits."""
    dims = tl.arange(0, PADDED_D)
    wide_row = row
    if FAR:
        wide_row = row.to(tl.int64)
    return tl.load(
        x_ptr + (wide_row * stride)[:, None] + dims[None, :], mask=(row < rows)[:, None] & (dims < D)[None, :],
        other=0.0,
    )  # fmt: skip


@triton.jit
def scores_of_blocks(
    q, k_ptr, row, first, last, position, begin, stop, col_start, block_start, rows, cols, blocks, sinks, near,
    column_tokens, factor, k_stride_n,
    ROWS: tl.constexpr, SPAN: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr,
    PADDED_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CANDIDATES: tl.constexpr,
    PRECISION: tl.constexpr, FAR: tl.constexpr, ALL_LIVE: tl.constexpr = False,
):  # fmt: skip
    """fp32 [LISTS, CANDIDATES]: the highest score of each block of a tile of BLOCK_N columns from `col_start` on.

    It is inf for blocks that a list always has, and -inf for blocks that it must not have.

    q: a tile of BLOCK_M rows, of which ROWS are a list. row, position: [BLOCK_M], and the last key that each may see.
    first, last: [LISTS], the positions of the first and the last query of each list. begin, stop: [BLOCK_M], the keys
    of the document of each row, if DOCUMENTS. ALL_LIVE: all rows see all columns, and `factor` is above 0.
    """
    LISTS: tl.constexpr = BLOCK_M // ROWS
    col = col_start + tl.arange(0, BLOCK_N)
    k = loaded_rows(k_ptr, col, cols, k_stride_n, D, PADDED_D, FAR)
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    if not ALL_LIVE:
        scores *= factor
        live = (row < rows)[:, None] & (col < cols)[None, :] & (scores == scores)
        token = (col * column_tokens)[None, :]
        if CAUSAL:
            live = live & (token <= position[:, None])
        if DOCUMENTS:
            live = live & (token >= begin[:, None]) & (token < stop[:, None])
        scores = tl.where(live, scores, float("-inf"))
    of_blocks = tl.max(scores.reshape(LISTS, ROWS, CANDIDATES, BLOCK_N // CANDIDATES), 3)
    found = tl.max(of_blocks, 1)
    if ALL_LIVE:
        # A product by a number above 0 keeps the order. Of NaN and a number, the maximum is the number.
        found *= factor
        found = tl.where(found == found, found, float("-inf"))
    found = tl.minimum(found, 3.4028234663852886e38)

    tokens = SPAN * column_tokens
    block = block_start + tl.arange(0, CANDIDATES)[None, :]
    if DOCUMENTS:  # a query at the end of a cache is counted from its last key
        until = tl.max(stop.reshape(LISTS, ROWS), 1)
        first, last = tl.minimum(first, until - 1), tl.minimum(last, until - 1)
    own_first, own_last = floor_divide(first, tokens), floor_divide(last, tokens)
    near_end = tl.where(near > 0, own_last + (1 if CAUSAL else near), own_first - near)  # empty without `near`
    close = (block > own_first[:, None] - near) & (block < near_end[:, None])
    is_open = block < blocks
    if CAUSAL:
        is_open = is_open & (block * tokens <= last[:, None])
    origin = 0
    if DOCUMENTS:
        of_list = tl.max(begin.reshape(LISTS, ROWS), 1)[:, None]
        is_open = is_open & (block * tokens >= of_list)
        is_open = is_open & (block * tokens < until[:, None])
        origin = of_list // tokens
    forced = ((block < origin + sinks) | close) & is_open
    return tl.where(forced, float("inf"), found)
