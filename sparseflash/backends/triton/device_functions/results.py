"""Writes the complete results of a tile of queries."""

import triton
import triton.language as tl

from sparseflash.backends.triton.changes.sink import with_sink
from sparseflash.backends.triton.device_functions.loads import store_tokens
from sparseflash.backends.triton.device_functions.softmax import LN2


@triton.jit
def write_rows(
    acc, m_i, l_i, out_ptr, lse_ptr, maximum_ptr, inverse_ptr, batch_head, batch, head, first_q, q_len, q_length,
    amplification, scale, qk_scale, sink_ptr, out_strides,
    DV: tl.constexpr, PADDED_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Writes out and lse, and if KEEP the maximum and the inverse sum, after all keys have been added."""
    rows = first_q + tl.arange(0, BLOCK_M)
    empty = l_i == 0.0
    if HAS_LENGTHS:
        empty = empty | (rows >= q_length)
    if sink_ptr is not None:
        m_i, alpha, l_i = with_sink(m_i, l_i, sink_ptr, head, qk_scale, KEEP)
        acc = acc * alpha[:, None]
    total = tl.where(empty, 1.0, l_i)
    if DROPOUT:
        acc = acc * amplification
    maximum = tl.where(empty, 0.0, m_i)
    if KEEP:
        out = tl.where(empty[:, None], 0.0, tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape)))
        lse = maximum * scale + tl.log2(total) * LN2
    else:
        out = acc * tl.where(empty, 0.0, 1.0 / total)[:, None]
        lse = (maximum + tl.log2(total)) * LN2
    lse = tl.where(empty, float("-inf"), lse)
    store_tokens(
        out_ptr, out.to(out_ptr.dtype.element_ty), batch, head, first_q, q_len, out_strides, DV, PADDED_DV, BLOCK_M
    )
    at = tl.cast(batch_head, tl.int64) * q_len + rows
    tl.store(lse_ptr + at, lse, mask=rows < q_len)
    if KEEP:
        # lse is rounded, so probabilities recomputed from it would have larger errors than fp32 arithmetic makes.
        tl.store(maximum_ptr + at, maximum, mask=rows < q_len)
        tl.store(
            inverse_ptr + at,
            tl.where(empty, 0.0, tl.div_rn(tl.full([BLOCK_M], 1.0, tl.float32), total)),
            mask=rows < q_len,
        )
