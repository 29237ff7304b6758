"""The kernel for dq of wide heads and of blocks of 64 on Hopper (sm_90): an item is a tile of queries, whose keys
stream past.

Above 128 channels, dq is larger than the tiles of keys that contribute to it, and its additions to global memory would
bound the one-pass backward; so they would in tiles of 64 keys. So S and dP are computed a second time, and dq stays in
registers.

One warp loads. Each of GROUPS warpgroups holds ROWS queries, and computes for KEYS keys a step

    S = Q K^T - lse,  P = exp(S),  dP = dO V^T - delta,  dS = P * dP,  dQ += dS K

dS goes from registers to the product with K. The products of one warpgroup run under the exponentials of the other. No
program waits for another, and additions have the list's order. A tile of the lists has GROUPS * ROWS queries
and as many keys; GROUPS is 1 for a mask in blocks of 64 x 64, as in `wide_dkdv.py`.

Head dims that are not a power of 2 have two pieces, as in `forward.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseflash.backends.triton.hopper.configs import WIDE_KEYS
from sparseflash.backends.triton.hopper.gluon_api import local_mma_wait
from sparseflash.backends.triton.hopper.record import barriers
from sparseflash.backends.triton.hopper.tiles import (
    ROWS,
    block_at,
    bytes_of,
    layout_of_bits,
    live_words,
    load_tile,
    masked,
    opaque,
    tiles_of,
)
from sparseflash.backends.triton.hopper.wide_steps import (
    OF_GROUP,
    plus_weighted,
    product,
    store_rows,
    unknown,
    zeros_of,
)
from sparseflash.backends.triton.persistent.plan import ITEM, ITEM_COUNT, ITEM_FULL, ITEM_NUMBER, ITEM_START, ITEM_TILE

KEYS = gl.constexpr(WIDE_KEYS)  # of a step; the ROWS of a warpgroup, so that a tile has GROUPS steps


@gluon.jit
def item_of(work_ptr, GROUPS: gl.constexpr):
    """Number of batch element, head and tile; place of the first step; full steps; steps, at least one."""
    item_ptr = work_ptr + gl.program_id(0) * ITEM
    count, tile = gl.load(item_ptr + ITEM_COUNT), gl.load(item_ptr + ITEM_TILE)
    steps = gl.maximum(gl.where(tile < 0, 1, count * GROUPS), 1)  # without a live tile one dead step
    full = gl.load(item_ptr + ITEM_FULL) * GROUPS
    return gl.load(item_ptr + ITEM_NUMBER), gl.load(item_ptr + ITEM_START) * GROUPS, full, steps


@gluon.jit
def loader(loads, GROUPS: gl.constexpr):
    """Loads queries and dout once, then keys and values of every step."""
    descriptors, tiles_s, rests_s, bars, work_ptr, index_ptr, sizes = loads
    q_desc, k_desc, v_desc, dout_desc, q_rest_desc, k_rest_desc, v_rest_desc, dout_rest_desc = descriptors
    q_s, k_s, v_s, dout_s = tiles_s
    q_rest_s, k_rest_s, v_rest_s, dout_rest_s = rests_s
    rows_full, k_full, k_empty, v_full, v_empty = bars
    heads, group, row_tiles = sizes
    STAGES: gl.constexpr = k_s.shape[0]
    V_STAGES: gl.constexpr = v_s.shape[0]
    number, start, _full, steps = item_of(work_ptr, GROUPS)
    batch, head = number // row_tiles // heads, number // row_tiles % heads
    kv_head = head // group
    first_q = number % row_tiles * GROUPS * ROWS
    mbarrier.expect(rows_full.index(0), GROUPS * bytes_of(q_desc, q_rest_desc))
    for c in gl.static_range(GROUPS):
        load_tile(q_desc, q_rest_desc, q_s, q_rest_s, c, rows_full.index(0), batch, head, first_q + c * ROWS)
    for i in range(steps):
        first_k = block_at(index_ptr, start + i, GROUPS) * KEYS
        stage = i % STAGES
        mbarrier.wait(k_empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(k_full.index(stage), bytes_of(k_desc, k_rest_desc))
        load_tile(k_desc, k_rest_desc, k_s, k_rest_s, stage, k_full.index(stage), batch, kv_head, first_k)
        if i == 0:
            bar = rows_full.index(1)
            mbarrier.expect(bar, GROUPS * bytes_of(dout_desc, dout_rest_desc))
            for c in gl.static_range(GROUPS):
                load_tile(dout_desc, dout_rest_desc, dout_s, dout_rest_s, c, bar, batch, head, first_q + c * ROWS)
        stage = i % V_STAGES
        mbarrier.wait(v_empty.index(stage), ((i // V_STAGES) & 1) ^ 1)
        mbarrier.expect(v_full.index(stage), bytes_of(v_desc, v_rest_desc))
        load_tile(v_desc, v_rest_desc, v_s, v_rest_s, stage, v_full.index(stage), batch, kv_head, first_k)


@gluon.jit
def consumer(
    reads, C: gl.constexpr, GROUPS: gl.constexpr, DIM: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """dq of ROWS queries."""
    tiles_s, rests_s, bars, lists, words_ptr, lengths, rows_ptr, dq_ptr, dq_strides, sizes = reads
    work_ptr, index_ptr, tile_ptr = lists
    q_s, k_s, v_s, dout_s = tiles_s
    q_rest_s, k_rest_s, v_rest_s, dout_rest_s = rests_s
    rows_full, k_full, k_empty, v_full, v_empty = bars
    qk_scale, scale, heads, q_len, k_len, row_tiles = sizes
    dtype: gl.constexpr = q_s.dtype
    STAGES: gl.constexpr = k_s.shape[0]
    V_STAGES: gl.constexpr = v_s.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    BITS: gl.constexpr = layout_of_bits(KEYS)
    number, start, full, steps = item_of(work_ptr, GROUPS)
    batch, head = number // row_tiles // heads, number // row_tiles % heads
    k_limit = k_len
    if HAS_LENGTHS:
        lengths_ptr, lengths_stride = lengths
        k_limit = gl.minimum(gl.load(lengths_ptr + (lengths_stride + batch)), k_len)
    place_ptr = rows_ptr + (gl.cast(number, gl.int64) * GROUPS + C) * (2 * ROWS)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    # The accumulators do not begin with these: ptxas would wait for the product of dq before it sets them (C7515).
    less, less_dp = gl.load(place_ptr + row) * qk_scale, gl.load(place_ptr + ROWS + row)
    dq = zeros_of(k_s)
    dq_rest = None if k_rest_s is None else zeros_of(k_rest_s)
    mbarrier.wait(rows_full.index(0), 0)
    mbarrier.wait(rows_full.index(1), 0)
    for i in range(steps):
        place = start + i
        stage, v_stage = i % STAGES, i % V_STAGES
        is_partial = i >= full
        k_left = KEYS
        if HAS_LENGTHS:
            k_left = k_limit - block_at(index_ptr, place, GROUPS) * KEYS
            is_partial = is_partial | (k_left < KEYS)
        own = unknown(C)
        mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
        s = product(q_s, q_rest_s, own, k_s, k_rest_s, stage, S)
        mbarrier.wait(v_full.index(v_stage), (i // V_STAGES) & 1)
        dp = product(dout_s, dout_rest_s, own, v_s, v_rest_s, v_stage, S)
        s = local_mma_wait(s, 1 if v_rest_s is None else 2)
        if is_partial:
            words = live_words(
                words_ptr, gl.load(tile_ptr + place // GROUPS), C * ROWS, place, k_left, GROUPS * ROWS, KEYS, GROUPS,
                HAS_LENGTHS, False, gl.SliceLayout(2, BITS),
            )  # fmt: skip
            s = masked(s, opaque(words), KEYS, BITS)
        p = gl.exp2(s * qk_scale + less[:, None])
        dp = local_mma_wait(dp, 0)
        async_copy.mbarrier_arrive(v_empty.index(v_stage), increment_count=False)
        ds = (p * (dp + less_dp[:, None])).to(dtype)
        dq = plus_weighted(dq, ds, k_s.index(stage))
        if k_rest_s is not None:
            dq_rest = local_mma_wait(plus_weighted(dq_rest, ds, k_rest_s.index(stage)), 0)
        # ptxas accepts no product in flight from one step to the next. The other warpgroup multiplies meanwhile.
        dq = local_mma_wait(dq, 0)
        async_copy.mbarrier_arrive(k_empty.index(stage), increment_count=False)
    dq_ptr += gl.cast(batch, gl.int64) * dq_strides[0] + gl.cast(head, gl.int64) * dq_strides[1]
    first_row = (number % row_tiles * GROUPS + C) * ROWS
    store_rows(dq, dq_rest, scale, dq_ptr, first_row, dq_strides[2], q_len, DIM)


# Sizes are not specialised: another length or number of heads causes no recompilation.
@gluon.jit(
    do_not_specialize=[
        "lengths_stride", "qk_scale", "scale", "heads", "group", "q_len", "k_len", "row_tiles",
    ],
    do_not_specialize_on_alignment=["lengths_ptr"],
)  # fmt: skip
def wide_dq_kernel(
    # [B, Hq, Nq, .], [B, Hkv, Nk, .], [B, Hkv, Nk, .], [B, Hq, Nq, .] in boxes of [1, 1, ROWS or KEYS, D or DV]; the
    # same tensors in boxes of D_REST or DV_REST channels, or None
    q_desc, k_desc, v_desc, dout_desc, q_rest_desc, k_rest_desc, v_rest_desc, dout_rest_desc,
    rows_ptr,  # fp32 [B * Hq * row_tiles * GROUPS, 2, ROWS], -lse and -delta of `begin_kernel`
    dq_ptr, dq_strides,  # as q, written
    work_ptr,  # int32 [items, ITEM]: see plan.py; no chunks
    index_ptr, tile_ptr, words_ptr,  # as in `forward_kernel`
    lengths_ptr, lengths_stride,  # int32 [2, B], of queries and of keys, or None
    qk_scale, scale,  # positive, as in `backward_kernel`
    heads, group, q_len, k_len, row_tiles,
    GROUPS: gl.constexpr,  # warpgroups that multiply
    D: gl.constexpr, D_REST: gl.constexpr, DV: gl.constexpr, DV_REST: gl.constexpr,  # of tiles, in two pieces
    DIM: gl.constexpr,  # of q
    STAGES: gl.constexpr, V_STAGES: gl.constexpr,  # of keys; of values
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq of one item."""
    dtype: gl.constexpr = q_desc.dtype
    HAS_LENGTHS: gl.constexpr = lengths_ptr is not None
    q_s, k_s = tiles_of(dtype, GROUPS, ROWS, D), tiles_of(dtype, STAGES, KEYS, D)
    v_s, dout_s = tiles_of(dtype, V_STAGES, KEYS, DV), tiles_of(dtype, GROUPS, ROWS, DV)
    # In a tuple Gluon allows None only as an argument of the kernel, so the argument stands for the missing buffers.
    q_rest_s, k_rest_s, v_rest_s, dout_rest_s = q_rest_desc, k_rest_desc, v_rest_desc, dout_rest_desc
    if D_REST > 0:
        q_rest_s, k_rest_s = tiles_of(dtype, GROUPS, ROWS, D_REST), tiles_of(dtype, STAGES, KEYS, D_REST)
    if DV_REST > 0:
        v_rest_s, dout_rest_s = tiles_of(dtype, V_STAGES, KEYS, DV_REST), tiles_of(dtype, GROUPS, ROWS, DV_REST)
    rows_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())  # queries, dout
    for c in gl.static_range(2):
        mbarrier.init(rows_full.index(c), count=1)
    k_full, k_empty = barriers(STAGES, GROUPS * OF_GROUP)
    v_full, v_empty = barriers(V_STAGES, GROUPS * OF_GROUP)
    tiles_s, rests_s = (q_s, k_s, v_s, dout_s), (q_rest_s, k_rest_s, v_rest_s, dout_rest_s)
    bars = (rows_full, k_full, k_empty, v_full, v_empty)
    descriptors = (q_desc, k_desc, v_desc, dout_desc, q_rest_desc, k_rest_desc, v_rest_desc, dout_rest_desc)
    loads = (descriptors, tiles_s, rests_s, bars, work_ptr, index_ptr, (heads, group, row_tiles))
    sizes = (qk_scale, scale, heads, q_len, k_len, row_tiles)
    lists, lengths = (work_ptr, index_ptr, tile_ptr), (lengths_ptr, lengths_stride)
    reads = (tiles_s, rests_s, bars, lists, words_ptr, lengths, rows_ptr, dq_ptr, dq_strides, sizes)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (consumer, (reads, 0, GROUPS, DIM, HAS_LENGTHS)),
                (loader, (loads, GROUPS)),
            ],
            [1],
            [LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (reads, 0, GROUPS, DIM, HAS_LENGTHS)),
                (consumer, (reads, 1, GROUPS, DIM, HAS_LENGTHS)),
                (loader, (loads, GROUPS)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
