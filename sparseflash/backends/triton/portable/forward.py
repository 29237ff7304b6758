"""The forward kernel, dense and sparse: one program per tile of queries walks the live tiles of its row.

Online softmax in base 2 with fp32 accumulation. Full tiles come first, without masking, then partial tiles, masked by
their bits.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.changes.kind import WHOLE_NUMBERS, At
from sparseflash.backends.triton.changes.steps import begun, changed_scores, loaded
from sparseflash.backends.triton.device_functions.fp32_split import accumulate, products
from sparseflash.backends.triton.device_functions.loads import live_in_row, load_tokens, part_pointers
from sparseflash.backends.triton.device_functions.results import write_rows
from sparseflash.backends.triton.device_functions.softmax import scaled_maximum, softmax_step
from sparseflash.backends.triton.portable.dropout import DropoutArguments, kept_weights
from sparseflash.backends.triton.portable.walk import listed_block, part_of, partial_tile, row_item, tokens_of_block
from sparseflash.backends.triton.schedule.work_item import ITEM


@triton.jit
def forward_step(
    acc, m_i, l_i, q_tile, k, v, words_ptr, tile, place, first_k, q_len, k_len, k_length, scale, qk_scale, k_strides,
    v_strides, dropout, changes, live_queries,
    SHAPE: tl.constexpr, CHANGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to the running sums: `(acc, m_i, l_i)`."""
    PRECISION: tl.constexpr = SHAPE.PRECISION
    k_tile = load_tokens(
        k, place.batch, place.kv_head, first_k, k_len, k_strides, SHAPE.D, SHAPE.PADDED_D, SHAPE.BLOCK_N, not MASKED,
        SHAPE.TMA, PRECISION,
    )  # fmt: skip
    if CHANGES is not None:
        at = At(place.batch, place.head, place.batch_head, place.first_q, first_k, q_len, k_len, live_queries)
        read = loaded(CHANGES, changes, at, SHAPE.BLOCK_Q, SHAPE.BLOCK_K, SHAPE.BLOCK_M, SHAPE.BLOCK_N, MASKED, False)
    scores = products(q_tile, k_tile, PRECISION)
    if CHANGES is not None:
        scores, _ = changed_scores(CHANGES, changes, read, scores, scale, at, SHAPE.BLOCK_M, SHAPE.BLOCK_N, False)
    live = None
    if MASKED:
        live = live_in_row(
            words_ptr, tile, place.first_q, first_k, k_length, SHAPE.BLOCK_Q, SHAPE.BLOCK_K, SHAPE.BLOCK_M,
            SHAPE.BLOCK_N, SHAPE.GATHERED,
            SHAPE.HAS_LENGTHS,
        )  # fmt: skip
    p, alpha, m_i, l_i = softmax_step(scores, live, m_i, l_i, qk_scale, SHAPE.KEEP, PRECISION, CHANGES is not None)
    if SHAPE.DROPOUT:
        keep = kept_weights(
            dropout, place.batch_head, place.first_q, first_k, q_len, k_len, SHAPE.BLOCK_M, SHAPE.BLOCK_N, False
        )
        p = tl.where(keep, p, 0.0)
    acc = acc * alpha[:, None]
    v_tile = load_tokens(
        v, place.batch, place.kv_head, first_k, k_len, v_strides, SHAPE.DV, SHAPE.PADDED_DV, SHAPE.BLOCK_N,
        not MASKED, SHAPE.TMA, PRECISION,
    )  # fmt: skip
    return accumulate(p, v_tile, acc, PRECISION), m_i, l_i


# Sizes are not specialised, so another length or number of heads does not recompile.
@triton.jit(
    do_not_specialize=[
        "lengths_stride", "dropped", "one", "heads", "group", "q_len", "k_len",
        "row_tiles",
        *WHOLE_NUMBERS,
    ],
    # Few numbers are loaded from these at a time, so their alignment does not matter.
    do_not_specialize_on_alignment=["lengths_ptr", "seed_ptr", "rows_ptr", "queries_ptr", "groups_ptr"],
)  # fmt: skip
def forward_kernel(
    q, k, v,  # [B, Hq, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, DV]: pointers, or descriptors if TMA
    out_ptr, lse_ptr,  # [B, Hq, Nq, DV], [B, Hq, Nq] contiguous
    maximum_ptr, inverse_ptr,  # [B, Hq, Nq] contiguous, if KEEP: the maximum raw score, and the inverse sum
    work_ptr,  # [W, ITEM]: see schedule/work_item.py
    parts_ptr,  # fp32 [parts, BLOCK_M * (PADDED_DV + 2)], written: acc, m_i, l_i; None if no item is a chunk
    index_ptr, tile_ptr, words_ptr,  # the tile lists, with one extra entry for prefetching; the bits
    lengths_ptr, lengths_stride,  # int32 [2, B] if HAS_LENGTHS: live queries, live keys
    seed_ptr, rows_ptr, queries_ptr, groups_ptr,  # if DROPOUT: see dropout.py; int32 [B, Hq], [Nq], [groups], or None
    dropped,  # if DROPOUT
    scales,  # scale, not negative; scale / ln 2; if DROPOUT, the amplification of what is kept
    one,  # 1.0, unknown to the compiler
    heads, group, q_len, k_len, row_tiles,
    strides,  # of batch, head and token, of q, k, v and out
    changes, change_numbers,  # tensors and numbers of each score modification, see changes/kind.py; or None
    n0, n1, n2, n3, n4, n5, n6, n7,  # WHOLE_NUMBERS: `Kind.whole` of all score modifications, concatenated
    sink_ptr,  # [Hq], or None
    SHAPE: tl.constexpr, CHANGES: tl.constexpr,  # see launches.py and changes/kind.py
):  # fmt: skip
    """Computes out and lse of one tile of queries."""
    PRECISION: tl.constexpr = SHAPE.PRECISION
    q_strides, k_strides, v_strides, out_strides = strides
    scale, qk_scale, amplification = scales
    SPLIT: tl.constexpr = SHAPE.BLOCK_K // SHAPE.BLOCK_N
    tl.static_assert(SHAPE.GATHERED == 0 or SPLIT == 1, "a gathered tile is taken whole")
    item_ptr = work_ptr + tl.cast(tl.program_id(0), tl.int64) * ITEM
    place, lists, firsts, live_tokens = row_item(
        item_ptr, index_ptr, lengths_ptr, lengths_stride, heads, group, row_tiles, q_len, k_len,
        SHAPE.BLOCK_K, SHAPE.BLOCK_M, SHAPE.BLOCK_N, SHAPE.GATHERED, SHAPE.HAS_LENGTHS,
    )  # fmt: skip
    batch_head, batch, head, _, first_q = place
    start, full, at_end, partial, first_partial = lists
    next_block, partial_block, partial_number = firsts
    q_length, k_length = live_tokens
    changes = begun(CHANGES, changes, change_numbers, (n0, n1, n2, n3, n4, n5, n6, n7), None)
    live_queries = q_length if SHAPE.HAS_LENGTHS else None
    dropout = DropoutArguments(seed_ptr, rows_ptr, queries_ptr, groups_ptr, dropped, amplification)
    softmax_scale = scale
    if CHANGES is not None:
        softmax_scale = 1.0

    q_tile = load_tokens(
        q, batch, head, first_q, q_len, q_strides, SHAPE.D, SHAPE.PADDED_D, SHAPE.BLOCK_M, False, SHAPE.TMA, PRECISION
    )
    if SHAPE.Q_IN_REGISTERS:
        # The compiler keeps loaded operands in shared memory and computed operands in registers. This product makes q
        # a computed operand.
        q_tile = q_tile * tl.cast(one, q_tile.dtype)
    m_i = tl.full([SHAPE.BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.full([SHAPE.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([SHAPE.BLOCK_M, SHAPE.PADDED_DV], 0.0, tl.float32)

    # The block number is loaded one iteration ahead. If the address of the keys came from a load in the same iteration,
    # the compiler would not prefetch the keys.
    for i in range(0, full * SPLIT):
        first_k = tokens_of_block(next_block, i, SHAPE.BLOCK_K, SHAPE.BLOCK_N, SHAPE.GATHERED)
        next_block = listed_block(index_ptr, start, (i + 1) // SPLIT, SHAPE.BLOCK_N, SHAPE.GATHERED)
        acc, m_i, l_i = forward_step(
            acc, m_i, l_i, q_tile, k, v, words_ptr, 0, place, first_k, q_len, k_len, k_length, scale, qk_scale,
            k_strides, v_strides, dropout, changes, live_queries, SHAPE, CHANGES, False,
        )  # fmt: skip

    if at_end + partial > 0:  # even a loop without iterations would wait for the first loads of its pipeline
        next_block, next_tile = partial_block, partial_number
        if SHAPE.HAS_LENGTHS:
            if at_end > 0:
                next_block, next_tile = partial_tile(
                    index_ptr, tile_ptr, start + full, at_end, first_partial, 0, SHAPE.BLOCK_N, SHAPE.GATHERED, True
                )
        for i in range(0, (at_end + partial) * SPLIT):
            first_k = tokens_of_block(next_block, i, SHAPE.BLOCK_K, SHAPE.BLOCK_N, SHAPE.GATHERED)
            tile = next_tile
            next_block, next_tile = partial_tile(
                index_ptr, tile_ptr, start + full, at_end, first_partial, (i + 1) // SPLIT, SHAPE.BLOCK_N,
                SHAPE.GATHERED, SHAPE.HAS_LENGTHS,
            )  # fmt: skip
            acc, m_i, l_i = forward_step(
                acc, m_i, l_i, q_tile, k, v, words_ptr, tile, place, first_k, q_len, k_len, k_length, scale, qk_scale,
                k_strides, v_strides, dropout, changes, live_queries, SHAPE, CHANGES, True,
            )  # fmt: skip

    if CHANGES is not None:
        if not SHAPE.KEEP:
            m_i = scaled_maximum(m_i, qk_scale)
    part = part_of(item_ptr, parts_ptr)
    if parts_ptr is not None and part > 0:
        SUMS: tl.constexpr = SHAPE.BLOCK_M * SHAPE.PADDED_DV
        SIZE: tl.constexpr = SUMS + 2 * SHAPE.BLOCK_M
        tl.store(part_pointers(parts_ptr, part - 1, SIZE, 0, SHAPE.BLOCK_M, SHAPE.PADDED_DV), acc)
        tl.store(part_pointers(parts_ptr, part - 1, SIZE, SUMS, SHAPE.BLOCK_M, 1), m_i[:, None])
        tl.store(part_pointers(parts_ptr, part - 1, SIZE, SUMS + SHAPE.BLOCK_M, SHAPE.BLOCK_M, 1), l_i[:, None])
    else:
        write_rows(
            acc, m_i, l_i, out_ptr, lse_ptr, maximum_ptr, inverse_ptr, batch_head, batch, head, first_q, q_len,
            q_length, amplification, softmax_scale, qk_scale, sink_ptr, out_strides, SHAPE.DV, SHAPE.PADDED_DV,
            SHAPE.BLOCK_M,
            SHAPE.HAS_LENGTHS, SHAPE.DROPOUT, SHAPE.KEEP,
        )  # fmt: skip
