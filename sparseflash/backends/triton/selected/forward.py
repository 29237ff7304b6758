"""The forward kernels: a program per query and tile of heads gathers the keys of the query's list."""

import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.softmax import LN2, softmax_step
from sparseflash.backends.triton.selected.loads import (
    columns,
    listed_tokens,
    place_of_program,
    store_columns,
    token_offsets,
)
from sparseflash.backends.triton.selected.pieces import load_pieces, scores_of

# Not specialised, so other lengths do not recompile. The length of lists is: it decides how wide rows are loaded.
SIZES = ["q_len", "k_len", "kv_heads", "group", "first_row"]


@triton.jit
def values_of(v_ptr, k_low, tokens, live, stride, SHAPE: tl.constexpr):
    """The values of gathered keys; their first columns if v_ptr is None."""
    if v_ptr is None:
        return k_low
    else:
        return columns(v_ptr, token_offsets(tokens, live, stride, SHAPE.FAR), live, 0, SHAPE.DV, SHAPE.PADDED_DV)


@triton.jit(do_not_specialize=[*SIZES, "scale", "qk_scale"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, Hq, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, DV]; v may be None: see `values_of`
    lists_ptr, counts_ptr,  # as sort_kernel writes them
    out_ptr, lse_ptr,  # [B, Hq, Nq, DV], fp32 [B, Hq, Nq] contiguous
    kept_ptr,  # fp32 [2, rows_of_all] if KEEP: the maximum raw score and the inverse sum
    q_len, k_len, kv_heads, group, choices, first_row, rows_of_all, scale, qk_scale,
    strides,  # of batch, head and token, of q, k, v and out
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Computes out and lse of one query for the heads of a tile."""
    PRECISION: tl.constexpr = SHAPE.PRECISION
    KEEP: tl.constexpr = SHAPE.KEEP
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    ROWS: tl.constexpr = SHAPE.ROWS
    PADDED_DV: tl.constexpr = SHAPE.PADDED_DV
    q_strides, k_strides, v_strides, out_strides = strides
    row, batch, kv_head, query, head, inside = place_of_program(first_row, q_len, kv_heads, group, ROWS, SHAPE.TILES, 1)
    q_low, q_high = load_pieces(
        q_ptr + batch * q_strides[0] + query * q_strides[2], head.to(tl.int64) * q_strides[1], inside, SHAPE
    )
    k_ptr += batch * k_strides[0] + kv_head * k_strides[1]
    if v_ptr is not None:
        v_ptr += batch * v_strides[0] + kv_head * v_strides[1]
    list_ptr = lists_ptr + row * choices
    count = tl.load(counts_ptr + row)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DV], tl.float32)
    # Numbers of tokens are loaded one iteration ahead: addresses that were loaded in the same iteration would keep the
    # compiler from prefetching the keys.
    following = listed_tokens(list_ptr, 0, choices, BLOCK_N)
    for i in range(0, tl.cdiv(count, BLOCK_N)):
        tokens = following
        following = listed_tokens(list_ptr, (i + 1) * BLOCK_N, choices, BLOCK_N)
        live = tokens < k_len
        scores, k_low, _ = scores_of(
            q_low, q_high, k_ptr, token_offsets(tokens, live, k_strides[2], SHAPE.FAR), live, SHAPE
        )
        p, alpha = scores, m_i
        # Always true. If the compiler saw that this product leads to the next one, it would give every group of warps
        # all rows of the scores, so that each of two groups computed all of them.
        if i * BLOCK_N < count:
            p, alpha, m_i, l_i = softmax_step(scores, live[None, :], m_i, l_i, qk_scale, KEEP, PRECISION, False)
        values = values_of(v_ptr, k_low, tokens, live, v_strides[2], SHAPE)
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)

    empty = l_i == 0.0
    total = tl.where(empty, 1.0, l_i)
    maximum = tl.where(empty, 0.0, m_i)
    at = (batch * kv_heads * group + head) * q_len + query
    if KEEP:
        out = tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape))
        lse = maximum * scale + tl.log2(total) * LN2
        tl.store(kept_ptr + at, maximum, mask=inside)
        inverse = tl.where(empty, 0.0, tl.div_rn(tl.full([ROWS], 1.0, tl.float32), total))
        tl.store(kept_ptr + rows_of_all + at, inverse, mask=inside)
    else:
        out = acc * (1.0 / total)[:, None]
        lse = (maximum + tl.log2(total)) * LN2
    out = tl.where(empty[:, None], 0.0, out)
    store_columns(
        out_ptr + batch * out_strides[0] + query * out_strides[2], out, head.to(tl.int64) * out_strides[1], inside, 0,
        SHAPE.DV, SHAPE.PADDED_DV,
    )  # fmt: skip
    tl.store(lse_ptr + at, tl.where(empty, float("-inf"), lse), mask=inside)


@triton.jit(do_not_specialize=[*SIZES, "scale"])
def scores_kernel(
    q_ptr, k_ptr, lists_ptr, counts_ptr,  # as in forward_kernel
    scores_ptr,  # fp32 [B, Hq, Nq, choices], written
    q_len, k_len, kv_heads, group, choices, first_row, scale, strides,  # of q and k
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Writes the scores of one query's tokens for the heads of a tile, -inf for entries that are none."""
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    ROWS: tl.constexpr = SHAPE.ROWS
    q_strides, k_strides = strides
    row, batch, kv_head, query, head, inside = place_of_program(
        first_row, q_len, kv_heads, group, ROWS, SHAPE.TILES, 1
    )  # fmt: skip
    q_low, q_high = load_pieces(
        q_ptr + batch * q_strides[0] + query * q_strides[2], head.to(tl.int64) * q_strides[1], inside, SHAPE
    )
    k_ptr += batch * k_strides[0] + kv_head * k_strides[1]
    list_ptr = lists_ptr + row * choices
    written = ((batch * kv_heads * group + head) * q_len + query) * choices
    following = listed_tokens(list_ptr, 0, choices, BLOCK_N)
    for i in range(0, tl.cdiv(choices, BLOCK_N)):
        tokens = following
        following = listed_tokens(list_ptr, (i + 1) * BLOCK_N, choices, BLOCK_N)
        live = tokens < k_len
        scores, _, _ = scores_of(
            q_low, q_high, k_ptr, token_offsets(tokens, live, k_strides[2], SHAPE.FAR), live, SHAPE
        )
        entry = i * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(
            scores_ptr + written[:, None] + entry[None, :],
            tl.where(live[None, :], scores * scale, float("-inf")), mask=inside[:, None] & (entry < choices)[None, :],
        )  # fmt: skip
