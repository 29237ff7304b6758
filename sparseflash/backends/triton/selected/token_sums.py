"""The gradients of keys and values: each query writes a row for each of its tokens, then each token adds its rows.

    row(query, token) = sum over the heads of a group of  ds[head] q[head]  (+ p[head] dout[head] if keys are values)

The rows lie in the order of `places`: by token, then by query. So the sums have a fixed order.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["q_len", "kv_heads", "group", "first_row"])
def rows_kernel(
    x_ptr, weights_ptr,  # q and ds, or dout and p: [B, Hq, Nq, .] and [queries of the chunk, group, choices]
    y_ptr, y_weights_ptr,  # None, or dout and p, if their products belong to the same rows
    counts_ptr, places_ptr,
    rows_ptr,  # fp32 [choices of the chunk, width], written
    q_len, kv_heads, group, choices, first_row, width,
    strides,  # of x and y
    PIECE: tl.constexpr, FIRST: tl.constexpr, DIM: tl.constexpr,  # columns a program, the first, and how many
    HEADS: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes PIECE columns of the rows of one query."""
    PIECES: tl.constexpr = (DIM + PIECE - 1) // PIECE
    x_strides, y_strides = strides
    row = first_row + (tl.program_id(0) // PIECES).to(tl.int64)
    column = tl.program_id(0) % PIECES * PIECE
    pair, query = row // q_len, row % q_len
    batch, kv_head = pair // kv_heads, pair % kv_heads
    in_group = tl.arange(0, HEADS)
    inside = in_group < group
    head = (kv_head * group + in_group).to(tl.int64)
    dims = tl.arange(0, PIECE)
    exists = column + dims < DIM
    x_ptr += batch * x_strides[0] + query * x_strides[2] + FIRST + column
    x = tl.load(
        x_ptr + (head * x_strides[1])[:, None] + dims[None, :], mask=inside[:, None] & exists[None, :], other=0.0
    )
    if y_ptr is not None:
        y_ptr += batch * y_strides[0] + query * y_strides[2] + FIRST + column
        y = tl.load(
            y_ptr + (head * y_strides[1])[:, None] + dims[None, :], mask=inside[:, None] & exists[None, :], other=0.0
        )
    local = row - first_row
    offsets = (local * group + in_group) * choices
    rows_ptr += FIRST + column
    for first in range(0, tl.load(counts_ptr + row), TOKENS):
        entry = first + tl.arange(0, TOKENS)
        place = tl.load(places_ptr + local * choices + entry, mask=entry < choices, other=-1)
        # Entries that are none may be read: their rows are not stored. If the mask depended on places, the compiler
        # would not prefetch.
        live = inside[:, None] & (entry < choices)[None, :]
        weights = tl.load(weights_ptr + offsets[:, None] + entry[None, :], mask=live, other=0.0)
        rows = tl.dot(weights.T, x, input_precision=PRECISION)
        if y_ptr is not None:
            y_weights = tl.load(y_weights_ptr + offsets[:, None] + entry[None, :], mask=live, other=0.0)
            rows = tl.dot(y_weights.T, y, rows, input_precision=PRECISION)
        at = tl.maximum(place, 0) * width
        tl.store(rows_ptr + at[:, None] + dims[None, :], rows, mask=(place >= 0)[:, None] & exists[None, :])


@triton.jit(do_not_specialize=["first_token"])
def sum_kernel(
    rows_ptr, counts_ptr, ends_ptr,  # fp32 [choices of the chunk, width]; int32 and int64, of each token of the chunk
    sums_ptr,  # fp32 [B * Hkv * Nk, width], added to
    first_token, width, PIECE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds PIECE columns of the rows of one token."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    exists = dims < width
    count = tl.load(counts_ptr + token)
    if count > 0:
        start = tl.load(ends_ptr + token) - count
        total = tl.zeros([PIECE], tl.float32)
        for first in range(0, count, ROWS):
            at = first + tl.arange(0, ROWS)
            rows = tl.load(
                rows_ptr + (start + at)[:, None] * width + dims[None, :],
                mask=(at < count)[:, None] & exists[None, :], other=0.0,
            )  # fmt: skip
            total += tl.sum(rows, 0)
        pointers = sums_ptr + (first_token + token) * width + dims
        tl.store(pointers, tl.load(pointers, mask=exists) + total, mask=exists)
