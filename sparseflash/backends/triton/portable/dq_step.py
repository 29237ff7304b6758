"""The steps of `dq_kernel` for one tile of keys: recompute the weights, then add to the gradients."""

import triton
import triton.language as tl

from sparseflash.backends.triton.changes.kind import At
from sparseflash.backends.triton.changes.steps import changed_scores, gradients_before, loaded
from sparseflash.backends.triton.device_functions.fp32_split import accumulate, products
from sparseflash.backends.triton.device_functions.loads import live_in_row, load_tokens
from sparseflash.backends.triton.device_functions.softmax import recomputed_weights, score_gradients
from sparseflash.backends.triton.portable.dropout import kept_weights


@triton.jit
def row_step(
    q_tile, dout_tile, k, v, lse2, inverse, words_ptr, tile, place, first_k, q_len, k_len, k_length, scale, qk_scale,
    k_strides, v_strides, dropout, changes, live_queries,
    SHAPE: tl.constexpr, CHANGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Recomputes the weights for one tile of keys: `(k_tile, exponentials, weights, gradients of the weights, kept)`.

    kept: the values that score modifications keep for their gradients.
    """
    PRECISION: tl.constexpr = SHAPE.PRECISION
    k_tile = load_tokens(
        k, place.batch, place.kv_head, first_k, k_len, k_strides, SHAPE.D, SHAPE.PADDED_D, SHAPE.BLOCK_N, not MASKED,
        SHAPE.TMA, PRECISION,
    )  # fmt: skip
    v_tile = load_tokens(
        v, place.batch, place.kv_head, first_k, k_len, v_strides, SHAPE.DV, SHAPE.PADDED_DV, SHAPE.BLOCK_N,
        not MASKED, SHAPE.TMA, PRECISION,
    )  # fmt: skip
    if CHANGES is not None:
        at = At(place.batch, place.head, place.batch_head, place.first_q, first_k, q_len, k_len, live_queries)
        read = loaded(CHANGES, changes, at, SHAPE.BLOCK_Q, SHAPE.BLOCK_K, SHAPE.BLOCK_M, SHAPE.BLOCK_N, MASKED, False)
    scores = products(q_tile, k_tile, PRECISION)
    kept = ()
    if CHANGES is not None:
        scores, kept = changed_scores(CHANGES, changes, read, scores, scale, at, SHAPE.BLOCK_M, SHAPE.BLOCK_N, False)
    live, inverses = None, None
    if MASKED:
        live = live_in_row(
            words_ptr, tile, place.first_q, first_k, k_length, SHAPE.BLOCK_Q, SHAPE.BLOCK_K, SHAPE.BLOCK_M,
            SHAPE.BLOCK_N, SHAPE.GATHERED,
            SHAPE.HAS_LENGTHS,
        )  # fmt: skip
    if SHAPE.KEEP:
        inverses = inverse[:, None]
    exps, p = recomputed_weights(
        scores, live, lse2[:, None], inverses, qk_scale, SHAPE.KEEP, PRECISION, CHANGES is not None
    )
    dp = products(dout_tile, v_tile, PRECISION)
    if SHAPE.DROPOUT:
        keep = kept_weights(
            dropout, place.batch_head, place.first_q, first_k, q_len, k_len, SHAPE.BLOCK_M, SHAPE.BLOCK_N, False
        )
        dp = tl.where(keep, dp * dropout.amplification, 0.0)
    return k_tile, exps, p, dp, kept


@triton.jit
def dq_step(
    dq, sums, k_tile, p, dp, delta, dlse, kept, changes, place, first_k, q_len, k_len, live_queries,
    SHAPE: tl.constexpr, CHANGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of one tile of keys to dq (without the scale) and to the sums of score modifications.

    Returns `(dq, sums)`.
    """
    PRECISION: tl.constexpr = SHAPE.PRECISION
    ds = score_gradients(p, dp, delta[:, None], dlse)
    if CHANGES is not None:
        at = At(place.batch, place.head, place.batch_head, place.first_q, first_k, q_len, k_len, live_queries)
        ds, sums = gradients_before(CHANGES, changes, sums, ds, kept, at, SHAPE.BLOCK_Q, SHAPE.BLOCK_K, MASKED)
    return accumulate(ds, k_tile, dq, PRECISION), sums
