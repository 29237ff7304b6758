"""The forward kernel for Hopper (sm_90): a persistent kernel, one program per SM, that runs its items as one stream.

An item is a tile of queries with the list of its tiles of keys, full ones first. One warp loads; each of GROUPS
warpgroups holds ROWS queries of the item. A step of the stream multiplies the queries with the keys of one tile and,
under the softmax of these scores, the weights of the previous tile with its values. So the first keys of an item are
multiplied under the last values of the previous one, and the tensor cores do not idle between items.

The stream runs for two steps after the last item. They load nothing, and so no step needs a condition.

For a mask in blocks of 64 x 64 an item is a tile of 64 queries, and a program runs two streams, each with one loading
warp and one warpgroup: neighbouring rows see different keys, so two warpgroups would share nothing.

Head dims that are not a power of 2 are split into two pieces that are, each with its own buffers and descriptors; the
second has 16 to 64 channels. Both pieces of a product with keys accumulate onto the same scores; each piece of values
has its own accumulator. The copy engine pads with zeros. Where wide heads leave no room for 128 keys, a tile of the
lists is SPLIT steps of BLOCK_N keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseflash.backends.triton.changes.hopper_steps import arguments_of_changes, buffers_of_changes
from sparseflash.backends.triton.changes.kind import WHOLE_NUMBERS
from sparseflash.backends.triton.hopper.forward_loader import loader
from sparseflash.backends.triton.hopper.forward_steps import consumer
from sparseflash.backends.triton.hopper.record import RECORD, RECORDS, barriers
from sparseflash.backends.triton.hopper.tiles import ROWS, tiles_of


@gluon.jit
def buffers(
    dtype: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, OUT: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, Q_BUFFERS: gl.constexpr,
):  # fmt: skip
    """The shared memory of a stream: queries, keys and values; outputs; records; and their barriers."""
    q_s = tiles_of(dtype, Q_BUFFERS * GROUPS, ROWS, D)
    o_s = tiles_of(dtype, GROUPS, ROWS, OUT)
    k_s = tiles_of(dtype, STAGES, BLOCK_N, D)
    v_s = tiles_of(dtype, STAGES, BLOCK_N, DV)
    record_s = gl.allocate_shared_memory(gl.int32, [RECORDS, RECORD], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = barriers(Q_BUFFERS * GROUPS, 1 if Q_BUFFERS == 2 else 128, 2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for c in gl.static_range(STAGES):
        mbarrier.init(k_full.index(c), count=1)
        mbarrier.init(v_full.index(c), count=1)
        mbarrier.init(kv_empty.index(c), count=GROUPS * 128)
    return (q_s, k_s, v_s), o_s, record_s, (q_full, q_empty, k_full, v_full, kv_empty)


# Sizes are not specialised: another length or number of heads causes no recompilation.
@gluon.jit(
    do_not_specialize=[
        "lengths_stride", "qk_scale", "items", "heads", "group", "q_len", "k_len", "row_tiles", *WHOLE_NUMBERS,
    ],
    do_not_specialize_on_alignment=["lengths_ptr"],
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc,  # [B, Hq, Nq, .], [B, Hkv, Nk, .], [B, Hkv, Nk, .], [B, Hq, Nq, .] in boxes of
    # [1, 1, ROWS or BLOCK_N, D, DV or OUT]: reads past the ends of a tensor give zeros, writes there are dropped.
    # The same tensors in boxes of D_REST and DV_REST channels, or None.
    q_rest_desc, k_rest_desc, v_rest_desc, o_rest_desc,
    lse_ptr,  # fp32 [B, Hq, Nq] contiguous
    # fp32 [parts, GROUPS * ROWS * (PADDED_DV + 2)], written: acc, m_i, l_i of chunks; None without chunks
    parts_ptr,
    work_ptr,  # int32 [items, ITEM]: see plan.py
    index_ptr, tile_ptr, words_ptr,  # the tile lists, one more entry than needed, and the bits: see worklists.py
    lengths_ptr, lengths_stride,  # int32 [2, B], of queries and of keys, or None
    counter_ptr,  # int32 [1], zero before and after the launch
    qk_scale,  # positive; scores in the units of scores.py times qk_scale are exponents of 2
    items, heads, group, q_len, k_len, row_tiles,
    # Tensors and numbers of each score modification, see changes/hopper.py; or None. The descriptor of the one that has
    # one, or None: Triton 3.6 starts no kernel with a descriptor in a tuple.
    changes, change_numbers, change_desc,
    n0, n1, n2, n3, n4, n5, n6, n7,  # WHOLE_NUMBERS: integers of all score modifications, concatenated
    SHAPE: gl.constexpr, CHANGES: gl.constexpr,  # see configs.py and changes/hopper.py
):  # fmt: skip
    """out and lse of all items."""
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    D: gl.constexpr = SHAPE.D
    D_REST: gl.constexpr = SHAPE.D_REST
    DV: gl.constexpr = SHAPE.DV
    DV_REST: gl.constexpr = SHAPE.DV_REST
    OUT: gl.constexpr = SHAPE.OUT
    GROUPS: gl.constexpr = SHAPE.GROUPS
    STREAMS: gl.constexpr = SHAPE.STREAMS
    STAGES: gl.constexpr = SHAPE.STAGES
    Q_BUFFERS: gl.constexpr = SHAPE.Q_BUFFERS
    REGISTERS: gl.constexpr = SHAPE.REGISTERS
    LOADER_REGISTERS: gl.constexpr = SHAPE.LOADER_REGISTERS
    gl.static_assert(GROUPS * STREAMS == 2, "two warpgroups")
    dtype: gl.constexpr = q_desc.dtype
    HAS_LENGTHS: gl.constexpr = lengths_ptr is not None
    HAS_PARTS: gl.constexpr = parts_ptr is not None
    lengths = (lengths_ptr, lengths_stride)
    sizes = (items, heads, group, q_len, k_len, row_tiles)
    lists = (index_ptr, tile_ptr)
    changes = arguments_of_changes(CHANGES, changes, change_numbers, (n0, n1, n2, n3, n4, n5, n6, n7), change_desc)
    stream, streams = gl.program_id(0) * STREAMS, gl.num_programs(0) * STREAMS
    descriptors = (q_desc, k_desc, v_desc, q_rest_desc, k_rest_desc, v_rest_desc)
    loads = (descriptors, work_ptr, lists, lengths, counter_ptr, sizes, streams, changes)
    reads = (lists, words_ptr, (o_desc, o_rest_desc), lse_ptr, parts_ptr, qk_scale, q_len, k_len - q_len, changes)
    # In a tuple Gluon allows None only as an argument of the kernel, so the argument stands for the missing buffers.
    q_rest_s, k_rest_s, v_rest_s, o_rest_s = q_rest_desc, k_rest_desc, v_rest_desc, o_rest_desc
    if D_REST > 0:
        q_rest_s, k_rest_s = tiles_of(dtype, Q_BUFFERS * GROUPS, ROWS, D_REST), tiles_of(dtype, STAGES, BLOCK_N, D_REST)
    if DV_REST > 0:
        v_rest_s, o_rest_s = tiles_of(dtype, STAGES, BLOCK_N, DV_REST), tiles_of(dtype, GROUPS, ROWS, DV_REST)
    rests_s = (q_rest_s, k_rest_s, v_rest_s, o_rest_s)
    changes_s = buffers_of_changes(CHANGES, changes, BLOCK_N, STAGES, GROUPS)
    own = (buffers(dtype, BLOCK_N, D, DV, OUT, GROUPS, STAGES, Q_BUFFERS), rests_s, changes_s)
    if STREAMS == 1:
        gl.warp_specialize(
            [
                (consumer, (own, reads, 0, SHAPE, HAS_LENGTHS, HAS_PARTS, CHANGES)),
                (consumer, (own, reads, 1, SHAPE, HAS_LENGTHS, HAS_PARTS, CHANGES)),
                (loader, (own, loads, stream, SHAPE, HAS_LENGTHS, CHANGES)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    else:
        if D_REST > 0:
            q_rest_s = tiles_of(dtype, Q_BUFFERS * GROUPS, ROWS, D_REST)
            k_rest_s = tiles_of(dtype, STAGES, BLOCK_N, D_REST)
        if DV_REST > 0:
            v_rest_s, o_rest_s = tiles_of(dtype, STAGES, BLOCK_N, DV_REST), tiles_of(dtype, GROUPS, ROWS, DV_REST)
        rests_s = (q_rest_s, k_rest_s, v_rest_s, o_rest_s)
        changes_s = buffers_of_changes(CHANGES, changes, BLOCK_N, STAGES, GROUPS)
        other = (buffers(dtype, BLOCK_N, D, DV, OUT, GROUPS, STAGES, Q_BUFFERS), rests_s, changes_s)
        gl.warp_specialize(
            [
                (consumer, (own, reads, 0, SHAPE, HAS_LENGTHS, HAS_PARTS, CHANGES)),
                (consumer, (other, reads, 0, SHAPE, HAS_LENGTHS, HAS_PARTS, CHANGES)),
                (loader, (own, loads, stream, SHAPE, HAS_LENGTHS, CHANGES)),
                (loader, (other, loads, stream + 1, SHAPE, HAS_LENGTHS, CHANGES)),
            ],
            [4, 1, 1],
            [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
        )
