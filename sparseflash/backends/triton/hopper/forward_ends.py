"""The end of an item in the Hopper forward: writes out and lse, or the sums of a chunk."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from sparseflash.backends.triton.changes.hopper_steps import finished_rows
from sparseflash.backends.triton.device_functions.softmax import LN2, LOWEST
from sparseflash.backends.triton.hopper.forward_softmax import by_own_scale
from sparseflash.backends.triton.hopper.gluon_api import async_store
from sparseflash.backends.triton.hopper.record import BATCH, BATCH_HEAD, FIRST_Q, HEAD, PART, Q_LIMIT, field
from sparseflash.backends.triton.hopper.tiles import ROWS, opaque

NO_SCALE = gl.constexpr(2e-30)  # in units of log2(e); a scale of 0 arrives as less, see `configs.SMALLEST_SCALE`


@gluon.jit
def finished(acc, factors, IS_NAN: gl.constexpr):
    """acc times one factor a row, [ROWS, 1]. IS_NAN: accumulators may be NaN where the factor is 0, and give 0."""
    out = acc * factors
    if IS_NAN:
        out = gl.where(factors == 0.0, 0.0, out)
    return out


@gluon.jit
def store_part(part_ptr, out, first_row, FIRST: gl.constexpr, PADDED_DV: gl.constexpr):
    """Writes channels from FIRST on to a chunk [., PADDED_DV].

    `opaque` keeps the compiler from computing the addresses before the loop, which has no registers for them.
    """
    row = opaque(first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, out.type.layout)))
    column = gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout))
    if FIRST > 0:
        column += FIRST
    gl.store(part_ptr + (row[:, None] * PADDED_DV + column[None, :]), out)


@gluon.jit
def send(
    out, rest, out_descs, out_s, C: gl.constexpr, batch, head, first_q, FIRST: gl.constexpr, DV: gl.constexpr,
    DV_REST: gl.constexpr,
):  # fmt: skip
    """Writes channels from FIRST on, and the rest from DV on if DV_REST is not 0, through this warpgroup's buffers."""
    o_desc, o_rest_desc = out_descs
    o_s, o_rest_s = out_s
    tma.store_wait(0)  # until the last tile has been read
    o_s.index(C).store(out.to(o_s.dtype))
    if DV_REST > 0:
        o_rest_s.index(C).store(rest.to(o_s.dtype))
    fence_async_shared()
    async_store(o_desc, [batch, head, first_q, FIRST], o_s.index(C))
    if DV_REST > 0:
        async_store(o_rest_desc, [batch, head, first_q, DV], o_rest_s.index(C))


@gluon.jit
def finish_rows(
    CHANGES: gl.constexpr, changes, m_i, l_i, record_s, ended, outputs, C: gl.constexpr, SHAPE: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """Writes the lse of an item's rows, or the maxima and sums of a chunk's. Returns the factors of the accumulator."""
    PADDED_DV: gl.constexpr = SHAPE.PADDED_DV
    BLOCK_M: gl.constexpr = SHAPE.GROUPS * ROWS
    S_ROWS: gl.constexpr = m_i.type.layout
    lse_ptr, parts_ptr, qk_scale, q_len = outputs
    total = gl.convert_layout(gl.sum(l_i, 1), S_ROWS, assert_trivial=True)
    row = C * ROWS + gl.arange(0, ROWS, layout=S_ROWS)
    part = field(record_s, ended, PART)
    maximum = m_i
    if CHANGES.KEEPS_UNITS:  # a bias may be the lowest number of fp32
        maximum = gl.where(m_i == float("-inf"), float("-inf"), gl.maximum(m_i * qk_scale, LOWEST))
    elif CHANGES.MAY_BE_COARSE:
        maximum = by_own_scale(m_i, qk_scale)
    if HAS_PARTS and part > 0:
        inverse = gl.full([ROWS], 1.0, gl.float32, layout=S_ROWS)
        if HAS_LENGTHS and CHANGES.MAY_BE_NAN:  # past the lengths a bias may be NaN
            is_past = field(record_s, ended, FIRST_Q) + row >= field(record_s, ended, Q_LIMIT)
            maximum = gl.where(is_past, float("-inf"), maximum)
            total = gl.where(is_past, 0.0, total)
            inverse = gl.where(is_past, 0.0, 1.0)
        part_ptr = parts_ptr + gl.cast(part - 1, gl.int64) * (BLOCK_M * (PADDED_DV + 2))
        gl.store(part_ptr + BLOCK_M * PADDED_DV + row, maximum)
        gl.store(part_ptr + BLOCK_M * (PADDED_DV + 1) + row, total)
    else:
        q_row = field(record_s, ended, FIRST_Q) + row
        is_empty = total == 0.0
        if HAS_LENGTHS:
            is_empty = is_empty | (q_row >= field(record_s, ended, Q_LIMIT))
        maximum = gl.where(qk_scale < NO_SCALE, 0.0, maximum)
        maximum, total, shrinks = finished_rows(CHANGES, changes, maximum, total, field(record_s, ended, HEAD))
        lse = gl.where(is_empty, float("-inf"), (maximum + gl.log2(total)) * LN2)
        at = gl.cast(field(record_s, ended, BATCH_HEAD), gl.int64) * q_len + q_row
        gl.store(lse_ptr + at, lse, mask=q_row < q_len)
        inverse = gl.where(is_empty, 0.0, shrinks / total)
    return inverse


@gluon.jit
def finish_out(
    acc, acc_rest, alpha, outputs, record_s, ended, C: gl.constexpr, SHAPE: gl.constexpr, IS_NAN: gl.constexpr,
    HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """Writes an item's rows of out, or a chunk's accumulator. Returns the new accumulator.

    acc_rest: the accumulator of the channels from DV on if DV_REST is not 0. IS_NAN: accumulators past the lengths may
    be NaN.
    """
    DV: gl.constexpr = SHAPE.DV
    DV_REST: gl.constexpr = SHAPE.DV_REST
    OUT: gl.constexpr = SHAPE.OUT
    PADDED_DV: gl.constexpr = SHAPE.PADDED_DV
    out_descs, out_s, parts_ptr = outputs
    out = finished(acc, gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None], IS_NAN)
    rest = out
    if DV_REST > 0:
        rest = finished(acc_rest, gl.convert_layout(alpha, gl.SliceLayout(1, acc_rest.type.layout))[:, None], IS_NAN)
    # Without this ptxas keeps out in other registers than acc, and spills at D = 128. Kernels that did not spill keep
    # the code that was measured.
    if SHAPE.D != DV or SHAPE.D_REST > 0 or DV > 128 or HAS_PARTS:
        acc = out  # in the same registers: the next product does not accumulate onto it
    part = field(record_s, ended, PART)
    if HAS_PARTS and part > 0:
        part_ptr = parts_ptr + gl.cast(part - 1, gl.int64) * (SHAPE.GROUPS * ROWS * (PADDED_DV + 2))
        store_part(part_ptr, out, C * ROWS, 0, PADDED_DV)
        if DV_REST > 0:
            store_part(part_ptr, rest, C * ROWS, DV, PADDED_DV)
    else:
        batch, head = field(record_s, ended, BATCH), field(record_s, ended, HEAD)
        first_q = field(record_s, ended, FIRST_Q) + C * ROWS
        if OUT == DV:
            send(out, rest, out_descs, out_s, C, batch, head, first_q, 0, DV, DV_REST)
        else:
            halves = gl.split(out.reshape([ROWS, 2, OUT]).permute((0, 2, 1)))
            send(halves[0], rest, out_descs, out_s, C, batch, head, first_q, 0, DV, DV_REST)
            send(halves[1], rest, out_descs, out_s, C, batch, head, first_q, OUT, DV, 0)
    return acc
