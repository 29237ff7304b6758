"""The first kernels of the backward, for a chunk of queries: the gradients of scores, and dq.

dq has a kernel of its own, because its sums and the operands of the scores together need more registers and shared
memory than a program has at D = 576.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.delta import means_step
from sparseflash.backends.triton.device_functions.softmax import LOG2E, recomputed_weights, score_gradients
from sparseflash.backends.triton.selected.forward import SIZES, values_of
from sparseflash.backends.triton.selected.loads import columns, listed_tokens, place_of_program, token_offsets
from sparseflash.backends.triton.selected.pieces import load_pieces, scores_of

MOST_TOKENS = tl.constexpr(64)  # of a tile that reads the gradients of scores


@triton.jit
def recomputed(
    q_low, q_high, dout, k_ptr, v_ptr, tokens, live, lse2, inverse, qk_scale, k_stride, v_stride, SHAPE: tl.constexpr
):
    """`(exponentials, weights, gradients of the weights)` of a tile of chosen keys."""
    PRECISION: tl.constexpr = SHAPE.PRECISION
    scores, k_low, _ = scores_of(
        q_low, q_high, k_ptr, token_offsets(tokens, live, k_stride, SHAPE.FAR), live, SHAPE
    )  # fmt: skip
    exps, p = recomputed_weights(
        scores, live[None, :], lse2[:, None], inverse[:, None], qk_scale, SHAPE.KEEP, PRECISION, False
    )
    values = values_of(v_ptr, k_low, tokens, live, v_stride, SHAPE)
    return exps, p, tl.dot(dout, values.T, input_precision=PRECISION)


@triton.jit(do_not_specialize=[*SIZES, "scale", "qk_scale"])
def score_gradients_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, out_ptr,  # as in forward_kernel
    lists_ptr, counts_ptr, lse_ptr, kept_ptr,
    dlse_ptr,  # [B, Hq, Nq] contiguous, or None
    # [queries of the chunk, group, choices] contiguous, written: weights, or None, and scale * their gradients
    p_ptr, ds_ptr,
    q_len, k_len, kv_heads, group, choices, first_row, rows_of_all, scale, qk_scale,
    strides,  # of batch, head and token, of q, k, v, dout and out
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Writes p and ds of the chosen keys of one query, for the heads of a tile.

    In fp32 a first walk over the list computes delta and the inverse sum of exponentials, as `dq_kernel` does with
    DELTA, and for the same reason.
    """
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    ROWS: tl.constexpr = SHAPE.ROWS
    KEEP: tl.constexpr = SHAPE.KEEP
    q_strides, k_strides, v_strides, dout_strides, out_strides = strides
    row, batch, kv_head, query, head, inside = place_of_program(first_row, q_len, kv_heads, group, ROWS, SHAPE.TILES, 1)
    wide_head = head.to(tl.int64)
    q_low, q_high = load_pieces(
        q_ptr + batch * q_strides[0] + query * q_strides[2], wide_head * q_strides[1], inside, SHAPE
    )
    dout = columns(
        dout_ptr + batch * dout_strides[0] + query * dout_strides[2], wide_head * dout_strides[1], inside, 0, SHAPE.DV,
        SHAPE.PADDED_DV,
    )  # fmt: skip
    out = columns(
        out_ptr + batch * out_strides[0] + query * out_strides[2], wide_head * out_strides[1], inside, 0, SHAPE.DV,
        SHAPE.PADDED_DV,
    )  # fmt: skip
    k_ptr += batch * k_strides[0] + kv_head * k_strides[1]
    if v_ptr is not None:
        v_ptr += batch * v_strides[0] + kv_head * v_strides[1]
    list_ptr = lists_ptr + row * choices
    count = tl.load(counts_ptr + row)
    at = (batch * kv_heads * group + head) * q_len + query
    lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf"))
    empty = lse == float("-inf")
    dlse = tl.zeros([ROWS], tl.float32)
    if dlse_ptr is not None:
        dlse = tl.where(empty, 0.0, tl.load(dlse_ptr + at, mask=inside, other=0.0))
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    inverse = tl.zeros([ROWS], tl.float32)
    if KEEP:
        lse2 = tl.load(kept_ptr + at, mask=inside, other=0.0)
        inverse = tl.load(kept_ptr + rows_of_all + at, mask=inside, other=0.0)
        rest, weight, lost = (
            tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        )  # fmt: skip
        following = listed_tokens(list_ptr, 0, choices, BLOCK_N)
        for i in range(0, tl.cdiv(count, BLOCK_N)):
            tokens = following
            following = listed_tokens(list_ptr, (i + 1) * BLOCK_N, choices, BLOCK_N)
            exps, p, dp = recomputed(
                q_low, q_high, dout, k_ptr, v_ptr, tokens, tokens < k_len, lse2, inverse, qk_scale, k_strides[2],
                v_strides[2], SHAPE,
            )  # fmt: skip
            rest, weight, lost = means_step(rest, weight, lost, exps, p, dp, delta)
        weight = tl.where((inverse > 0.0) & (weight > 0.0), weight, 1.0)
        delta += tl.div_rn(rest, tl.where(inverse > 0.0, weight * inverse, 1.0))
        inverse = tl.where(inverse > 0.0, tl.div_rn(tl.full([ROWS], 1.0, tl.float32), weight), 0.0)
    else:
        lse2 = tl.where(empty, float("inf"), lse * LOG2E)
        delta = tl.where(empty, 0.0, delta - dlse)

    written = ((row - first_row) * group + head - kv_head * group) * choices
    following = listed_tokens(list_ptr, 0, choices, BLOCK_N)
    # Zeros are written up to a whole number of the tiles that other kernels read: a mask for each entry would keep
    # those from loading several entries at once.
    for i in range(0, tl.cdiv(count, MOST_TOKENS) * (MOST_TOKENS // BLOCK_N)):
        tokens = following
        following = listed_tokens(list_ptr, (i + 1) * BLOCK_N, choices, BLOCK_N)
        _, p, dp = recomputed(
            q_low, q_high, dout, k_ptr, v_ptr, tokens, tokens < k_len, lse2, inverse, qk_scale, k_strides[2],
            v_strides[2], SHAPE,
        )  # fmt: skip
        ds = score_gradients(p, dp, delta[:, None], dlse[:, None] if KEEP else None) * scale
        entry = i * BLOCK_N + tl.arange(0, BLOCK_N)
        pointers = written[:, None] + entry[None, :]
        exists = inside[:, None] & (entry < choices)[None, :]
        if p_ptr is not None:
            tl.store(p_ptr + pointers, p.to(p_ptr.dtype.element_ty), mask=exists)
        tl.store(ds_ptr + pointers, ds.to(ds_ptr.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    ds_ptr, k_ptr, lists_ptr, counts_ptr,  # as in score_gradients_kernel
    dq_ptr,  # [B, Hq, Nq, D], written
    q_len, k_len, kv_heads, group, choices, first_row,
    strides,  # of batch, head and token, of k and dq
    FIRST: tl.constexpr, DIM: tl.constexpr, PIECE: tl.constexpr,  # the first column, how many, and those of a program
    ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Computes PIECE columns of dq of one query for the heads of a tile: the sum of ds k over its list."""
    PIECES: tl.constexpr = (DIM + PIECE - 1) // PIECE
    k_strides, dq_strides = strides
    row, batch, kv_head, query, head, inside = place_of_program(first_row, q_len, kv_heads, group, ROWS, TILES, PIECES)
    column = tl.program_id(0) % PIECES * PIECE
    dims = column + tl.arange(0, PIECE)
    exists = dims < DIM
    k_ptr += batch * k_strides[0] + kv_head * k_strides[1] + FIRST
    list_ptr = lists_ptr + row * choices
    read = ((row - first_row) * group + head - kv_head * group) * choices
    acc = tl.zeros([ROWS, PIECE], tl.float32)
    following = listed_tokens(list_ptr, 0, choices, BLOCK_N)
    for i in range(0, tl.cdiv(tl.load(counts_ptr + row), BLOCK_N)):
        tokens = following
        following = listed_tokens(list_ptr, (i + 1) * BLOCK_N, choices, BLOCK_N)
        live = tokens < k_len
        entry = i * BLOCK_N + tl.arange(0, BLOCK_N)
        ds = tl.load(
            ds_ptr + read[:, None] + entry[None, :], mask=inside[:, None] & (entry < choices)[None, :], other=0.0
        )  # fmt: skip
        offsets = token_offsets(tokens, live, k_strides[2], FAR)
        k = tl.load(
            k_ptr + offsets[:, None] + dims[None, :], mask=live[:, None] & exists[None, :], other=0.0
        )  # fmt: skip
        acc = tl.dot(ds, k, acc, input_precision=PRECISION)
    dq_ptr += batch * dq_strides[0] + query * dq_strides[2] + FIRST
    pointers = dq_ptr + (head.to(tl.int64) * dq_strides[1])[:, None] + dims[None, :]
    tl.store(pointers, acc.to(dq_ptr.dtype.element_ty), mask=inside[:, None] & exists[None, :])
