"""The backward kernel for Hopper (sm_90): one pass over the keys, five products a step, dq added in a fixed order.

An item is a tile of KEYS keys of one KV head, with the tiles of queries that see it, of every query head of the group.
A step takes ROWS queries. Two warpgroups together hold dk and dv of the keys in registers and compute

    S = K Q^T - lse,  P = exp(S),  dV += P dO,  dP = V dO^T - delta,  dS = P * dP,  dQ = dS^T K,  dK += dS Q

with keys as rows of S. The accumulators of S and dP start as -lse and -delta, so these take no registers of their own.
Head dims between 64 and 128 have tiles of 128 channels. The products but for dQ leave out channels that hold zeros
(`plus_products`), and so do the additions of dq.

Two warps send dq; each takes every second step of the plan and has its own buffer. While one waits until its addition
is visible, the other sends.

Many programs add to one tile of queries, in a fixed order, so that the same call gives the same bits. A chain is an
accumulator in global memory; every addition has a rank in a chain, and waits until the chain's counter has reached it.
The first addition is a store, so nothing has to be zeroed. A tile with many additions has several chains;
`finish_kernel` sums them in order and rounds once.

Score modifications and their gradients are device functions (`changes/hopper.py`). A gradient that is dS itself is
stored row by row from the shared memory that holds dS for dQ; each live tile of a batch element and head belongs to one
program.

In the plan, an item far too long for one program is cut into parts (`cuts.py`), which write dk and dv in fp32 to a
workspace; `device_functions/combine.py` sums them in the order of the list.

Why the kernel cannot deadlock: `backward_plan.py` gives every entry (a tile of queries of some item) a time, which
increases along the list of a program, and ranks the entries of a chain by (time, number of the program). In this total
order each entry waits only for earlier ones:

- A sender waits for the entry of the previous rank in the chain, which is earlier in that order.
- A sender, the warpgroups and the loader wait for buffers that depend on earlier entries of the same program alone.

So the earliest of all entries not yet added never waits, provided that its program runs. All programs must therefore be
resident at once, one per SM: the launch is cooperative.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseflash.backends.triton.changes.hopper_backward_steps import arguments_of_changes, buffers_of_changes
from sparseflash.backends.triton.changes.kind import WHOLE_NUMBERS
from sparseflash.backends.triton.hopper.backward_consumer import consumer
from sparseflash.backends.triton.hopper.backward_items import KEYS, SENDERS
from sparseflash.backends.triton.hopper.backward_loader import loader
from sparseflash.backends.triton.hopper.backward_sender import sender
from sparseflash.backends.triton.hopper.gluon_api import reinterpret
from sparseflash.backends.triton.hopper.record import barriers
from sparseflash.backends.triton.hopper.rows import WIDTH

THREADS = gl.constexpr(256)  # of the warpgroups; each arrives by itself when it has read a stage


# Sizes are not specialised: another length or number of heads causes no recompilation.
@gluon.jit(
    do_not_specialize=[
        "lengths_stride", "qk_scale", "scale", "heads", "kv_heads", "row_tiles", "q_len", "offset", *WHOLE_NUMBERS,
    ],
    do_not_specialize_on_alignment=["lengths_ptr"],  # one number is loaded at a time
)  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc,  # [B, Hq, Nq, .], [B, Hkv, Nk, .], [B, Hkv, Nk, .], [B, Hq, Nq, .] in boxes of
    # [1, 1, ROWS or KEYS, D]: reads past the ends of a tensor give zeros, writes there are dropped
    rows_desc,  # fp32 [B * Hq * tiles * steps * 2, ROWS] in boxes of [2, ROWS]: see rows.py
    # fp32 [chains * TILE_ROWS * (USED + REST) // WIDTH, WIDTH] in boxes of ROWS * REST numbers, or ROWS * USED if REST
    # is 0: see `in_thread_order`
    acc_desc,
    dk_desc, dv_desc,  # as k and v, written
    start_ptr, work_ptr, entry_ptr, words_ptr,  # int32 [programs + 1], [items, ITEM], [entries, ENTRY], bits
    counter_ptr,  # int32 [chains * TILE_ROWS // ROWS], zeros
    parts_ptr,  # fp32 [parts, 2 * KEYS * D], written: dk without `scale` and dv of parts; None without parts
    lengths_ptr, lengths_stride,  # int32 [2, B], of queries and of keys, or None
    qk_scale, scale,  # positive; scores in the units of scores.py times qk_scale are exponents of 2
    heads, kv_heads, row_tiles, q_len, offset,
    # Tensors and numbers of each score modification, see changes/hopper.py; or None. The descriptor of the one that has
    # one, or None.
    changes, change_numbers, change_desc,
    # Memory for gradients. Sums: fp32 [items, heads // kv_heads, ...], zeros, written where an item has entries of a
    # head. Items are in the order of the list if some are parts, else ordered by batch element, KV head and keys. And a
    # descriptor of the gradients of scores, written for live tiles; or None.
    learned, learned_desc,
    n0, n1, n2, n3, n4, n5, n6, n7,
    SHAPE: gl.constexpr, CHANGES: gl.constexpr,  # see configs.py and changes/hopper.py
):  # fmt: skip
    """dk and dv of all items, and the chains of dq, without the factor `scale`."""
    D: gl.constexpr = SHAPE.D
    ROWS: gl.constexpr = SHAPE.ROWS
    Q_STAGES: gl.constexpr = SHAPE.Q_STAGES
    DOUT_STAGES: gl.constexpr = SHAPE.DOUT_STAGES
    REGISTERS: gl.constexpr = SHAPE.REGISTERS
    dtype: gl.constexpr = q_desc.dtype
    HAS_LENGTHS: gl.constexpr = lengths_ptr is not None
    HAS_PARTS: gl.constexpr = parts_ptr is not None
    TILE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    JOINED: gl.constexpr = SHAPE.JOINED
    DS_SHAPE: gl.constexpr = [ROWS, KEYS] if CHANGES.STORES_GRADIENTS else [KEYS, JOINED * ROWS]
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(DS_SHAPE, dtype)
    q_s = gl.allocate_shared_memory(dtype, [Q_STAGES, ROWS, D], TILE_LAYOUT)
    dout_s = gl.allocate_shared_memory(dtype, [DOUT_STAGES, ROWS, D], TILE_LAYOUT)
    k_s = gl.allocate_shared_memory(dtype, [KEYS, D], TILE_LAYOUT)
    v_s = gl.allocate_shared_memory(dtype, [KEYS, D], TILE_LAYOUT)
    ds_s = gl.allocate_shared_memory(dtype, DS_SHAPE, DS_LAYOUT)
    rows_s = gl.allocate_shared_memory(gl.float32, [Q_STAGES, 2, ROWS], rows_desc.layout)
    dq_s = gl.allocate_shared_memory(gl.float32, [SENDERS, ROWS * D // WIDTH, WIDTH], acc_desc.layout)
    # The same memory for the warpgroups, a tile for each turn, and for the senders, in the boxes in which they send dq.
    BOX: gl.constexpr = SHAPE.REST if SHAPE.REST > 0 else SHAPE.USED
    BOXES: gl.constexpr = (SHAPE.USED + SHAPE.REST) // BOX
    dq_of_turn_s = reinterpret(
        dq_s, gl.float32, [SENDERS // JOINED, JOINED * ROWS * D // WIDTH, WIDTH], acc_desc.layout
    )  # fmt: skip
    sent_s = reinterpret(dq_s, gl.float32, [SENDERS * (D // BOX), ROWS * BOX // WIDTH, WIDTH], acc_desc.layout)
    # dv and dk are sent from the buffers of dq; each buffer holds one or two of them.
    out_s = reinterpret(dq_s, dtype, [SENDERS * (ROWS // 64), KEYS, D], TILE_LAYOUT)
    number_s = gl.allocate_shared_memory(gl.int32, [Q_STAGES * CHANGES.SENT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = barriers(Q_STAGES, THREADS)
    dout_full, dout_empty = barriers(DOUT_STAGES, THREADS)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    full, empty = barriers(SENDERS, 1)
    tiles_s = (q_s, dout_s, k_s, v_s, rows_s, number_s)
    changes = arguments_of_changes(
        CHANGES, changes, change_numbers, (n0, n1, n2, n3, n4, n5, n6, n7), change_desc, learned, learned_desc
    )
    changes_s = buffers_of_changes(CHANGES, changes, ROWS, KEYS)
    bars = (q_full, q_empty, dout_full, dout_empty, kv_full)
    lists = (start_ptr, work_ptr, entry_ptr)
    lengths = (lengths_ptr, lengths_stride)
    descriptors = (q_desc, dout_desc, k_desc, v_desc, rows_desc)
    of_tokens = (qk_scale, q_len, offset)
    loads = (descriptors, tiles_s, bars, lists, (heads, kv_heads, row_tiles, of_tokens), changes, changes_s)
    sends = (acc_desc, sent_s, out_s, full, empty, counter_ptr, lists, kv_heads)
    sizes = (scale, kv_heads, heads // kv_heads, of_tokens)
    reads = (
        tiles_s, bars, lists, words_ptr, lengths, parts_ptr, ds_s, dq_of_turn_s, out_s, full, empty, sizes, changes,
        changes_s,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                consumer,
                (
                    reads, ROWS, JOINED, SHAPE.KEPT, Q_STAGES, DOUT_STAGES, D, SHAPE.USED, SHAPE.REST, SHAPE.V_USED,
                    SHAPE.V_REST, HAS_LENGTHS, HAS_PARTS, CHANGES,
                ),
            ),
            (loader, (loads, ROWS, Q_STAGES, DOUT_STAGES, CHANGES)),
            (sender, (sends, dv_desc, 0, ROWS, BOXES, HAS_PARTS)),
            (sender, (sends, dk_desc, 1, ROWS, BOXES, HAS_PARTS)),
        ],
        [1, 1, 1],
        [REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip
