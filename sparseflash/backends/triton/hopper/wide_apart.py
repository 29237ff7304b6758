"""The kernel for dk and dv of wide heads whose dk and dv do not fit the registers of one warpgroup, on Hopper (sm_90).

One warpgroup holds dv of ROWS keys, the other dk of the same keys:

    S = K Q^T - lse,  P = exp(S),  dV += P dO        |        dP = V dO^T - delta,  dS = P * dP,  dK += dS Q

P passes through shared memory, rounded as dV reads it. So the products run once, and exponentials run under the other
warpgroup's products. An item, a tile of GROUPS * ROWS keys, is GROUPS such pieces, one after another. Where dk and
dv fit together, the kernel is `wide_dkdv.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseflash.backends.triton.hopper.backward_items import header, items_of_program, part_of
from sparseflash.backends.triton.hopper.gluon_api import local_mma_wait
from sparseflash.backends.triton.hopper.record import barriers
from sparseflash.backends.triton.hopper.scores import read_later
from sparseflash.backends.triton.hopper.tiles import ROWS, bytes_of, load_tile, masked_keys, tiles_of
from sparseflash.backends.triton.hopper.wide_steps import (
    OF_GROUP,
    load_dout,
    load_queries,
    of_queries,
    plus_weighted,
    product,
    store_part,
    store_rows,
    unknown,
    unpacked,
    zeros_of,
)


@gluon.jit
def loader(loads, GROUPS: gl.constexpr):
    """Loads queries, with their -lse and -delta, and dout for every step; keys and values once a piece."""
    descriptors, tiles_s, rests_s, bars, lists, sizes = loads
    _, _, k_desc, v_desc, _, _, _, k_rest_desc, v_rest_desc = descriptors
    _, _, k_s, v_s, _, _ = tiles_s
    _, _, k_rest_s, v_rest_s = rests_s
    _, _, _, _, kv_full, kv_empty = bars
    start_ptr, work_ptr, _ = lists
    _, kv_heads, _ = sizes
    step, turn = 0, 0
    begin, end = items_of_program(start_ptr)
    for item in range(begin, end):
        number, first_k, first, count = header(work_ptr, item)
        batch, kv_head = number // kv_heads, number % kv_heads
        for i in range(count * GROUPS * GROUPS):
            of_piece = i % (count * GROUPS)
            head, first_q = load_queries(loads, batch, first + of_piece // GROUPS, i % GROUPS, step, GROUPS)
            key = first_k + i // (count * GROUPS) * ROWS
            if of_piece == 0:
                mbarrier.wait(kv_empty.index(0), (turn & 1) ^ 1)
                mbarrier.expect(kv_full.index(0), bytes_of(k_desc, k_rest_desc))
                load_tile(k_desc, k_rest_desc, k_s, k_rest_s, 0, kv_full.index(0), batch, kv_head, key)
            load_dout(loads, batch, head, first_q, step)
            if of_piece == 0:
                mbarrier.wait(kv_empty.index(1), (turn & 1) ^ 1)
                mbarrier.expect(kv_full.index(1), bytes_of(v_desc, v_rest_desc))
                load_tile(v_desc, v_rest_desc, v_s, v_rest_s, 0, kv_full.index(1), batch, kv_head, key)
                turn += 1
            step += 1


@gluon.jit
def weights_are(STATE: gl.constexpr, OPERATION: gl.constexpr):
    """Waits until ("sync"), or says that ("arrive"), the weights in shared memory are "written" or "read"."""
    token = gl.zeros([128], gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    CODE: gl.constexpr = "bar." + OPERATION + (" 8" if STATE == "written" else " 9") + ", 256; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(CODE, "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def consumer_of_keys(
    reads, weights_s, GROUPS: gl.constexpr, PADDED_D: gl.constexpr, PADDED_DV: gl.constexpr, V_DIM: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """dv of every item, and the weights."""
    tiles_s, rests_s, bars, lists, words_ptr, lengths, parts_ptr, sizes, written = reads
    q_s, dout_s, k_s, _, rows_s, number_s = tiles_s
    q_rest_s, dout_rest_s, k_rest_s, _ = rests_s
    q_full, q_empty, dout_full, dout_empty, kv_full, kv_empty = bars
    qk_scale, _, kv_heads, k_len = sizes
    _, _, dv_ptr, dv_strides = written
    start_ptr, work_ptr, _ = lists
    dtype: gl.constexpr = q_s.dtype
    Q_STAGES: gl.constexpr = q_s.shape[0]
    DOUT_STAGES: gl.constexpr = dout_s.shape[0]
    KEYS: gl.constexpr = GROUPS * ROWS  # of an item
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    step, turn = 0, 0
    begin, end = items_of_program(start_ptr)
    for item in range(begin, end):
        number, first, _first, count = header(work_ptr, item)
        batch, head = gl.cast(number // kv_heads, gl.int64), gl.cast(number % kv_heads, gl.int64)
        for c in range(GROUPS):
            first_k = first + c * ROWS
            k_left = ROWS
            if HAS_LENGTHS:
                lengths_ptr, lengths_stride = lengths
                k_left = gl.load(lengths_ptr + (lengths_stride + number // kv_heads)) - first_k
            dv = zeros_of(dout_s)
            dv_rest = None if dout_rest_s is None else zeros_of(dout_rest_s)
            if count > 0:
                mbarrier.wait(kv_full.index(0), turn & 1)
                turn += 1
            for i in range(count * GROUPS):
                q_stage, dout_stage = step % Q_STAGES, step % DOUT_STAGES
                mbarrier.wait(q_full.index(q_stage), (step // Q_STAGES) & 1)
                tile = gl.max(number_s.index(q_stage).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
                is_partial = (tile != 0) | (k_left < ROWS)
                own = unknown(0)
                s = local_mma_wait(product(k_s, k_rest_s, own, q_s, q_rest_s, q_stage, S), 0)
                if is_partial:
                    s = masked_keys(
                        s, words_ptr, tile, c * ROWS, i % GROUPS * ROWS, k_left, float("-inf"), KEYS, HAS_LENGTHS, True
                    )
                p = gl.exp2((s + of_queries(rows_s, q_stage, 0, S)) * qk_scale)
                weights = read_later(p.to(dtype))
                async_copy.mbarrier_arrive(q_empty.index(q_stage), increment_count=False)
                if step > 0:
                    weights_are("read", "sync")
                weights_s.store(weights)
                weights_are("written", "arrive")
                mbarrier.wait(dout_full.index(dout_stage), (step // DOUT_STAGES) & 1)
                dv = plus_weighted(dv, weights, dout_s.index(dout_stage))
                if dout_rest_s is not None:
                    dv_rest = local_mma_wait(plus_weighted(dv_rest, weights, dout_rest_s.index(dout_stage)), 0)
                dv = local_mma_wait(dv, 0)
                async_copy.mbarrier_arrive(dout_empty.index(dout_stage), increment_count=False)
                step += 1
            if count > 0:
                async_copy.mbarrier_arrive(kv_empty.index(0), increment_count=False)
            part = part_of(work_ptr, item, HAS_PARTS)
            if HAS_PARTS and part > 0:
                part_ptr = parts_ptr + gl.cast(part - 1, gl.int64) * (KEYS * (PADDED_D + PADDED_DV))
                store_part(part_ptr + KEYS * PADDED_D, dv, dv_rest, c * ROWS, PADDED_DV)
            else:
                x_ptr = dv_ptr + batch * dv_strides[0] + head * dv_strides[1]
                store_rows(dv, dv_rest, 1.0, x_ptr, first_k, dv_strides[2], k_len, V_DIM)
    if step > 0:
        weights_are("read", "sync")


@gluon.jit
def consumer_of_values(
    reads, weights_s, GROUPS: gl.constexpr, PADDED_D: gl.constexpr, PADDED_DV: gl.constexpr, DIM: gl.constexpr,
    HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """dk of every item."""
    tiles_s, rests_s, bars, lists, _, _, parts_ptr, sizes, written = reads
    q_s, dout_s, _, v_s, rows_s, _ = tiles_s
    q_rest_s, dout_rest_s, _, v_rest_s = rests_s
    _, q_empty, dout_full, dout_empty, kv_full, kv_empty = bars
    _, scale, kv_heads, k_len = sizes
    dk_ptr, dk_strides, _, _ = written
    start_ptr, work_ptr, _ = lists
    dtype: gl.constexpr = q_s.dtype
    Q_STAGES: gl.constexpr = q_s.shape[0]
    DOUT_STAGES: gl.constexpr = dout_s.shape[0]
    KEYS: gl.constexpr = GROUPS * ROWS  # of an item
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    step, turn = 0, 0
    begin, end = items_of_program(start_ptr)
    for item in range(begin, end):
        number, first, _first, count = header(work_ptr, item)
        batch, head = gl.cast(number // kv_heads, gl.int64), gl.cast(number % kv_heads, gl.int64)
        for c in range(GROUPS):
            dk = zeros_of(q_s)
            dk_rest = None if q_rest_s is None else zeros_of(q_rest_s)
            if count > 0:
                mbarrier.wait(kv_full.index(1), turn & 1)
                turn += 1
            for _i in range(count * GROUPS):
                q_stage, dout_stage = step % Q_STAGES, step % DOUT_STAGES
                # This wait comes before dP, so that dP and dK run under the next exponentials. The queries have
                # arrived, too, because the other warpgroup has waited for them.
                weights_are("written", "sync")
                weights = weights_s.load(S)
                own = unknown(0)
                mbarrier.wait(dout_full.index(dout_stage), (step // DOUT_STAGES) & 1)
                dp = local_mma_wait(product(v_s, v_rest_s, own, dout_s, dout_rest_s, dout_stage, S), 0)
                weights_are("read", "arrive")
                async_copy.mbarrier_arrive(dout_empty.index(dout_stage), increment_count=False)
                ds = (unpacked(weights) * (dp + of_queries(rows_s, q_stage, 1, S))).to(dtype)
                dk = plus_weighted(dk, ds, q_s.index(q_stage))
                if q_rest_s is not None:
                    dk_rest = local_mma_wait(plus_weighted(dk_rest, ds, q_rest_s.index(q_stage)), 0)
                dk = local_mma_wait(dk, 0)
                async_copy.mbarrier_arrive(q_empty.index(q_stage), increment_count=False)
                step += 1
            if count > 0:
                async_copy.mbarrier_arrive(kv_empty.index(1), increment_count=False)
            part = part_of(work_ptr, item, HAS_PARTS)
            if HAS_PARTS and part > 0:
                part_ptr = parts_ptr + gl.cast(part - 1, gl.int64) * (KEYS * (PADDED_D + PADDED_DV))
                store_part(part_ptr, dk, dk_rest, c * ROWS, PADDED_D)
            else:
                x_ptr = dk_ptr + batch * dk_strides[0] + head * dk_strides[1]
                store_rows(dk, dk_rest, scale, x_ptr, first + c * ROWS, dk_strides[2], k_len, DIM)


# Sizes are not specialised: another length or number of heads causes no recompilation.
@gluon.jit(
    do_not_specialize=["lengths_stride", "qk_scale", "scale", "heads", "kv_heads", "row_tiles", "k_len"],
    do_not_specialize_on_alignment=["lengths_ptr"],
)  # fmt: skip
def wide_apart_kernel(
    # All arguments as in `wide_dkdv_kernel`.
    q_desc, k_desc, v_desc, dout_desc, q_rest_desc, k_rest_desc, v_rest_desc, dout_rest_desc,
    rows_desc,
    dk_ptr, dv_ptr, dk_strides, dv_strides,
    start_ptr, work_ptr, entry_ptr, words_ptr,
    parts_ptr,
    lengths_ptr, lengths_stride,
    qk_scale, scale,
    heads, kv_heads, row_tiles, k_len,
    GROUPS: gl.constexpr,  # pieces of an item
    D: gl.constexpr, D_REST: gl.constexpr, DV: gl.constexpr, DV_REST: gl.constexpr,
    PADDED_D: gl.constexpr, PADDED_DV: gl.constexpr,
    DIM: gl.constexpr, V_DIM: gl.constexpr,
    Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk and dv of all items."""
    dtype: gl.constexpr = q_desc.dtype
    HAS_LENGTHS: gl.constexpr = lengths_ptr is not None
    HAS_PARTS: gl.constexpr = parts_ptr is not None
    q_s, dout_s = tiles_of(dtype, Q_STAGES, ROWS, D), tiles_of(dtype, DOUT_STAGES, ROWS, DV)
    k_s, v_s = tiles_of(dtype, 1, ROWS, D), tiles_of(dtype, 1, ROWS, DV)
    # In a tuple Gluon allows None only as an argument of the kernel, so the argument stands for the missing buffers.
    q_rest_s, dout_rest_s, k_rest_s, v_rest_s = q_rest_desc, dout_rest_desc, k_rest_desc, v_rest_desc
    if D_REST > 0:
        q_rest_s, k_rest_s = tiles_of(dtype, Q_STAGES, ROWS, D_REST), tiles_of(dtype, 1, ROWS, D_REST)
    if DV_REST > 0:
        dout_rest_s, v_rest_s = tiles_of(dtype, DOUT_STAGES, ROWS, DV_REST), tiles_of(dtype, 1, ROWS, DV_REST)
    weights_s = gl.allocate_shared_memory(
        dtype, [ROWS, ROWS], gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    )
    rows_s = gl.allocate_shared_memory(gl.float32, [Q_STAGES, 2, ROWS], rows_desc.layout)
    number_s = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = barriers(Q_STAGES, 2 * OF_GROUP)  # with -lse and -delta
    dout_full, dout_empty = barriers(DOUT_STAGES, 2 * OF_GROUP)
    kv_full, kv_empty = barriers(2, OF_GROUP)  # keys, values
    tiles_s = (q_s, dout_s, k_s, v_s, rows_s, number_s)
    rests_s = (q_rest_s, dout_rest_s, k_rest_s, v_rest_s)
    bars = (q_full, q_empty, dout_full, dout_empty, kv_full, kv_empty)
    lists, lengths = (start_ptr, work_ptr, entry_ptr), (lengths_ptr, lengths_stride)
    descriptors = (
        q_desc, dout_desc, k_desc, v_desc, rows_desc, q_rest_desc, dout_rest_desc, k_rest_desc, v_rest_desc
    )  # fmt: skip
    loads = (descriptors, tiles_s, rests_s, bars, lists, (heads, kv_heads, row_tiles))
    sizes = (qk_scale, scale, kv_heads, k_len)
    written = (dk_ptr, dk_strides, dv_ptr, dv_strides)
    reads = (tiles_s, rests_s, bars, lists, words_ptr, lengths, parts_ptr, sizes, written)
    gl.warp_specialize(
        [
            (consumer_of_keys, (reads, weights_s, GROUPS, PADDED_D, PADDED_DV, V_DIM, HAS_LENGTHS, HAS_PARTS)),
            (consumer_of_values, (reads, weights_s, GROUPS, PADDED_D, PADDED_DV, DIM, HAS_PARTS)),
            (loader, (loads, GROUPS)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )
