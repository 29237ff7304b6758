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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from sparseflash.backends.triton.hopper.configs import WIDE_KEYS
from sparseflash.backends.triton.hopper.gluon_api import accumulator, async_load, local_mma_wait
from sparseflash.backends.triton.hopper.tiles import ROWS, block_at, bytes_of, live_words, masked, opaque, tiles_of
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
def loader(
    loads, GROUPS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr
):
    """Loads queries and dout once, then keys and values of every step."""
    descriptors, tiles_s, rests_s, bars, work_ptr, index_ptr, sizes = loads
    q_desc, k_desc, v_desc, dout_desc, q_rest_desc, k_rest_desc, v_rest_desc, dout_rest_desc = descriptors
    q_s, k_s, v_s, dout_s = tiles_s
    q_rest_s, k_rest_s, v_rest_s, dout_rest_s = rests_s
    rows_full, k_full, k_empty, v_full, v_empty = bars
    heads, group, row_tiles = sizes
    number, start, _full, steps = item_of(work_ptr, GROUPS)
    batch, head = number // row_tiles // heads, number // row_tiles % heads
    kv_head = head // group
    mbarrier.expect(rows_full.index(0), GROUPS * bytes_of(q_desc, q_rest_desc))
    for c in gl.static_range(GROUPS):
        first_q = (number % row_tiles * GROUPS + c) * ROWS
        async_load(q_desc, [batch, head, first_q, 0], rows_full.index(0), q_s.index(c))
        if q_rest_desc is not None:
            async_load(q_rest_desc, [batch, head, first_q, D], rows_full.index(0), q_rest_s.index(c))
    for i in range(steps):
        first_k = block_at(index_ptr, start + i, GROUPS) * KEYS
        stage = i % STAGES
        mbarrier.wait(k_empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(k_full.index(stage), bytes_of(k_desc, k_rest_desc))
        async_load(k_desc, [batch, kv_head, first_k, 0], k_full.index(stage), k_s.index(stage))
        if k_rest_desc is not None:
            async_load(k_rest_desc, [batch, kv_head, first_k, D], k_full.index(stage), k_rest_s.index(stage))
        if i == 0:
            mbarrier.expect(rows_full.index(1), GROUPS * bytes_of(dout_desc, dout_rest_desc))
            for c in gl.static_range(GROUPS):
                first_q = (number % row_tiles * GROUPS + c) * ROWS
                async_load(dout_desc, [batch, head, first_q, 0], rows_full.index(1), dout_s.index(c))
                if dout_rest_desc is not None:
                    async_load(dout_rest_desc, [batch, head, first_q, DV], rows_full.index(1), dout_rest_s.index(c))
        stage = i % V_STAGES
        mbarrier.wait(v_empty.index(stage), ((i // V_STAGES) & 1) ^ 1)
        mbarrier.expect(v_full.index(stage), bytes_of(v_desc, v_rest_desc))
        async_load(v_desc, [batch, kv_head, first_k, 0], v_full.index(stage), v_s.index(stage))
        if v_rest_desc is not None:
            async_load(v_rest_desc, [batch, kv_head, first_k, DV], v_full.index(stage), v_rest_s.index(stage))


@gluon.jit
def store_rows(x, x_ptr, first_row, stride, rows, FIRST: gl.constexpr, DIM: gl.constexpr):
    """Writes channels from FIRST on, up to DIM, of a warpgroup's queries, up to `rows`."""
    # `opaque` keeps the compiler from computing the addresses before the loop, where they would spill.
    row = first_row + opaque(gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout)))
    column = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    at = gl.cast(row, gl.int64)[:, None] * stride + column[None, :]
    gl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < DIM)[None, :])


@gluon.jit
def unknown(number):
    """`number`, hidden from the compiler, which then assumes that it changes at every step.

    It is used as an index of tiles that stay the same. With a constant index, Triton 3.6 would compute the descriptors
    of these tiles for matrix instructions before the loop, and spill them.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def consumer(
    reads, C: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, D_REST: gl.constexpr, DV_REST: gl.constexpr,
    DIM: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """dq of ROWS queries."""
    tiles_s, rests_s, bars, lists, words_ptr, lengths, rows_ptr, dq_ptr, dq_strides, sizes = reads
    work_ptr, index_ptr, tile_ptr = lists
    q_s, k_s, v_s, dout_s = tiles_s
    q_rest_s, k_rest_s, v_rest_s, dout_rest_s = rests_s
    rows_full, k_full, k_empty, v_full, v_empty = bars
    qk_scale, scale, heads, q_len, k_len, row_tiles = sizes
    dtype: gl.constexpr = q_s.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    # The layout S of [ROWS, KEYS], seen as [ROWS, KEYS // 32, 32]: each thread holds the mask words of its scores.
    BITS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [ROWS, KEYS // 32, 32],
    )
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
    zero = gl.zeros([ROWS, KEYS], gl.float32, layout=S)
    dq = gl.zeros([ROWS, D], gl.float32, layout=A)
    if D_REST > 0:
        R: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D_REST, 16])
        dq_rest = gl.zeros([ROWS, D_REST], gl.float32, layout=R)
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
        s = warpgroup_mma(q_s.index(own), k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        if D_REST > 0:
            s = warpgroup_mma(q_rest_s.index(own), k_rest_s.index(stage).permute((1, 0)), accumulator(s), is_async=True)
        mbarrier.wait(v_full.index(v_stage), (i // V_STAGES) & 1)
        dp = warpgroup_mma(dout_s.index(own), v_s.index(v_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        if DV_REST > 0:
            dp = warpgroup_mma(
                dout_rest_s.index(own), v_rest_s.index(v_stage).permute((1, 0)), accumulator(dp), is_async=True
            )
        s = local_mma_wait(s, 1 if DV_REST == 0 else 2)
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
        weights = gl.convert_layout(ds, gl.DotOperandLayout(operand_index=0, parent=A, k_width=2))
        dq = accumulator(warpgroup_mma(weights, k_s.index(stage), dq, is_async=True))
        if D_REST > 0:
            weights = gl.convert_layout(ds, gl.DotOperandLayout(operand_index=0, parent=R, k_width=2))
            dq_rest = local_mma_wait(warpgroup_mma(weights, k_rest_s.index(stage), dq_rest, is_async=True), 0)
        # ptxas accepts no product in flight from one step to the next. The other warpgroup multiplies meanwhile.
        dq = local_mma_wait(dq, 0)
        async_copy.mbarrier_arrive(k_empty.index(stage), increment_count=False)
    dq_ptr += gl.cast(batch, gl.int64) * dq_strides[0] + gl.cast(head, gl.int64) * dq_strides[1]
    first_row = (number % row_tiles * GROUPS + C) * ROWS
    store_rows(dq * scale, dq_ptr, first_row, dq_strides[2], q_len, 0, DIM)
    if D_REST > 0:
        store_rows(dq_rest * scale, dq_ptr, first_row, dq_strides[2], q_len, D, DIM)


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
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    rows_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)  # queries, dout
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], BAR)
    for c in gl.static_range(2):
        mbarrier.init(rows_full.index(c), count=1)
    for c in gl.static_range(STAGES):
        mbarrier.init(k_full.index(c), count=1)
        mbarrier.init(k_empty.index(c), count=GROUPS * 128)
    for c in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(c), count=1)
        mbarrier.init(v_empty.index(c), count=GROUPS * 128)
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
                (consumer, (reads, 0, GROUPS, D, D_REST, DV_REST, DIM, STAGES, V_STAGES, HAS_LENGTHS)),
                (loader, (loads, GROUPS, D, DV, STAGES, V_STAGES)),
            ],
            [1],
            [LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (reads, 0, GROUPS, D, D_REST, DV_REST, DIM, STAGES, V_STAGES, HAS_LENGTHS)),
                (consumer, (reads, 1, GROUPS, D, D_REST, DV_REST, DIM, STAGES, V_STAGES, HAS_LENGTHS)),
                (loader, (loads, GROUPS, D, DV, STAGES, V_STAGES)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
