"""The arithmetic of attention on one tile of scores: a step of the softmax, and a step of its gradient.

All loops of all kernels use these, in base 2 with fp32 accumulation. `live` marks the live scores; it is None, and
costs nothing, if all are.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3e38)


@triton.jit
def softmax_step(
    scores, live, m_i, l_i, qk_scale, KEEP: tl.constexpr, PRECISION: tl.constexpr, CHANGED: tl.constexpr
):  # fmt: skip
    """Adds a tile of keys, `scores [M, N]`: `(weights, factor for the earlier sums, new m_i, new l_i)`.

    m_i is the maximum of the raw scores if KEEP or CHANGED, otherwise of the scaled scores. The scale is not negative,
    so the maximum may be taken before scaling.

    A modified score may be -inf, even in a full tile, and then has no weight. It may also be as low as the lowest
    finite number, and must then have the weight that softmax gives it: the maximum is subtracted first, because
    multiplying by qk_scale could make it -inf.
    """
    if CHANGED:
        if live is not None:
            scores = tl.where(live, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        m_safe = finite_maximum(m_new)
        p = exponentials(scores, m_safe[:, None], qk_scale, True, PRECISION)
        alpha = tl.exp2((m_i - m_safe) * qk_scale)
    elif live is None:
        highest = tl.max(scores, 1)
        m_new = tl.maximum(m_i, highest if KEEP else highest * qk_scale)
        p = exponentials(scores, m_new[:, None], qk_scale, KEEP, PRECISION)
        alpha = decay(m_i, m_new, qk_scale, KEEP)
    else:
        if not KEEP:
            scores = scores * qk_scale
        scores = tl.where(live, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        m_safe = finite_maximum(m_new)
        if KEEP:
            scores = tl.where(live, scores, m_safe[:, None])  # -inf * 0 is NaN
            p = tl.where(live, exponentials(scores, m_safe[:, None], qk_scale, True, PRECISION), 0.0)
        else:
            p = tl.exp2(scores - m_safe[:, None])
        alpha = decay(m_i, m_safe, qk_scale, KEEP)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def scaled_maximum(m_i, qk_scale):
    """The maximum of the scaled scores, from the maximum of the raw scores.

    A finite maximum stays finite, even if a bias is the lowest finite number. For rows without a live key the result is
    -inf.
    """
    return tl.where(m_i == float("-inf"), m_i, tl.maximum(m_i * qk_scale, LOWEST))


@triton.jit
def finite_maximum(m_i):
    """Replaces a maximum of -inf (no live key so far) by 0: -inf - -inf would be NaN, but exp2(-inf - 0) = 0."""
    return tl.where(m_i == float("-inf"), 0.0, m_i)


@triton.jit
def recomputed_weights(
    scores, live, lse2, inverse, qk_scale, KEEP: tl.constexpr, PRECISION: tl.constexpr, CHANGED: tl.constexpr
):  # fmt: skip
    """The weights of a tile in the backward: `(exponentials, weights)`, which are equal unless KEEP.

    If KEEP, `lse2` is the maximum of the raw scores and `inverse` the inverse sum of exponentials; otherwise `lse2` is
    the lse in base 2.
    """
    if CHANGED and not KEEP:
        # Weights are at most 1, but the difference of two very low numbers has a large rounding error. lse2 is never
        # -inf.
        exponent = scores * qk_scale - lse2
        exps = tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
    else:
        exps = exponentials(scores, lse2, qk_scale, KEEP, PRECISION)
    if live is not None:
        exps = tl.where(live, exps, 0.0)
    p = exps
    if KEEP:
        p = tl.where(inverse > 0.0, p * inverse, 0.0)
    return exps, p


@triton.jit
def score_gradients(p, dp, delta, dlse):
    """The gradients of the scores of a tile, without the scale. `dlse`: the gradient of lse, unless delta
    includes it.
    """
    ds = dp - delta
    if dlse is not None:
        ds += dlse
    return p * ds


@triton.jit
def exponentials(scores, maximum, qk_scale, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """The exponentials of a tile: 2^((scores - maximum) * qk_scale) if PRECISE, otherwise 2^(scores * qk_scale -
    maximum), where the maximum is already scaled.

    The second form takes one fused multiply-add per score and rounds at the magnitude of the score, which does not
    matter in half precision. In fp32 the difference, which is smaller, is taken first.
    """
    if PRECISE:
        exponent = (scores - maximum) * qk_scale
        if PRECISION == "tf32":
            return tl.exp2(exponent)
        else:
            return exp2_rounded(exponent)
    else:
        return tl.exp2(scores * qk_scale - maximum)


@triton.jit
def exp2_rounded(x):
    """2^x to within one ulp. The hardware's exp2 has twice that error, and is exact only for whole numbers."""
    x = tl.maximum(x, -1024.0, propagate_nan=tl.PropagateNan.ALL)  # the fraction of -inf would be NaN
    whole = tl.floor(x + 0.5)
    fraction = x - whole  # in [-1/2, 1/2]: the Taylor series of degree 7 errs by 5e-9
    series = 1.5252733804e-05
    series = series * fraction + 1.5403530393e-04
    series = series * fraction + 1.3333558146e-03
    series = series * fraction + 9.6181291076e-03
    series = series * fraction + 5.5504108665e-02
    series = series * fraction + 2.4022650696e-01
    series = series * fraction + 6.9314718056e-01
    series = series * fraction + 1.0
    return series * tl.exp2(whole)


@triton.jit
def decay(old_maximum, new_maximum, qk_scale, PRECISE: tl.constexpr):
    """The factor that rescales sums from the old maximum to the new one; 0 if the old one is -inf."""
    if PRECISE:
        first = old_maximum == float("-inf")  # -inf * 0 would be NaN
        return tl.where(first, 0.0, tl.exp2(tl.where(first, 0.0, old_maximum - new_maximum) * qk_scale))
    else:
        return tl.exp2(old_maximum - new_maximum)


@triton.jit
def add_exactly(total, lost, number):
    """Kahan summation: `(total + number, its rounding error)`; the next call takes the error as `lost`."""
    number -= lost
    new_total = total + number
    return new_total, (new_total - total) - number
