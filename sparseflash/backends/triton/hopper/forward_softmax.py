"""The softmax of the Hopper forward, a step at a time.

IN_TURNS: at D = 64 the exponentials take as long as the products. Left alone, both warpgroups compute exponentials at
the same time, and then both multiply. So they start their softmaxes by turns, which keeps them apart. If each also
waits for the end of the other's exponentials, the forward takes longer (experiments/results/tried/kernels.csv).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.hopper import configs
from sparseflash.backends.triton.hopper.scores import as_float, by_thread, plus_of_threads, sums_of_threads
from sparseflash.backends.triton.hopper.tiles import exchanged_with_nobody

# How far, in powers of 2, the running maximum may lag behind the true one. Weights then stay below 256, which half
# precision and fp32 sums hold as exactly as weights below 1.
SLACK = gl.constexpr(8.0)
COARSE = gl.constexpr(configs.COARSE)


@gluon.jit
def row_maximum(s, added):
    """The maximum of each row of s, [ROWS]. added: what is added to the scores of each thread, [ROWS, 4], or of the
    tile, a number; or None.
    """
    mine = gl.max(gl.max(gl.max(by_thread(s), 4), 2), 1)
    if added is not None:
        mine += added
    return gl.convert_layout(gl.max(mine, 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def scale_of_rows(maximum, qk_scale):
    """The factor of scores with biases, [ROWS]. maximum: of each row, already times qk_scale.

    The factor is qk_scale, unless the maximum is so large that its rounding could make weights infinite, or all of them
    0. Then it is the next power of 2 above qk_scale: products are exact, the largest score has weight 1, and smaller
    scores keep their order, but their weights are next to arbitrary.
    """
    power_above = as_float((gl.cast(qk_scale, gl.int32, bitcast=True) & 0x7F800000) + 0x00800000)
    return gl.where(gl.abs(maximum) < COARSE, qk_scale, power_above)


@gluon.jit
def by_own_scale(maximum, qk_scale):
    """A maximum in the scale of `scale_of_rows`, converted to qk_scale without a division, which would round."""
    of_power_above = as_float((gl.cast(qk_scale, gl.int32, bitcast=True) & 0x007FFFFF) + 0x3F000000)  # 1/2 to 1
    return maximum * gl.where(gl.abs(maximum) < COARSE, 1.0, of_power_above)


@gluon.constexpr_function
def rescaling(numbers):
    """The PTX of `rescaled` for this many numbers a thread, and its operands: results, numbers, factors. A thread holds
    numbers of two rows, in pairs: two of the first row, two of the second, and so on.
    """
    differ = f"setp.neu.f32 p, ${2 * numbers}, 0f3F800000; setp.neu.or.f32 p, ${2 * numbers + 2}, 0f3F800000, p;"
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * numbers + i};" for i in range(numbers))
    code = f".reg .pred p; {differ} vote.sync.any.pred p, p, -1; @!p bra same; {products} same:"
    operands = [*["=f"] * numbers, *map(str, range(numbers)), *["f"] * numbers]
    return "{ " + code + " }", ",".join(operands)


@gluon.jit
def rescaled(acc, factors):
    """acc times one factor a row, [ROWS, 1]. A warp whose factors are all 1 skips the multiplications."""
    NUMBERS: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    CODE: gl.constexpr = rescaling(NUMBERS)
    factors = factors.broadcast_to(acc.shape[0], acc.shape[1])
    return gl.inline_asm_elementwise(
        CODE[0], CODE[1], [acc, factors], dtype=gl.float32, is_pure=False, pack=NUMBERS
    )  # fmt: skip


@gluon.jit
def at_turn_of(C: gl.constexpr, OPERATION: gl.constexpr):
    """Waits at ("sync") or arrives at ("arrive") the named barrier of warpgroup C, which opens when the other arrives.

    A program has 16 named barriers; Triton itself uses the first few.
    """
    token = gl.zeros([128], gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    CODE: gl.constexpr = "bar." + OPERATION + (" 8" if C == 0 else " 9") + ", 256; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(CODE, "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def softmax(CHANGES: gl.constexpr, s, added, m_i, l_i, qk_scale, IN_TURNS: gl.constexpr):
    """`(weights, new maxima, new sums, factors of what is summed so far)`. added: from `left_to_rows`."""
    OF_THREADS: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    highest = row_maximum(s, added) if CHANGES.LEAVES_TO_ROWS else row_maximum(s, None)
    if CHANGES.KEEPS_UNITS:
        m_new = gl.maximum(m_i, highest)
        grows = (m_new - m_i) * qk_scale > SLACK
    else:
        scale = scale_of_rows(highest * qk_scale, qk_scale) if CHANGES.MAY_BE_COARSE else qk_scale
        m_new = gl.maximum(m_i, highest * scale)
        grows = m_new - m_i > SLACK
    if not IN_TURNS:
        m_new = gl.where(grows, m_new, m_i)
    # A query that has met no live key yet has maximum -inf, and -inf - -inf is NaN; 0 gives exp2(-inf) = 0.
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    if not CHANGES.LEAVES_TO_ROWS:
        if CHANGES.KEEPS_UNITS:
            p = gl.exp2((s - m_safe[:, None]) * qk_scale)
        else:
            scale = scale_of_rows(m_new, qk_scale)[:, None] if CHANGES.MAY_BE_COARSE else qk_scale
            p = gl.exp2(s * scale - m_safe[:, None])
    elif not CHANGES.BY_THREAD:  # one number for the tile
        p = gl.exp2(s * qk_scale - (m_safe - added * qk_scale)[:, None])
    else:
        less = gl.convert_layout(m_safe, OF_THREADS, assert_trivial=True)[:, None]
        if CHANGES.KEEPS_UNITS:
            exponents = plus_of_threads(s, added - less) * qk_scale
            # The decay may be lost to rounding; no weight may become infinite then.
            p = gl.exp2(gl.where(exponents > SLACK, SLACK, exponents))
        else:
            p = gl.exp2(plus_of_threads(s * qk_scale, added * qk_scale - less))
    decay = gl.exp2((m_i - m_safe) * qk_scale if CHANGES.KEEPS_UNITS else m_i - m_safe)
    l_i = l_i * gl.convert_layout(decay, OF_THREADS, assert_trivial=True)[:, None] + sums_of_threads(p)
    return p, m_new, exchanged_with_nobody(l_i), decay
