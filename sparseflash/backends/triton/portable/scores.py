"""Changes of scores in the kernels. `sparseflash/scores/` is the definition.

Changed scores are in natural units, with the scale inside, so what follows takes `log2(e)` in place of `scale *
log2(e)`. Biases and tables, and the gradients of these, are in files of their own.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.portable.biases import load_bias, load_tile_bias
from sparseflash.backends.triton.portable.change_flags import CAPPED, HARDWARE_TANH, LOGARITHMIC
from sparseflash.backends.triton.portable.loads import along_keys, along_queries, token_numbers
from sparseflash.backends.triton.portable.position_tables import (
    code_differences,
    codes_of_tile,
    entries_at,
    shared_bucket,
)
from sparseflash.backends.triton.portable.softmax import LN2, LOG2E, finite_maximum


@triton.jit
def loaded_biases(
    changes, batch, head, first_q, first_k, q_len, k_len,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """What `changed_scores` adds to a tile of scores: `(a bias, a bias of live tiles)`, 0.0 for one that is not given.

    Of queries past a sequence's length nothing is read: it need not be finite, and full tiles have no mask.

    To be called before the products. A bias is loaded in a layout of its own, and of two layouts that meet where no
    product decides, as in the maximum of a row, Triton takes that of the later one. If that is the load, all scores
    change into it and back, and a row is reduced across a warp: where the rows of a 16-bit bias do not begin at
    multiples of 16 numbers, with 40 to 110 times the shuffles and 550 to 1,550 bytes of spills (forward, D = 32 to
    128, Triton 3.6 and 3.9). A bias of keys is not loaded here: it takes 6 % longer (forward, D = 128, H200).
    """
    q, k = token_numbers(first_q, TILE_M), token_numbers(first_k, TILE_N)
    CUT: tl.constexpr = changes.q_length is not None
    q_stop = changes.q_length if CUT else q_len
    bias = 0.0
    if changes.bias_ptr is not None:
        bias = load_bias(
            changes.bias_ptr, changes.bias_strides, batch, head, first_q, first_k, q, k, q_stop, k_len, TILE_M, TILE_N,
            MASKED, CUT, TRANSPOSED,
        )  # fmt: skip
    tile_bias = 0.0
    if changes.tile_bias_ptrs is not None:
        tile_bias = load_tile_bias(
            changes.tile_bias_ptrs, changes.tile_numbers, batch, head, first_q, first_k, q, q_stop, BLOCK_Q, BLOCK_K,
            TILE_M, TILE_N, CUT, TRANSPOSED,
        )  # fmt: skip
    return bias, tile_bias


@triton.jit
def changed_scores(
    scores, biases, changes, scale, batch, head, first_q, first_k, q_len, k_len,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHANGES: tl.constexpr, OWN: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """`(changed scores, derivative of the cap, own)` of products; the derivative is 1.0 without a cap.

    own: of one's own function, its derivative and what else the gradients need; or 1.0 and nothing. biases: see
    `loaded_biases`. changes: the kernel's ChangeArguments. See loads.py for `first_q` and `first_k`.
    """
    q, k = token_numbers(first_q, TILE_M), token_numbers(first_k, TILE_N)
    scores = scores * scale
    factor = 1.0
    if CAPPED & CHANGES:
        ratio, factor = tanh_and_slope(scores * changes.inverse_cap, CHANGES)
        scores = ratio * changes.cap
    if changes.slopes_ptr is not None:
        slope = tl.load(changes.slopes_ptr + head).to(tl.float32)
        apart = distances(first_q, first_k, q_len, k_len, TILE_M, TILE_N, CHANGES, TRANSPOSED)
        # Fused by name. A compiler may fuse either of the two products with the subtraction, and the forward and the
        # backward would then round a steep decay differently: in fp32 weights of 1 were off by 2^-15.
        scores = tl.fma(-slope, apart, scores)
    if changes.values_ptr is not None:
        values_ptr = changes.values_ptr + tl.cast(head, tl.int64) * changes.values_stride
        if changes.until_ptr is not None:
            smallest, largest = codes_of_tile(first_q, first_k, q_len, k_len, TILE_M, TILE_N)
            code, is_shared = shared_bucket(changes, smallest, largest)
            if is_shared:
                scores = scores + tl.load(values_ptr + code).to(tl.float32)
            else:
                at = code_differences(changes, q, k, q_len, k_len, TRANSPOSED)
                scores = scores + entries_at(values_ptr, at, CHANGES).to(tl.float32)
        else:
            at = code_differences(changes, q, k, q_len, k_len, TRANSPOSED)
            scores = scores + entries_at(values_ptr, at, CHANGES).to(tl.float32)
    if changes.key_bias_ptr is not None:
        strides = changes.key_bias_strides
        start = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
        values = tl.load(changes.key_bias_ptr + start + k * strides[2], mask=k < k_len, other=0.0)
        scores = scores + along_keys(values.to(tl.float32), TRANSPOSED)
    if changes.bias_ptr is not None:
        scores = scores + biases[0].to(tl.float32)
    if changes.tile_bias_ptrs is not None:
        scores = scores + biases[1].to(tl.float32)
    own = 1.0, ()
    if OWN is not None:  # one's own function, which must see no places past the ends
        q, k = tl.minimum(q, q_len - 1), tl.minimum(k, k_len - 1)
        scores, slope, more = OWN(
            scores, batch, head, along_queries(q, TRANSPOSED), along_keys(k, TRANSPOSED), changes.own_ptrs,
            changes.own_numbers, CHANGES,
        )  # fmt: skip
        own = slope, more
    return scores, factor, own


@triton.jit
def distances(
    first_q, first_k, q_len, k_len,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHANGES: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """What slopes are multiplied by: the distance of query and key, aligned at the ends, or log(1 + distance).

    Positions are integers relative to a token of the tile before they are converted to fp32, because fp32 cannot
    represent all positions above 2^24. The fp32 subtraction, one operation per score, is then as exact as fp32
    represents the distance. The reference token is the first of the tile that a program holds, which is never gathered.
    """
    q, k = token_numbers(first_q, TILE_M) + (k_len - q_len), token_numbers(first_k, TILE_N)
    start = first_k if TRANSPOSED else first_q + (k_len - q_len)
    query, key = (q - start).to(tl.float32), (k - start).to(tl.float32)
    apart = tl.abs(along_queries(query, TRANSPOSED) - along_keys(key, TRANSPOSED))
    if LOGARITHMIC & CHANGES:
        return tl.log2(1.0 + apart) * LN2
    else:
        return apart


@triton.jit
def slope_gradients(ds, first_q, first_k, q_len, k_len, CHANGES: tl.constexpr):
    """The gradient of the slope by the scores of each query, [TILE_M]."""
    TILE_M: tl.constexpr = ds.shape[0]
    TILE_N: tl.constexpr = ds.shape[1]
    return -tl.sum(ds * distances(first_q, first_k, q_len, k_len, TILE_M, TILE_N, CHANGES, False), 1)


@triton.jit
def tanh(x, CHANGES: tl.constexpr):
    """See `tanh_and_slope`."""
    return tanh_and_slope(x, CHANGES)[0]


@triton.jit
def tanh_and_slope(x, CHANGES: tl.constexpr):
    """`(tanh(x), its derivative)` to within a few ulps each, or as the hardware does it.

    Near 1 the derivative 1 - tanh^2 would have lost most of its digits; it is made of what is missing to 1.
    """
    if HARDWARE_TANH & CHANGES:
        ratio = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
        return ratio, 1.0 - ratio * ratio
    else:
        missing = 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
        far = tl.where(x < 0.0, missing - 1.0, 1.0 - missing)
        square = x * x  # near 0 the difference would lose digits, and the Taylor series has few terms
        series = -1.4558343870513183e-03
        series = series * square + 3.5921280365724810e-03
        series = series * square - 8.8632355299021966e-03
        series = series * square + 2.1869488536155203e-02
        series = series * square - 5.3968253968253968e-02
        series = series * square + 1.3333333333333333e-01
        series = series * square - 3.3333333333333333e-01
        near = x + x * square * series
        is_near = square < 0.25
        return tl.where(is_near, near, far), tl.where(is_near, 1.0 - near * near, missing * (2.0 - missing))


@triton.jit
def with_sink(m_i, l_i, sink_ptr, head, qk_scale, KEEP: tl.constexpr):
    """`(new m_i, factor for the sums, new l_i)` when a key with the score of the sink has been added."""
    sink = tl.load(sink_ptr + head).to(tl.float32)
    if KEEP:
        m_new = finite_maximum(tl.maximum(m_i, sink))
        alpha = tl.exp2((m_i - m_new) * qk_scale)
        return m_new, alpha, l_i * alpha + tl.exp2((sink - m_new) * qk_scale)
    else:
        m_new = finite_maximum(tl.maximum(m_i, sink * LOG2E))
        alpha = tl.exp2(m_i - m_new)
        return m_new, alpha, l_i * alpha + tl.exp2(sink * LOG2E - m_new)
