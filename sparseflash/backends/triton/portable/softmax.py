"""The arithmetic of attention on one tile of scores: a step of the softmax, and a step of its gradient.

Each is written once and used by every loop of every kernel, so a change of scores is a change here. All are in base 2
with fp32 accumulation. `live` says which scores exist; it is None where all of a tile do, and costs nothing then.
"""

import triton
import triton.language as tl


@triton.jit
def softmax_step(scores, live, m_i, l_i, qk_scale, KEEP: tl.constexpr, PRECISION: tl.constexpr):
    """One more tile of keys, `scores [M, N]`: `(weights, factor of what was summed before, new m_i, new l_i)`.

    m_i is the maximum of the raw scores if KEEP, else of the scaled ones. The scale is not negative, so the maximum of
    scores that are all live may be taken before it.
    """
    if live is None:
        highest = tl.max(scores, 1)
        m_new = tl.maximum(m_i, highest if KEEP else highest * qk_scale)
        p = exponentials(scores, m_new[:, None], qk_scale, KEEP, PRECISION)
        alpha = decay(m_i, m_new, qk_scale, KEEP)
    else:
        if not KEEP:
            scores = scores * qk_scale
        scores = tl.where(live, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        # A query that has met no live key yet has maximum -inf, and -inf - -inf is NaN; 0 gives exp2(-inf) = 0.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        if KEEP:
            scores = tl.where(live, scores, m_safe[:, None])  # -inf * 0 is NaN
            p = tl.where(live, exponentials(scores, m_safe[:, None], qk_scale, True, PRECISION), 0.0)
        else:
            p = tl.exp2(scores - m_safe[:, None])
        alpha = decay(m_i, m_safe, qk_scale, KEEP)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def recomputed_weights(scores, live, lse2, inverse, qk_scale, KEEP: tl.constexpr, PRECISION: tl.constexpr):
    """The weights of a tile in the backward: `(exponentials, weights)`, the same unless KEEP.

    If KEEP, `lse2` is the maximum of the raw scores and `inverse` one over the sum of exponentials, else `lse2` is the
    lse in base 2; each has one number for a query and broadcasts with `scores`.
    """
    exps = exponentials(scores, lse2, qk_scale, KEEP, PRECISION)
    if live is not None:
        exps = tl.where(live, exps, 0.0)
    p = exps
    if KEEP:
        p = tl.where(inverse > 0.0, p * inverse, 0.0)
    return exps, p


@triton.jit
def score_gradients(p, dp, delta, dlse):
    """The gradients of the scores of a tile, without the scale. `dlse`: what comes through lse, unless delta has it."""
    ds = dp - delta
    if dlse is not None:
        ds += dlse
    return p * ds


@triton.jit
def exponentials(scores, maximum, qk_scale, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """2^(scores * qk_scale - maximum), with the maximum in units of raw scores if PRECISE, else already scaled.

    Scaling first is one fused multiply-add a score. It rounds numbers the size of the score, which half precision does
    not notice; in fp32 the difference is taken first, and what is rounded is small.
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
    """2^x to within an ulp: the hardware's is twice as far off, and exact for whole numbers only."""
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
    """The factor by which sums taken relative to the old maximum count relative to the new one; 0 if there was none."""
    if PRECISE:
        first = old_maximum == float("-inf")  # and -inf * 0 would be NaN
        return tl.where(first, 0.0, tl.exp2(tl.where(first, 0.0, old_maximum - new_maximum) * qk_scale))
    else:
        return tl.exp2(old_maximum - new_maximum)


@triton.jit
def add_exactly(total, lost, number):
    """total + number, and by how much rounding made it too large, which the next call takes off (Kahan's sum)."""
    number -= lost
    new_total = total + number
    return new_total, (new_total - total) - number
