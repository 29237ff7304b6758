"""The kernel for dk and dv of wide heads and of blocks of 64 on Hopper (sm_90): an item is a tile of keys, whose
queries stream past.

The work lists are as in `backward.py`, without dq, which `wide_dq.py` computes. One warp loads. Each of GROUPS
warpgroups holds ROWS keys with all their channels, and computes for as many queries a step

    S = K Q^T - lse,  P = exp(S),  dV += P dO,  dP = V dO^T - delta,  dS = P * dP,  dK += dS Q

P and dS go from registers to the products with dO and Q, so the warpgroups exchange nothing. dP is multiplied after the
exponentials: at D=192, Dv=128 dk and dv take 160 registers of a thread, and S and dP together would leave too few. The
products of one warpgroup run under the exponentials of the other.

Where dk and dv do not fit together, `wide_apart.py` gives each to a warpgroup.

A tile of the lists has GROUPS * ROWS queries and as many keys. For a mask in blocks of 64 x 64, whose neighbouring
columns see different queries, GROUPS is 1, and a multiprocessor runs two programs: the products of one run under the
exponentials of the other.

dk and dv are stored from registers, once an item. The kernel supports no score modification except a sink, which lse
includes. Head dims that are not a power of 2 have two pieces, as in `forward.py`.
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
    """Loads queries, with their -lse and -delta, and dout for every step; keys and values once an item."""
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
        for i in range(count * GROUPS):
            head, first_q = load_queries(loads, batch, first + i // GROUPS, i % GROUPS, step, GROUPS)
            if i == 0:
                for c in gl.static_range(GROUPS):
                    bar = kv_full.index(c)
                    key = first_k + c * ROWS
                    # The last products of the previous item with its keys and values.
                    mbarrier.wait(kv_empty.index(c), (turn & 1) ^ 1)
                    mbarrier.expect(bar, bytes_of(k_desc, k_rest_desc) + bytes_of(v_desc, v_rest_desc))
                    load_tile(v_desc, v_rest_desc, v_s, v_rest_s, c, bar, batch, kv_head, key)
                    load_tile(k_desc, k_rest_desc, k_s, k_rest_s, c, bar, batch, kv_head, key)
                turn += 1
            load_dout(loads, batch, head, first_q, step)
            step += 1


@gluon.jit
def consumer(
    reads, C: gl.constexpr, GROUPS: gl.constexpr, PADDED_D: gl.constexpr, PADDED_DV: gl.constexpr, DIM: gl.constexpr,
    V_DIM: gl.constexpr, EARLY: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """dk and dv of ROWS keys of every item."""
    tiles_s, rests_s, bars, lists, words_ptr, lengths, parts_ptr, sizes, written = reads
    q_s, dout_s, k_s, v_s, rows_s, number_s = tiles_s
    q_rest_s, dout_rest_s, k_rest_s, v_rest_s = rests_s
    q_full, q_empty, dout_full, dout_empty, kv_full, kv_empty = bars
    qk_scale, scale, kv_heads, k_len = sizes
    dk_ptr, dk_strides, dv_ptr, dv_strides = written
    start_ptr, work_ptr, _ = lists
    dtype: gl.constexpr = q_s.dtype
    Q_STAGES: gl.constexpr = q_s.shape[0]
    DOUT_STAGES: gl.constexpr = dout_s.shape[0]
    KEYS: gl.constexpr = GROUPS * ROWS  # of an item
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    OF_DOUT: gl.constexpr = 1 if dout_rest_s is None else 2  # products with a tile
    step, turn = 0, 0
    begin, end = items_of_program(start_ptr)
    for item in range(begin, end):
        number, first_k, _first, count = header(work_ptr, item)
        first_k += C * ROWS
        k_left = ROWS
        if HAS_LENGTHS:
            lengths_ptr, lengths_stride = lengths
            k_left = gl.load(lengths_ptr + (lengths_stride + number // kv_heads)) - first_k
        dk, dv = zeros_of(q_s), zeros_of(dout_s)
        dk_rest = None if q_rest_s is None else zeros_of(q_rest_s)
        dv_rest = None if dout_rest_s is None else zeros_of(dout_rest_s)
        if count > 0:
            mbarrier.wait(kv_full.index(C), turn & 1)
            turn += 1
            if EARLY:
                mbarrier.wait(q_full.index(step % Q_STAGES), (step // Q_STAGES) & 1)
        for i in range(count * GROUPS):
            q_stage, dout_stage = step % Q_STAGES, step % DOUT_STAGES
            if not EARLY:
                mbarrier.wait(q_full.index(q_stage), (step // Q_STAGES) & 1)
            tile = gl.max(number_s.index(q_stage).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            is_partial = (tile != 0) | (k_left < ROWS)
            own = unknown(C)
            s = product(k_s, k_rest_s, own, q_s, q_rest_s, q_stage, S)
            if EARLY:
                mbarrier.wait(dout_full.index(dout_stage), (step // DOUT_STAGES) & 1)
                dp = product(v_s, v_rest_s, own, dout_s, dout_rest_s, dout_stage, S)
            s = local_mma_wait(s, OF_DOUT if EARLY else 0)
            if is_partial:
                s = masked_keys(
                    s, words_ptr, tile, C * ROWS, i % GROUPS * ROWS, k_left, float("-inf"), KEYS, HAS_LENGTHS, True
                )
            p = gl.exp2((s + of_queries(rows_s, q_stage, 0, S)) * qk_scale)
            weights = read_later(p.to(dtype))
            if EARLY:
                # Here this wait splits the code: the exponentials stay before it, and run under dP.
                if i + 1 < count * GROUPS:
                    mbarrier.wait(q_full.index((step + 1) % Q_STAGES), ((step + 1) // Q_STAGES) & 1)
            else:
                mbarrier.wait(dout_full.index(dout_stage), (step // DOUT_STAGES) & 1)
            dv = plus_weighted(dv, weights, dout_s.index(dout_stage))
            if dout_rest_s is not None:
                dv_rest = plus_weighted(dv_rest, weights, dout_rest_s.index(dout_stage))
            if not EARLY:
                dp = product(v_s, v_rest_s, own, dout_s, dout_rest_s, dout_stage, S)
            dp = local_mma_wait(dp, OF_DOUT if EARLY else 0)
            if not EARLY:
                async_copy.mbarrier_arrive(dout_empty.index(dout_stage), increment_count=False)
            p = unpacked(weights)  # P in fp32 would take registers until here
            ds = (p * (dp + of_queries(rows_s, q_stage, 1, S))).to(dtype)
            dk = plus_weighted(dk, ds, q_s.index(q_stage))
            if q_rest_s is not None:
                dk_rest = local_mma_wait(plus_weighted(dk_rest, ds, q_rest_s.index(q_stage)), 0)
            dk = local_mma_wait(dk, 0)
            # ptxas accepts no product in flight from one step to the next. The other warpgroup multiplies meanwhile.
            dv = local_mma_wait(dv, 0)
            if dout_rest_s is not None:
                dv_rest = local_mma_wait(dv_rest, 0)
            if EARLY:
                async_copy.mbarrier_arrive(dout_empty.index(dout_stage), increment_count=False)
            async_copy.mbarrier_arrive(q_empty.index(q_stage), increment_count=False)
            step += 1
        if count > 0:
            async_copy.mbarrier_arrive(kv_empty.index(C), increment_count=False)
        part = part_of(work_ptr, item, HAS_PARTS)
        batch, head = gl.cast(number // kv_heads, gl.int64), gl.cast(number % kv_heads, gl.int64)
        part_ptr = parts_ptr
        if HAS_PARTS:
            part_ptr += gl.cast(part - 1, gl.int64) * (KEYS * (PADDED_D + PADDED_DV))  # dk, then dv
        if HAS_PARTS and part > 0:
            store_part(part_ptr + KEYS * PADDED_D, dv, dv_rest, C * ROWS, PADDED_DV)
            store_part(part_ptr, dk, dk_rest, C * ROWS, PADDED_D)
        else:
            x_ptr = dv_ptr + batch * dv_strides[0] + head * dv_strides[1]
            store_rows(dv, dv_rest, 1.0, x_ptr, first_k, dv_strides[2], k_len, V_DIM)
            x_ptr = dk_ptr + batch * dk_strides[0] + head * dk_strides[1]
            store_rows(dk, dk_rest, scale, x_ptr, first_k, dk_strides[2], k_len, DIM)


# Sizes are not specialised: another length or number of heads causes no recompilation.
@gluon.jit(
    do_not_specialize=["lengths_stride", "qk_scale", "scale", "heads", "kv_heads", "row_tiles", "k_len"],
    do_not_specialize_on_alignment=["lengths_ptr"],
)  # fmt: skip
def wide_dkdv_kernel(
    # As in `backward_kernel`, in boxes of ROWS tokens and D or DV channels; the same tensors in boxes of D_REST or
    # DV_REST channels, or None.
    q_desc, k_desc, v_desc, dout_desc, q_rest_desc, k_rest_desc, v_rest_desc, dout_rest_desc,
    rows_desc,
    dk_ptr, dv_ptr, dk_strides, dv_strides,  # as k and v, written
    start_ptr, work_ptr, entry_ptr, words_ptr,  # as in `backward_kernel`
    parts_ptr,  # fp32 [parts, KEYS * (PADDED_D + PADDED_DV)], written: dk without `scale` and dv of parts; or None
    lengths_ptr, lengths_stride,  # int32 [2, B], of queries and of keys, or None
    qk_scale, scale,  # positive, as in `backward_kernel`
    heads, kv_heads, row_tiles, k_len,
    GROUPS: gl.constexpr,  # warpgroups that multiply
    D: gl.constexpr, D_REST: gl.constexpr, DV: gl.constexpr, DV_REST: gl.constexpr,  # of tiles, in two pieces
    PADDED_D: gl.constexpr, PADDED_DV: gl.constexpr,  # of parts
    DIM: gl.constexpr, V_DIM: gl.constexpr,  # of the tensors
    Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr,
    EARLY: gl.constexpr,  # whether dP is multiplied before the exponentials
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk and dv of all items."""
    dtype: gl.constexpr = q_desc.dtype
    HAS_LENGTHS: gl.constexpr = lengths_ptr is not None
    HAS_PARTS: gl.constexpr = parts_ptr is not None
    q_s, dout_s = tiles_of(dtype, Q_STAGES, ROWS, D), tiles_of(dtype, DOUT_STAGES, ROWS, DV)
    k_s, v_s = tiles_of(dtype, GROUPS, ROWS, D), tiles_of(dtype, GROUPS, ROWS, DV)
    # In a tuple Gluon allows None only as an argument of the kernel, so the argument stands for the missing buffers.
    q_rest_s, dout_rest_s, k_rest_s, v_rest_s = q_rest_desc, dout_rest_desc, k_rest_desc, v_rest_desc
    if D_REST > 0:
        q_rest_s, k_rest_s = tiles_of(dtype, Q_STAGES, ROWS, D_REST), tiles_of(dtype, GROUPS, ROWS, D_REST)
    if DV_REST > 0:
        dout_rest_s, v_rest_s = tiles_of(dtype, DOUT_STAGES, ROWS, DV_REST), tiles_of(dtype, GROUPS, ROWS, DV_REST)
    rows_s = gl.allocate_shared_memory(gl.float32, [Q_STAGES, 2, ROWS], rows_desc.layout)
    number_s = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = barriers(Q_STAGES, GROUPS * OF_GROUP)  # with -lse and -delta
    dout_full, dout_empty = barriers(DOUT_STAGES, GROUPS * OF_GROUP)
    kv_full, kv_empty = barriers(GROUPS, OF_GROUP)
    tiles_s, rests_s = (q_s, dout_s, k_s, v_s, rows_s, number_s), (q_rest_s, dout_rest_s, k_rest_s, v_rest_s)
    bars = (q_full, q_empty, dout_full, dout_empty, kv_full, kv_empty)
    lists, lengths = (start_ptr, work_ptr, entry_ptr), (lengths_ptr, lengths_stride)
    descriptors = (
        q_desc, dout_desc, k_desc, v_desc, rows_desc, q_rest_desc, dout_rest_desc, k_rest_desc, v_rest_desc
    )  # fmt: skip
    loads = (descriptors, tiles_s, rests_s, bars, lists, (heads, kv_heads, row_tiles))
    sizes = (qk_scale, scale, kv_heads, k_len)
    written = (dk_ptr, dk_strides, dv_ptr, dv_strides)
    reads = (tiles_s, rests_s, bars, lists, words_ptr, lengths, parts_ptr, sizes, written)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (consumer, (reads, 0, GROUPS, PADDED_D, PADDED_DV, DIM, V_DIM, EARLY, HAS_LENGTHS, HAS_PARTS)),
                (loader, (loads, GROUPS)),
            ],
            [1],
            [LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (reads, 0, GROUPS, PADDED_D, PADDED_DV, DIM, V_DIM, EARLY, HAS_LENGTHS, HAS_PARTS)),
                (consumer, (reads, 1, GROUPS, PADDED_D, PADDED_DV, DIM, V_DIM, EARLY, HAS_LENGTHS, HAS_PARTS)),
                (loader, (loads, GROUPS)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
