"""The kernel for dk and dv of wide heads on Hopper (sm_90): like `backward.py`, with items of 64 keys and without dq.

An item has KEYS keys, half a tile of the mask, and steps have ROWS queries. The warpgroups share all keys and split
channels: each holds half the columns of dk and dv, and computes S and dP of half the queries. So the weights pass
through shared memory, too, each step through the other of two buffers. The next scores are multiplied while dS is
computed, and the next dP under the next exponentials. After an item's last step, the product of its next scores reads
old queries; its result is not used.

dk and dv are stored from registers, once an item. The kernel supports no score modification except a sink, which lse
includes. dq is computed by `wide_dq.py`.

Head dims that are not a power of 2 have two pieces, as in `forward.py`; values are padded to a power of 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from sparseflash.backends.triton.hopper.backward import THREADS, header, items_of_program, part_of
from sparseflash.backends.triton.hopper.backward_plan import ENTRY, ENTRY_ROW, ENTRY_TILE
from sparseflash.backends.triton.hopper.configs import BLOCK, WIDE_KEYS
from sparseflash.backends.triton.hopper.forward import bytes_of, opaque, tiles_of
from sparseflash.backends.triton.hopper.gluon_api import accumulator, async_load, local_mma_wait
from sparseflash.backends.triton.hopper.record import heard, told
from sparseflash.backends.triton.hopper.rows import TILE_ROWS

KEYS = gl.constexpr(WIDE_KEYS)  # of an item
ROWS = gl.constexpr(64)  # queries of a step
TILE_KEYS = gl.constexpr(BLOCK[1])
STEPS = gl.constexpr(BLOCK[0] // 64)


@gluon.jit
def loader(loads, D: gl.constexpr, STAGES: gl.constexpr):
    """Loads queries, with their -lse and -delta, and dout for every step; keys and values once an item."""
    descriptors, tiles_s, rests_s, bars, lists, sizes = loads
    q_desc, dout_desc, k_desc, v_desc, rows_desc, q_rest_desc, k_rest_desc = descriptors
    q_s, dout_s, k_s, v_s, rows_s, number_s = tiles_s
    q_rest_s, k_rest_s = rests_s
    q_full, dout_full, empty, kv_full, kv_empty = bars
    start_ptr, work_ptr, entry_ptr = lists
    heads, kv_heads, row_tiles = sizes
    step, turn = 0, 0
    begin, end = items_of_program(start_ptr)
    for item in range(begin, end):
        number, first_k, first, count = header(work_ptr, item)
        batch, kv_head = number // kv_heads, number % kv_heads
        for i in range(count * STEPS):
            at = entry_ptr + (first + i // STEPS) * ENTRY
            row, tile = gl.load(at + ENTRY_ROW), gl.load(at + ENTRY_TILE)
            piece = i % STEPS
            head = row // row_tiles % heads
            first_q = row % row_tiles * TILE_ROWS + piece * ROWS
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            told(number_s, stage, 0, tile, OF=1)
            mbarrier.expect(q_full.index(stage), bytes_of(q_desc, q_rest_desc) + rows_desc.block_type.nbytes)
            async_load(q_desc, [batch, head, first_q, 0], q_full.index(stage), q_s.index(stage))
            if q_rest_desc is not None:
                async_load(q_rest_desc, [batch, head, first_q, D], q_full.index(stage), q_rest_s.index(stage))
            async_load(rows_desc, [(row * STEPS + piece) * 2, 0], q_full.index(stage), rows_s.index(stage))
            if i == 0:
                # The last product with the previous item's keys and values was that of dP, or the unused scores.
                mbarrier.wait(kv_empty.index(0), (turn & 1) ^ 1)
                turn += 1
                mbarrier.expect(kv_full.index(0), bytes_of(k_desc, k_rest_desc) + v_desc.block_type.nbytes)
                async_load(k_desc, [batch, kv_head, first_k, 0], kv_full.index(0), k_s.index(0))
                if k_rest_desc is not None:
                    async_load(k_rest_desc, [batch, kv_head, first_k, D], kv_full.index(0), k_rest_s.index(0))
                async_load(v_desc, [batch, kv_head, first_k, 0], kv_full.index(0), v_s.index(0))
            mbarrier.expect(dout_full.index(stage), dout_desc.block_type.nbytes)
            async_load(dout_desc, [batch, head, first_q, 0], dout_full.index(stage), dout_s.index(stage))
            step += 1


@gluon.jit
def unknown(number):
    """A whole number that the compiler takes for one that changes at every step. As the index of tiles that stay the
    same, it keeps the descriptors of their products in the loop. Triton 3.6 would make them before it, and spill them.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def masked(x, words_ptr, tile, first_key, first_row, k_left, HAS_LENGTHS: gl.constexpr, BITS: gl.constexpr):
    """x [KEYS, ROWS] where the tile's bits, from this key and row on, are set, else -inf; tile 0 is full. If
    HAS_LENGTHS, only the first `k_left` keys are live.
    """
    OF_WORDS: gl.constexpr = gl.SliceLayout(2, BITS)
    WORDS: gl.constexpr = TILE_ROWS // 32
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, OF_WORDS))
    word = first_row // 32 + gl.arange(0, ROWS // 32, layout=gl.SliceLayout(0, OF_WORDS))
    tile_ptr = words_ptr + gl.cast(tile - 1, gl.int64) * (TILE_KEYS * WORDS)
    at = (first_key + key)[:, None] * WORDS + word[None, :]
    words = gl.load(tile_ptr + at, mask=(at >= 0) & (tile > 0), other=-1)
    if HAS_LENGTHS:
        words = gl.where((key < k_left)[:, None], words, 0)
    shift = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(0, BITS)))
    bits = (words.expand_dims(2) >> shift.expand_dims(0).expand_dims(0)) & 1
    bits = gl.convert_layout(bits.reshape([KEYS, ROWS]), x.type.layout, assert_trivial=True)
    return gl.where(bits != 0, x, float("-inf"))


@gluon.jit
def store_rows(x, x_ptr, strides, number, kv_heads, first_k, k_len, FIRST: gl.constexpr, DIM: gl.constexpr):
    """Writes channels from FIRST on, up to DIM, of the keys of one head, from `first_k` on, up to `k_len`."""
    batch, head = gl.cast(number // kv_heads, gl.int64), gl.cast(number % kv_heads, gl.int64)
    # `opaque` keeps the compiler from computing the addresses before the loop, where they would spill.
    key = first_k + opaque(gl.arange(0, KEYS, layout=gl.SliceLayout(1, x.type.layout)))
    column = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    x_ptr += batch * strides[0] + head * strides[1]
    at = gl.cast(key, gl.int64)[:, None] * strides[2] + column[None, :]
    gl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=(key < k_len)[:, None] & (column < DIM)[None, :])


@gluon.jit
def store_part(part_ptr, x, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Writes channels from FIRST on of a part, [KEYS, WIDTH]."""
    key = opaque(gl.arange(0, KEYS, layout=gl.SliceLayout(1, x.type.layout)))
    column = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    gl.store(part_ptr + (key[:, None] * WIDTH + column[None, :]), x)


@gluon.jit
def product(x_s, y_s, S: gl.constexpr):
    """x y^T [KEYS, ROWS], in flight. Unlike in `backward.py`, the sums do not start as -lse or -delta: ptxas would wait
    for all earlier products before it sets them (C7515).
    """
    zero = gl.zeros([KEYS, ROWS], gl.float32, layout=S)
    return accumulator(warpgroup_mma(x_s, y_s.permute((1, 0)), zero, use_acc=False, is_async=True))


@gluon.jit
def plus_product(x, y_s, z_s):
    """x + y z^T, in flight."""
    return accumulator(warpgroup_mma(y_s, z_s.permute((1, 0)), x, is_async=True))


@gluon.jit
def of_queries(rows_s, stage, WHICH: gl.constexpr, S: gl.constexpr):
    """-lse (0) or -delta (1) of the queries of a stage, for every key."""
    return rows_s.index(stage).slice(WHICH, 1, dim=0).load(S).broadcast_to(KEYS, ROWS)


@gluon.jit
def consumer(
    reads, STAGES: gl.constexpr, D: gl.constexpr, D_REST: gl.constexpr, DV: gl.constexpr,
    PADDED_D: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """dk and dv of every item."""
    tiles_s, rests_s, bars, lists, words_ptr, lengths, parts_ptr, weights_s, sizes, written = reads
    q_rest_s, k_rest_s = rests_s
    qk_scale, scale, kv_heads, k_len = sizes
    dk_ptr, dk_strides, dv_ptr, dv_strides = written
    p_s, ds_s = weights_s
    q_s, dout_s, k_s, v_s, rows_s, number_s = tiles_s
    q_full, dout_full, empty, kv_full, kv_empty = bars
    start_ptr, work_ptr, _ = lists
    dtype: gl.constexpr = q_s.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, ROWS // 2, 16])
    K: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, D // 2, 16])
    if D_REST > 0:
        R: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, D_REST // 2, 16]
        )
    V: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, DV // 2, 16])
    # The layout S of [KEYS, ROWS], seen as [KEYS, ROWS // 32, 32]: each thread holds the mask words of its scores.
    BITS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0], [0, 1, 0]],
        [],
        [KEYS, ROWS // 32, 32],
    )
    step, turn = 0, 0
    begin, end = items_of_program(start_ptr)
    for item in range(begin, end):
        number, first_k, _first, count = header(work_ptr, item)
        k_left = KEYS
        if HAS_LENGTHS:
            lengths_ptr, lengths_stride = lengths
            k_left = gl.load(lengths_ptr + (lengths_stride + number // kv_heads)) - first_k
        dk = gl.zeros([KEYS, D], gl.float32, layout=K)
        dv = gl.zeros([KEYS, DV], gl.float32, layout=V)
        if D_REST > 0:
            dk_rest = gl.zeros([KEYS, D_REST], gl.float32, layout=R)
        steps = count * STEPS
        if steps > 0:
            mbarrier.wait(kv_full.index(0), turn & 1)
            turn += 1
            mbarrier.wait(q_full.index(step % STAGES), (step // STAGES) & 1)
        s = product(k_s.index(0), q_s.index(step % STAGES), S)
        if D_REST > 0:
            s = plus_product(s, k_rest_s.index(0), q_rest_s.index(step % STAGES))
        s = local_mma_wait(s, 0)
        for i in range(steps):
            stage, buffer = step % STAGES, step & 1
            tile = heard(number_s, stage, 0, OF=1)
            is_partial = (tile != 0) | (k_left < KEYS)
            mbarrier.wait(dout_full.index(stage), (step // STAGES) & 1)
            only = unknown(0)
            dp = product(v_s.index(only), dout_s.index(stage), S)
            if is_partial:
                s = masked(s, words_ptr, tile, first_k % TILE_KEYS, i % STEPS * ROWS, k_left, HAS_LENGTHS, BITS)
            p = gl.exp2((s + of_queries(rows_s, stage, 0, S)) * qk_scale)
            p_s.index(buffer).store(p.to(dtype))
            fence_async_shared()
            dv = accumulator(warpgroup_mma(p_s.index(buffer), dout_s.index(stage), dv, is_async=True))
            if i + 1 < steps:
                mbarrier.wait(q_full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1)
            s = product(k_s.index(only), q_s.index((step + 1) % STAGES), S)
            if D_REST > 0:
                s = plus_product(s, k_rest_s.index(only), q_rest_s.index((step + 1) % STAGES))
            dp = local_mma_wait(dp, 2 if D_REST == 0 else 3)
            ds_s.index(buffer).store((p * (dp + of_queries(rows_s, stage, 1, S))).to(dtype))
            fence_async_shared()
            dk = accumulator(warpgroup_mma(ds_s.index(buffer), q_s.index(stage), dk, is_async=True))
            if D_REST > 0:
                dk_rest = warpgroup_mma(ds_s.index(buffer), q_rest_s.index(stage), dk_rest, is_async=True)
                dk_rest = local_mma_wait(dk_rest, 0)
            # ptxas accepts no product in flight from one step to the next.
            dk, dv, s = local_mma_wait(dk, 0), local_mma_wait(dv, 0), local_mma_wait(s, 0)
            async_copy.mbarrier_arrive(empty.index(stage), increment_count=False)
            step += 1
        if steps > 0:
            async_copy.mbarrier_arrive(kv_empty.index(0), increment_count=False)
        part = part_of(work_ptr, item, HAS_PARTS)
        if HAS_PARTS and part > 0:
            part_ptr = parts_ptr + gl.cast(part - 1, gl.int64) * (KEYS * (PADDED_D + DV))  # dk, then dv
            store_part(part_ptr, dk, 0, PADDED_D)
            if D_REST > 0:
                store_part(part_ptr, dk_rest, D, PADDED_D)
            store_part(part_ptr + KEYS * PADDED_D, dv, 0, DV)
        else:
            store_rows(dv, dv_ptr, dv_strides, number, kv_heads, first_k, k_len, 0, V_DIM)
            store_rows(dk * scale, dk_ptr, dk_strides, number, kv_heads, first_k, k_len, 0, DIM)
            if D_REST > 0:
                store_rows(dk_rest * scale, dk_ptr, dk_strides, number, kv_heads, first_k, k_len, D, DIM)


# Sizes are not specialised: another length or number of heads causes no recompilation.
@gluon.jit(
    do_not_specialize=["lengths_stride", "qk_scale", "scale", "heads", "kv_heads", "row_tiles", "k_len"],
    do_not_specialize_on_alignment=["lengths_ptr"],  # one number is loaded at a time
)  # fmt: skip
def wide_backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, rows_desc,  # as in `backward_kernel`, in boxes of D or DV channels
    q_rest_desc, k_rest_desc,  # q and k in boxes of D_REST channels, or None
    dk_ptr, dv_ptr, dk_strides, dv_strides,  # as k and v, written
    start_ptr, work_ptr, entry_ptr, words_ptr,  # as in `backward_kernel`
    parts_ptr,  # fp32 [parts, KEYS * (PADDED_D + DV)], written: dk without `scale` and dv of parts; None without parts
    lengths_ptr, lengths_stride,  # int32 [2, B], of queries and of keys, or None
    qk_scale, scale,  # positive, as in `backward_kernel`
    heads, kv_heads, row_tiles, k_len,
    # Channels of queries and keys, in two pieces, the second 0 if there is one; of values; of dk in parts.
    D: gl.constexpr, D_REST: gl.constexpr, DV: gl.constexpr, PADDED_D: gl.constexpr,
    DIM: gl.constexpr, V_DIM: gl.constexpr,  # of the tensors
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk and dv of all items."""
    dtype: gl.constexpr = q_desc.dtype
    HAS_LENGTHS: gl.constexpr = lengths_ptr is not None
    HAS_PARTS: gl.constexpr = parts_ptr is not None
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
    q_s, dout_s = tiles_of(dtype, STAGES, ROWS, D), tiles_of(dtype, STAGES, ROWS, DV)
    k_s, v_s = tiles_of(dtype, 1, KEYS, D), tiles_of(dtype, 1, KEYS, DV)
    # In a tuple Gluon allows None only as an argument of the kernel, so the argument stands for the missing buffers.
    q_rest_s, k_rest_s = q_rest_desc, k_rest_desc
    if D_REST > 0:
        q_rest_s, k_rest_s = tiles_of(dtype, STAGES, ROWS, D_REST), tiles_of(dtype, 1, KEYS, D_REST)
    p_s = gl.allocate_shared_memory(dtype, [2, KEYS, ROWS], WEIGHTS)
    ds_s = gl.allocate_shared_memory(dtype, [2, KEYS, ROWS], WEIGHTS)
    rows_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2, ROWS], rows_desc.layout)
    number_s = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)  # with -lse and -delta
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)  # both
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], BAR)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1, 1], BAR)
    for c in gl.static_range(STAGES):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(dout_full.index(c), count=1)
        mbarrier.init(empty.index(c), count=THREADS)
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(kv_empty.index(0), count=THREADS)
    tiles_s = (q_s, dout_s, k_s, v_s, rows_s, number_s)
    bars = (q_full, dout_full, empty, kv_full, kv_empty)
    lists = (start_ptr, work_ptr, entry_ptr)
    lengths = (lengths_ptr, lengths_stride)
    descriptors = (q_desc, dout_desc, k_desc, v_desc, rows_desc, q_rest_desc, k_rest_desc)
    rests_s = (q_rest_s, k_rest_s)
    loads = (descriptors, tiles_s, rests_s, bars, lists, (heads, kv_heads, row_tiles))
    sizes = (qk_scale, scale, kv_heads, k_len)
    written = (dk_ptr, dk_strides, dv_ptr, dv_strides)
    reads = (tiles_s, rests_s, bars, lists, words_ptr, lengths, parts_ptr, (p_s, ds_s), sizes, written)
    gl.warp_specialize(
        [
            (consumer, (reads, STAGES, D, D_REST, DV, PADDED_D, DIM, V_DIM, HAS_LENGTHS, HAS_PARTS)),
            (loader, (loads, D, STAGES)),
        ],
        [1],
        [REGISTERS],
    )
