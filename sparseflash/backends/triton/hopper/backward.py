"""The backward kernel for Hopper (sm_90): one pass over the keys, five products a step, dq added in a fixed order.

An item is a tile of KEYS keys of one KV head, with the tiles of queries that see it, of every query head of the group.
A step takes ROWS queries. Two warpgroups together hold dk and dv of the keys in registers and compute

    S = K Q^T - lse,  P = exp(S),  dV += P dO,  dP = V dO^T - delta,  dS = P * dP,  dQ = dS^T K,  dK += dS Q

with keys as rows of S. The accumulators of S and dP start as -lse and -delta, so these take no registers of their own.
One warp loads. Two warps send dq; each takes every second step of the plan and has its own buffer. While one waits
until its addition is visible, the other sends.

Many programs add to one tile of queries. The additions have a fixed order, so that the same call gives the same bits. A
chain is an accumulator in global memory; every addition has a rank in a chain, and waits until the chain's counter has
reached this rank. The first addition of a chain is a store, so nothing has to be zeroed. A tile with many additions has
several chains; `finish_kernel` sums them in order and rounds once.

The gradient of a bias of pairs is dS. It is stored row by row from the shared memory buffer that holds dS for dQ. Each
live tile of a batch element and head belongs to one program, which writes it once.

In the plan, an item that is far too long for one program is cut into parts (`cuts.py`). Each part writes its dk and dv
in fp32 to a workspace; `device_functions/combine.py` sums them in the order of the list and rounds once.

Why the kernel cannot deadlock: `backward_plan.py` gives every entry (a tile of queries of some item) a time, which
increases strictly along the list of a program, and ranks the entries of a chain by (time, number of the program). This
is a total order of all entries, and each entry waits only for earlier ones:

- A sender waits for the entry of the previous rank in the chain, which is earlier in that order.
- A sender, the warpgroups and the loader wait for buffers. A buffer becomes free when the same program has finished an
  earlier entry, and full when the program has loaded or computed this one, which depends on no other program.

So the earliest of all entries not yet added never waits, provided that its program runs. All programs must therefore be
resident at the same time, one per SM. The launch is cooperative: the driver refuses it otherwise.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from sparseflash.backends.triton.hopper.backward_plan import (
    ENTRY,
    ENTRY_CHAIN,
    ENTRY_RANK,
    ENTRY_ROW,
    ENTRY_TILE,
    ITEM,
    ITEM_COUNT,
    ITEM_FIRST_ENTRY,
    ITEM_FIRST_KEY,
    ITEM_NUMBER,
    ITEM_PART,
)
from sparseflash.backends.triton.hopper.change_flags import CAPPED, LOGARITHMIC
from sparseflash.backends.triton.hopper.configs import BLOCK
from sparseflash.backends.triton.hopper.gluon_api import (
    accumulator,
    async_add,
    async_load,
    async_store,
    local_mma_wait,
    reinterpret,
)
from sparseflash.backends.triton.hopper.rows import TILE_ROWS, WIDTH
from sparseflash.backends.triton.hopper.scores import (
    add_by_distance,
    add_to_bucket,
    as_float,
    distances,
    entries_of_head,
    entries_of_scores,
    from_first_column,
    hyperbolic_tangent,
    number_of,
    outer_runs,
    pair_buffers,
    place_of_pairs,
    plus_of_threads,
    shared_entry,
    side_of_columns,
    slope_of,
    sums_of_threads,
    sums_of_two_rows,
    to_first_column,
)

KEYS = gl.constexpr(BLOCK[1])  # of an item; its tiles have TILE_ROWS queries, in TILE_ROWS // ROWS steps
SENDERS = gl.constexpr(2)
WORDS = gl.constexpr(BLOCK[0] // 32)  # of bits of a key of a tile
# Numbers a step that the loader passes to the warpgroups. The first is the number of the tile's bits. The others:
# - With a decay: by how many tokens the first key comes after the first query; the side of the queries; the slope as
#   seen from that side, as bits. With a decay or a bias of keys, last: the number of the head in its group.
# - With a table: by how many tokens, or the bucket if all scores share one entry; whether they do; this entry, as bits,
#   or 0; the head, plus its number in the group times MOST_HEADS.
# - With a bias of pairs: the first row of the tile in its tensor; the head.
# - With a bias of keys, in a buffer of its own: the number of the tile among all biases.
TOLD = gl.constexpr(5)
MOST_HEADS = gl.constexpr(1 << 16)
# A dead score under a cap. Its square is finite, and its weight is 0 where lse is above -1e7, for every cap
# (`changed._CAPS`); `attention` promises no gradients from a million on.
DEAD = gl.constexpr(-1e19)
THREADS = gl.constexpr(256)  # of the warpgroups; each arrives by itself when it has read a stage


@gluon.jit
def items_of_program(start_ptr):
    """The numbers of this program's first item and of the next program's."""
    return gl.load(start_ptr + gl.program_id(0)), gl.load(start_ptr + gl.program_id(0) + 1)


@gluon.jit
def header(work_ptr, item):
    """Number of batch element and KV head, first key, first entry, and number of entries of an item."""
    item_ptr = work_ptr + item * ITEM
    number, first_k = gl.load(item_ptr + ITEM_NUMBER), gl.load(item_ptr + ITEM_FIRST_KEY)
    first, count = gl.load(item_ptr + ITEM_FIRST_ENTRY), gl.load(item_ptr + ITEM_COUNT)
    return number, first_k, first, count


@gluon.jit
def part_of(work_ptr, item, HAS_PARTS: gl.constexpr):
    """An item's number among all parts, from 1; 0 if it is not a part."""
    part = 0
    if HAS_PARTS:
        part = gl.load(work_ptr + item * ITEM + ITEM_PART)
    return part


# ---------------------------------------------------------------------- the loading warp


@gluon.jit
def told(number_s, stage, WHICH: gl.constexpr, number, OF: gl.constexpr = TOLD):
    """Passes a number of a step to the warpgroups by shared memory, so that they need not wait for global memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    number_s.index(stage * OF + WHICH).store(gl.full([1], number, gl.int32, layout=layout))


@gluon.jit
def loader(
    loads, ROWS: gl.constexpr, Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr, CHANGES: gl.constexpr,
):  # fmt: skip
    """Loads queries, with their -lse and -delta, and dout for every step; keys and values once an item."""
    descriptors, tiles_s, bars, lists, sizes, decay, table, bias, pairs = loads
    q_desc, dout_desc, k_desc, v_desc, rows_desc = descriptors
    q_s, dout_s, k_s, v_s, rows_s, number_s = tiles_s
    q_full, q_empty, dout_full, dout_empty, kv_full = bars
    start_ptr, work_ptr, entry_ptr = lists
    heads, kv_heads, row_tiles = sizes
    qk_scale, inverse_unit, slopes_ptr, offset = decay
    biases_ptr, bias_of_batch, bias_of_head, bias_s = bias
    entries_ptr, until_ptr, buckets_ptr, q_len = table
    pairs_desc, pairs_s, _, stored, _ = pairs
    if pairs_desc is not None:
        pair_s, pair_full, pair_empty = pairs_s
    runs = outer_runs(until_ptr, q_len, offset)
    STEPS: gl.constexpr = TILE_ROWS // ROWS
    step = 0
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
            stage = step % Q_STAGES
            mbarrier.wait(q_empty.index(stage), ((step // Q_STAGES) & 1) ^ 1)
            told(number_s, stage, 0, tile)
            member = head - kv_head * (heads // kv_heads)
            if slopes_ptr is not None or biases_ptr is not None:
                told(number_s, stage, 4, member)
            if slopes_ptr is not None:
                slope = slope_of(slopes_ptr, head, inverse_unit)
                ahead = first_k - (first_q + offset)
                side = side_of_columns(ahead, slope, qk_scale, KEYS, ROWS, LOGARITHMIC & CHANGES)
                told(number_s, stage, 1, ahead)
                told(number_s, stage, 2, side)
                slope = gl.where(side == 0, slope, side * slope)
                told(number_s, stage, 3, gl.cast(slope, gl.int32, bitcast=True))
            if biases_ptr is not None:
                bias_row = batch * bias_of_batch + head * bias_of_head
                told(bias_s, stage, 0, bias_row * gl.cdiv(q_len + offset, KEYS) + first_k // KEYS, OF=1)
            if entries_ptr is not None:
                ahead = first_k - (first_q + offset)
                here_ptr = entries_of_head(entries_ptr, head, q_len, offset)
                at, entry, is_shared = shared_entry(runs, here_ptr, 1 - KEYS - ahead, ROWS - 1 - ahead)
                if buckets_ptr is not None:
                    ahead = gl.where(is_shared, gl.load(buckets_ptr + (at + q_len - 1)), ahead)
                told(number_s, stage, 1, ahead)
                told(number_s, stage, 2, gl.where(is_shared, 1, 0))
                told(number_s, stage, 3, gl.cast(entry, gl.int32, bitcast=True))
                told(number_s, stage, 4, head + member * MOST_HEADS)
            if pairs_desc is not None:
                place = place_of_pairs(stored, batch, head, first_q, first_k, TILE_ROWS, KEYS)
                told(number_s, stage, 1, place[2])
                told(number_s, stage, 2, place[1])
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + rows_desc.block_type.nbytes)
            async_load(q_desc, [batch, head, first_q, 0], q_full.index(stage), q_s.index(stage))
            async_load(rows_desc, [(row * STEPS + piece) * 2, 0], q_full.index(stage), rows_s.index(stage))
            stage = step % DOUT_STAGES
            mbarrier.wait(dout_empty.index(stage), ((step // DOUT_STAGES) & 1) ^ 1)
            mbarrier.expect(dout_full.index(stage), dout_desc.block_type.nbytes)
            async_load(dout_desc, [batch, head, first_q, 0], dout_full.index(stage), dout_s.index(stage))
            if pairs_desc is not None:
                mbarrier.wait(pair_empty.index(0), (step & 1) ^ 1)
                mbarrier.expect(pair_full.index(0), pairs_desc.block_type.nbytes)
                async_load(pairs_desc, [place[0], place[1], place[2], place[3]], pair_full.index(0), pair_s.index(0))
            if i == 0:
                # The previous item's keys and values have been read once dout of its last step has been read.
                before = step + DOUT_STAGES - 1
                mbarrier.wait(dout_empty.index(before % DOUT_STAGES), ((before // DOUT_STAGES) & 1) ^ 1)
                mbarrier.expect(kv_full.index(0), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
                async_load(k_desc, [batch, kv_head, first_k, 0], kv_full.index(0), k_s)
                async_load(v_desc, [batch, kv_head, first_k, 0], kv_full.index(0), v_s)
            step += 1


# ---------------------------------------------------------------------- the two sending warps


@gluon.jit
def wait_for_turn(counter_ptr, rank):
    """Spins until `rank` additions to the chain are complete and visible.

    The counter is read without acquire semantics, because this warp reads nothing that the additions wrote. The next
    operation is the next addition: a reduction that the copy engine performs in the L2 cache. It is issued only after
    the counter was read, and the earlier additions were complete in L2 before the counter was raised
    (`sent_is_visible`). PTX's memory model would ask for an acquire and a proxy fence here. They cost 1.7 % of the
    backward under a sparse mask (H200); without them the bits were the same in all stored repeats.
    """
    made = gl.load(counter_ptr, volatile=True)
    while made < rank:
        made = gl.load(counter_ptr, volatile=True)


@gluon.jit
def sent_is_visible():
    """Waits until everything that this warp has sent is visible to any reader of a counter that it raises afterwards.

    `tma.store_wait` is not enough: it returns when the source has been read.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r",
        [gl.zeros([32], gl.int32, layout=LANES)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def sender(sends, out_desc, WHICH: gl.constexpr, ROWS: gl.constexpr, HAS_PARTS: gl.constexpr):
    """Sends dq of every second step of the plan, in the order of its chain; and dv (WHICH 0) or dk (WHICH 1) of every
    item that is not a part.
    """
    acc_desc, dq_s, out_s, full, empty, counter_ptr, lists, kv_heads = sends
    start_ptr, work_ptr, entry_ptr = lists
    STEPS: gl.constexpr = TILE_ROWS // ROWS
    sent = 0
    begin, end = items_of_program(start_ptr)
    for item in range(begin, end):
        number, first_k, first, count = header(work_ptr, item)
        # The sender of a step follows from the entry's number, not from a counter of steps: Triton 3.6 and 3.7 lose a
        # counter that is carried from item to item if it is used only for the start of this loop.
        for i in range((first * STEPS + WHICH) & 1, count * STEPS, SENDERS):
            at = entry_ptr + (first + i // STEPS) * ENTRY
            place = gl.load(at + ENTRY_CHAIN) * STEPS + i % STEPS
            rank = gl.load(at + ENTRY_RANK)
            wait_for_turn(counter_ptr + place, rank)
            mbarrier.wait(full.index(WHICH), sent & 1)
            first_row = place * dq_s.shape[1]
            if rank == 0:
                async_store(acc_desc, [first_row, 0], dq_s.index(WHICH))
            else:
                async_add(acc_desc, [first_row, 0], dq_s.index(WHICH))
            tma.store_wait(0)
            mbarrier.arrive(empty.index(WHICH), count=1)
            sent_is_visible()
            gl.atomic_add(counter_ptr + place, 1, sem="relaxed", scope="gpu")
            sent += 1
        if part_of(work_ptr, item, HAS_PARTS) == 0:
            mbarrier.wait(full.index(WHICH), sent & 1)
            target = out_s.index(WHICH * (ROWS // 64))
            async_store(out_desc, [number // kv_heads, number % kv_heads, first_k, 0], target)
            tma.store_wait(0)
            mbarrier.arrive(empty.index(WHICH), count=1)
            sent += 1


# ---------------------------------------------------------------------- the warpgroups


@gluon.jit
def in_registers(x):
    """Copies a broadcast value into registers before the products that accumulate onto it are issued. Otherwise ptxas
    would wait for these products before it makes the copies (warning C7517).
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def read_later(x):
    """x, of 16 bits a number, behind a scheduling barrier. Without it the compiler converts x to fp32 at once, and
    registers spill.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def in_thread_order(dq, ROWS: gl.constexpr, D: gl.constexpr):
    """dq [ROWS, D] in its order in shared memory and in chains: each thread's numbers in groups of four, the groups of
    a warp's threads one after another. `rows.in_rows` undoes it.

    A matrix instruction leaves a thread a pair of numbers in every eighth column. Stored by rows, pairs of several rows
    would share banks of shared memory. Dimensions of the first shape: of rows, warp, half, lane; of columns, warpgroup
    (if ROWS is 64), eight, lane, number in the pair.
    """
    if ROWS == 64:
        dq = dq.reshape([4, 2, 8, 2, D // 16, 4, 2]).permute((4, 3, 0, 2, 5, 1, 6))
    else:
        dq = dq.reshape([8, 2, 8, D // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return dq.reshape([ROWS * D // WIDTH, WIDTH])


@gluon.jit
def hand_over(x, which, target_s, full, empty, parities):
    """Waits for a sender's buffer and gives it a tile. Bit `which` of `parities`: whether this sender has received an
    odd number of tiles before.
    """
    mbarrier.wait(empty.index(which), ((parities >> which) & 1) ^ 1)
    target_s.store(x)
    fence_async_shared()
    mbarrier.arrive(full.index(which), count=1)


@gluon.jit
def masked(
    x, words_ptr, tile, first_row, k_left, dead,
    ROWS: gl.constexpr, HAS_LENGTHS: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """x [KEYS, ROWS] where the tile's bits are set, else `dead`; tile 0 is full. If HAS_LENGTHS, only the first
    `k_left` keys are live. first_row: the query of the tile at which x begins.
    """
    OF_WORDS: gl.constexpr = gl.SliceLayout(2, BITS)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, OF_WORDS))
    word = first_row // 32 + gl.arange(0, ROWS // 32, layout=gl.SliceLayout(0, OF_WORDS))
    tile_ptr = words_ptr + gl.cast(tile - 1, gl.int64) * (KEYS * WORDS)
    at = key[:, None] * WORDS + word[None, :]
    words = gl.load(tile_ptr + at, mask=(at >= 0) & (tile > 0), other=-1)
    if HAS_LENGTHS:
        words = gl.where((key < k_left)[:, None], words, 0)
    shift = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(0, BITS)))
    bits = (words.expand_dims(2) >> shift.expand_dims(0).expand_dims(0)) & 1
    bits = gl.convert_layout(bits.reshape([KEYS, ROWS]), x.type.layout, assert_trivial=True)
    return gl.where(bits != 0, x, dead)


@gluon.jit
def heard(number_s, stage, WHICH: gl.constexpr, OF: gl.constexpr = TOLD):
    """The number that `told` has stored."""
    return gl.max(number_s.index(stage * OF + WHICH).load(gl.BlockedLayout([1], [32], [8], [0])), 0)


@gluon.jit
def sums_with_distances(ds, side, first, ROWS: gl.constexpr, CHANGES: gl.constexpr):
    """The gradient of a slope from the scores of a step, [KEYS, 4], a sum for each thread: dS times the distances."""
    S: gl.constexpr = ds.type.layout
    if side == 0:
        gained = 0.0 - sums_of_threads(ds * distances(first, ROWS, LOGARITHMIC & CHANGES, S))
    else:
        gained = (sums_of_threads(ds * from_first_column(ROWS, S)) + sums_of_threads(ds) * first) * side
    return gained


@gluon.jit
def place_of_sums(item, number, first_k, tiles, HAS_PARTS: gl.constexpr):
    """Where the gradient sums of an item are stored: in the order of keys, with `tiles` items a head; or in the order
    of the list if some items are parts.
    """
    return item if HAS_PARTS else number * tiles + first_k // KEYS


@gluon.jit
def store_sums(slope_sums, dslopes_ptr, key_sums, dkey_ptr, place):
    """Writes an item's part of the gradients of a head's slope and biases of keys: [KEYS, 4], summed over threads, to
    `dslopes[place]` and `dkey[place]`. Either pointer may be None.
    """
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, slope_sums.type.layout))
    target = gl.cast(place, gl.int64) * KEYS + key
    if dslopes_ptr is not None:
        gl.store(dslopes_ptr + target, gl.sum(slope_sums, 1))
    if dkey_ptr is not None:
        gl.store(dkey_ptr + target, gl.sum(key_sums, 1))


@gluon.jit
def consumer(
    reads, ROWS: gl.constexpr, Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr, D: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_PARTS: gl.constexpr, CHANGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of every item, and dq of every step."""
    tiles_s, bars, lists, words_ptr, lengths, parts_ptr, ds_s, dq_s, out_s, full, empty, sizes, changes = reads
    qk_scale, scale, kv_heads = sizes
    cap_scale, slopes_ptr, dslopes_ptr, group, of_table, of_bias, of_pairs = changes
    pairs_desc, pairs_s, dpairs_desc, stored, inverse_unit = of_pairs
    ARE_STORED: gl.constexpr = stored[2] is not None
    if pairs_desc is not None:
        pair_s, pair_full, pair_empty = pairs_s
    biases_ptr, dkey_ptr, bias_s = of_bias
    entries_ptr, buckets_ptr, dtable_ptr, table_size, q_len, offset = of_table
    q_s, dout_s, k_s, v_s, rows_s, number_s = tiles_s
    q_full, q_empty, dout_full, dout_empty, kv_full = bars
    start_ptr, work_ptr, _ = lists
    dtype: gl.constexpr = q_s.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, ROWS, 16])
    KV: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, D, 16])
    # Each warpgroup computes half the rows of dq or, of 64 rows, half the columns.
    COLUMNS: gl.constexpr = 128 // ROWS
    Q: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8 // COLUMNS, COLUMNS], instr_shape=[16, D // COLUMNS, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=KV, k_width=2)
    # The layout S of [KEYS, ROWS], seen as [KEYS, ROWS // 32, 32]: each thread holds the mask words of its scores.
    BITS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], [0, 1, 0]] + ([[0, 2, 0]] if ROWS == 128 else []),
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0], [64, 0, 0]],
        [],
        [KEYS, ROWS // 32, 32],
    )
    no_dq = gl.zeros([ROWS, D], gl.float32, layout=Q)
    no_scores = gl.zeros([KEYS, ROWS], gl.float32, layout=S)
    no_sums = sums_of_threads(no_scores)
    SUMS: gl.constexpr = no_sums.type.layout
    no_bucket_sums = sums_of_two_rows(no_scores)
    STEPS: gl.constexpr = TILE_ROWS // ROWS
    step = 0
    # Parities, packed into one register: of the tiles given to each sender, and of the items with an entry.
    parities = 0
    begin, end = items_of_program(start_ptr)
    for item in range(begin, end):
        number, first_k, first, count = header(work_ptr, item)
        k_left = KEYS
        if HAS_LENGTHS:
            lengths_ptr, lengths_stride = lengths
            k_left = gl.load(lengths_ptr + (lengths_stride + number // kv_heads)) - first_k
        dk = gl.zeros([KEYS, D], gl.float32, layout=KV)
        dv = gl.zeros([KEYS, D], gl.float32, layout=KV)
        slope_sums, key_sums, member = no_sums, no_sums, 0
        bucket_sums, bucket = no_bucket_sums, -1
        if dslopes_ptr is not None or dkey_ptr is not None or dtable_ptr is not None:
            place = place_of_sums(item, number, first_k, gl.cdiv(q_len + offset, KEYS), HAS_PARTS)
        if count > 0:
            mbarrier.wait(kv_full.index(0), (parities >> SENDERS) & 1)
            parities ^= 1 << SENDERS
        for i in range(count * STEPS):
            q_stage, dout_stage = step % Q_STAGES, step % DOUT_STAGES
            mbarrier.wait(q_full.index(q_stage), (step // Q_STAGES) & 1)
            tile = heard(number_s, q_stage, 0)
            is_partial = (tile != 0) | (k_left < KEYS)
            rows = rows_s.index(q_stage)
            if slopes_ptr is not None:
                ahead, side = heard(number_s, q_stage, 1), heard(number_s, q_stage, 2)
                slope = as_float(heard(number_s, q_stage, 3))
            if biases_ptr is not None:
                bias_ptr = biases_ptr + gl.cast(heard(bias_s, q_stage, 0, OF=1), gl.int64) * KEYS
                bias = gl.load(bias_ptr + number_of(KEYS, gl.SliceLayout(1, S)))
            if dslopes_ptr is not None or dkey_ptr is not None:
                # A head's tiles are consecutive, so its sums are complete when the head changes.
                of_group = heard(number_s, q_stage, 4)
                if of_group != member:
                    store_sums(slope_sums, dslopes_ptr, key_sums, dkey_ptr, place * group + member)
                    slope_sums, key_sums = no_sums, no_sums
                member = of_group
            if entries_ptr is not None:
                ahead, is_shared = heard(number_s, q_stage, 1), heard(number_s, q_stage, 2) != 0
                entry = as_float(heard(number_s, q_stage, 3))
            s = no_scores
            if not CAPPED & CHANGES:
                s = in_registers(rows.slice(0, 1, dim=0).load(S).broadcast_to(KEYS, ROWS))
            dp = in_registers(rows.slice(1, 1, dim=0).load(S).broadcast_to(KEYS, ROWS))
            s = warpgroup_mma(k_s, q_s.index(q_stage).permute((1, 0)), s, use_acc=not CAPPED & CHANGES, is_async=True)
            mbarrier.wait(dout_full.index(dout_stage), (step // DOUT_STAGES) & 1)
            dp = warpgroup_mma(v_s, dout_s.index(dout_stage).permute((1, 0)), dp, is_async=True)
            s = local_mma_wait(s, 1)
            if pairs_desc is not None:
                mbarrier.wait(pair_full.index(0), step & 1)
                pairs = pair_s.index(0).permute((1, 0)).load(S)
                async_copy.mbarrier_arrive(pair_empty.index(0), increment_count=False)
                s = s + pairs.to(gl.float32) * inverse_unit
                if HAS_LENGTHS:  # a bias may be NaN beyond the lengths
                    is_dead = rows.slice(0, 1, dim=0).load(S).broadcast_to(KEYS, ROWS) == float("-inf")
                    s = gl.where(is_dead, float("-inf"), s)
            dead = float("-inf")
            if CAPPED & CHANGES:
                s = hyperbolic_tangent(s * cap_scale)
                dead = DEAD
            if entries_ptr is not None and not is_shared:
                head = heard(number_s, q_stage, 4) % MOST_HEADS
                here_ptr = entries_of_head(entries_ptr, head, q_len, offset)
                s = s + entries_of_scores(here_ptr, ahead, -1, s)
            if is_partial:
                if biases_ptr is not None:
                    # Before the mask: the bias of a dead key need not be finite.
                    s = s + bias[:, None]
                    bias = gl.zeros([KEYS], gl.float32, layout=gl.SliceLayout(1, S))
                s = masked(s, words_ptr, tile, i % STEPS * ROWS, k_left, dead, ROWS, HAS_LENGTHS, BITS)
            changed = s
            if CAPPED & CHANGES:
                changed += rows.slice(0, 1, dim=0).load(S).broadcast_to(KEYS, ROWS)
            if entries_ptr is not None:
                p = gl.exp2(changed * qk_scale + entry * qk_scale)
            elif slopes_ptr is None:
                if biases_ptr is None:
                    p = gl.exp2(changed * qk_scale)
                else:
                    p = gl.exp2(changed * qk_scale + (bias * qk_scale)[:, None])
            else:
                first_column = to_first_column(ahead, KEYS, SUMS)
                if side == 0:
                    changed -= distances(first_column, ROWS, LOGARITHMIC & CHANGES, S) * slope
                lean = gl.where(side == 0, 0.0, slope)  # a slope that is not finite would undo the mask
                changed += from_first_column(ROWS, S) * lean
                added = first_column * (lean * qk_scale)
                if biases_ptr is not None:
                    added += gl.convert_layout(bias * qk_scale, gl.SliceLayout(1, SUMS), assert_trivial=True)[:, None]
                p = gl.exp2(plus_of_threads(changed * qk_scale, added))
            weights = gl.convert_layout(p.to(dtype), OPERAND)
            if CAPPED & CHANGES:
                p *= 1.0 - s * s
            dv = warpgroup_mma(weights, dout_s.index(dout_stage), dv, is_async=True)
            dp = local_mma_wait(dp, 1)
            ds = p * dp
            if dslopes_ptr is not None:
                slope_sums += sums_with_distances(ds, side, first_column, ROWS, CHANGES)
            half_ds = ds.to(dtype)
            if dpairs_desc is None:
                ds_s.store(half_ds)
                fence_async_shared()
                ds_by_row = ds_s.permute((1, 0))
            else:
                # Keys are contiguous, as in global memory: one buffer is the operand of dq and the source of the store.
                tma.store_wait(0)
                ds_by_row = ds_s
                ds_by_row.permute((1, 0)).store(half_ds)
                fence_async_shared()
                first_row = heard(number_s, q_stage, 1)
                if ARE_STORED:
                    async_store(dpairs_desc, [0, 0, first_row, 0], ds_by_row)
                else:
                    head = heard(number_s, q_stage, 2)
                    async_store(dpairs_desc, [number // kv_heads, head, first_row, first_k], ds_by_row)
            ds = gl.convert_layout(half_ds, OPERAND)
            dq = warpgroup_mma(ds_by_row, k_s, no_dq, use_acc=False, is_async=True)
            dk = warpgroup_mma(ds, q_s.index(q_stage), dk, is_async=True)
            dq, dv = local_mma_wait(dq, 1), accumulator(dv)
            async_copy.mbarrier_arrive(dout_empty.index(dout_stage), increment_count=False)
            which = (first * STEPS + i) % SENDERS
            dq = in_thread_order(dq, ROWS, D)
            hand_over(dq, which, dq_s.index(which), full, empty, parities)
            parities ^= 1 << which
            # Gradients of tables and biases of keys are summed after dq is handed over: other programs wait for dq, and
            # it has left its registers. They are summed from the 16-bit dS, which the last product still reads; dS in
            # fp32 would have had to stay live until here.
            if dtable_ptr is not None:
                first_bucket = (place * group + heard(number_s, q_stage, 4) // MOST_HEADS) * table_size
                read_ds = read_later(half_ds).to(gl.float32)
                if is_shared:
                    # Most tiles of an item share the previous tile's bucket.
                    if first_bucket + ahead != bucket:
                        add_to_bucket(bucket_sums, dtable_ptr, bucket)
                        bucket, bucket_sums = first_bucket + ahead, no_bucket_sums
                    bucket_sums += sums_of_two_rows(read_ds)
                else:
                    add_by_distance(read_ds, dtable_ptr, first_bucket, buckets_ptr, ahead, q_len, offset)
            if dkey_ptr is not None:
                key_sums += sums_of_threads(read_later(half_ds).to(gl.float32))
            dk = local_mma_wait(dk, 0)
            async_copy.mbarrier_arrive(q_empty.index(q_stage), increment_count=False)
            step += 1
        if dslopes_ptr is not None or dkey_ptr is not None:
            store_sums(slope_sums, dslopes_ptr, key_sums, dkey_ptr, place * group + member)
        if dtable_ptr is not None:
            add_to_bucket(bucket_sums, dtable_ptr, bucket)
        part = part_of(work_ptr, item, HAS_PARTS)
        if HAS_PARTS and part > 0:
            # From registers: one buffer of dq is too small for dk at D=128, and the senders use both.
            key = gl.cast(gl.arange(0, KEYS, layout=gl.SliceLayout(1, KV)), gl.int64)
            column = gl.cast(gl.arange(0, D, layout=gl.SliceLayout(0, KV)), gl.int64)
            before = gl.cast(part - 1, gl.int64) * (2 * KEYS)  # dk, then dv, as in `combine_gradients_kernel`
            gl.store(parts_ptr + ((key + before)[:, None] * D + column[None, :]), dk)
            gl.store(parts_ptr + ((key + (before + KEYS))[:, None] * D + column[None, :]), dv)
        else:
            hand_over(dv.to(dtype), 0, out_s.index(0), full, empty, parities)
            hand_over((dk * scale).to(dtype), 1, out_s.index(ROWS // 64), full, empty, parities)
            parities ^= (1 << SENDERS) - 1
    if dpairs_desc is not None:
        tma.store_wait(0)


# Sizes are not specialised: another length or number of heads causes no recompilation.
@gluon.jit(
    do_not_specialize=[
        "lengths_stride", "qk_scale", "scale", "heads", "kv_heads", "row_tiles", "cap_scale", "inverse_unit", "offset",
        "q_len", "table_size", "bias_of_batch", "bias_of_head", "has_batches", "has_heads",
        "tiles_of_batch", "tiles_of_head", "tile_rows", "tile_words",
    ],
    do_not_specialize_on_alignment=["lengths_ptr"],  # one number is loaded at a time
)  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc,  # [B, Hq, Nq, .], [B, Hkv, Nk, .], [B, Hkv, Nk, .], [B, Hq, Nq, .] in boxes of
    # [1, 1, ROWS or KEYS, D]: reads past the ends of a tensor give zeros, writes there are dropped
    rows_desc,  # fp32 [B * Hq * tiles * steps * 2, ROWS] in boxes of [2, ROWS]: see rows.py
    acc_desc,  # fp32 [chains * TILE_ROWS * D // WIDTH, WIDTH] in boxes of ROWS * D each, see `in_thread_order`
    dk_desc, dv_desc,  # as k and v, written
    start_ptr, work_ptr, entry_ptr, words_ptr,  # int32 [programs + 1], [items, ITEM], [entries, ENTRY], bits
    counter_ptr,  # int32 [chains * TILE_ROWS // ROWS], zeros
    parts_ptr,  # fp32 [parts, 2 * KEYS * D], written: dk without `scale` and dv of parts; None without parts
    lengths_ptr, lengths_stride,  # int32 [2, B], of queries and of keys, or None
    qk_scale, scale,  # positive; scores in the units of scores.py times qk_scale are exponents of 2
    heads, kv_heads, row_tiles,
    cap_scale, inverse_unit, slopes_ptr,  # as in the forward
    # Zeros, written where an item has entries of a head; or None. Items are in the order of the list if some are parts,
    # else ordered by batch element, KV head and keys.
    dslopes_ptr,  # fp32 [items, heads // kv_heads, KEYS]
    offset,  # keys minus queries of a sequence
    entries_ptr, until_ptr,  # of a table, as in the forward; q_len: of a sequence
    buckets_ptr,  # int32 [C] of `entries_kernel`, if the table has a gradient, or None
    dtable_ptr,  # fp32 [items, heads // kv_heads, table_size, TABLE_SUMS], as dslopes_ptr, but added to
    table_size, q_len,
    biases_ptr,  # fp32 [rows, Nk in whole tiles] of `biases_kernel`, or None; then as in the forward
    bias_of_batch, bias_of_head,
    dkey_ptr,  # fp32 [items, heads // kv_heads, KEYS], as dslopes_ptr
    pairs_desc,  # a bias of pairs, in boxes of [1, 1, ROWS, KEYS], or None; then as in the forward
    has_batches, has_heads, tile_numbers_ptr, tile_pattern_ptr, tiles_of_batch, tiles_of_head, tile_rows, tile_words,
    dpairs_desc,  # as pairs_desc, written for live tiles, if nothing shares the bias; or None
    D: gl.constexpr,
    ROWS: gl.constexpr,  # 64, or 128
    Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr, REGISTERS: gl.constexpr, CHANGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of all items, and the chains of dq, without the factor `scale`."""
    dtype: gl.constexpr = q_desc.dtype
    HAS_LENGTHS: gl.constexpr = lengths_ptr is not None
    HAS_PARTS: gl.constexpr = parts_ptr is not None
    TILE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    DS_SHAPE: gl.constexpr = [KEYS, ROWS] if dpairs_desc is None else [ROWS, KEYS]
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(DS_SHAPE, dtype)
    q_s = gl.allocate_shared_memory(dtype, [Q_STAGES, ROWS, D], TILE_LAYOUT)
    dout_s = gl.allocate_shared_memory(dtype, [DOUT_STAGES, ROWS, D], TILE_LAYOUT)
    k_s = gl.allocate_shared_memory(dtype, [KEYS, D], TILE_LAYOUT)
    v_s = gl.allocate_shared_memory(dtype, [KEYS, D], TILE_LAYOUT)
    ds_s = gl.allocate_shared_memory(dtype, DS_SHAPE, DS_LAYOUT)
    rows_s = gl.allocate_shared_memory(gl.float32, [Q_STAGES, 2, ROWS], rows_desc.layout)
    dq_s = gl.allocate_shared_memory(gl.float32, [SENDERS, ROWS * D // WIDTH, WIDTH], acc_desc.layout)
    # dv and dk are sent from the buffers of dq; each buffer holds one or two of them.
    out_s = reinterpret(dq_s, dtype, [SENDERS * (ROWS // 64), KEYS, D], TILE_LAYOUT)
    number_s = gl.allocate_shared_memory(gl.int32, [Q_STAGES * TOLD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BAR)
    dout_full = gl.allocate_shared_memory(gl.int64, [DOUT_STAGES, 1], BAR)
    dout_empty = gl.allocate_shared_memory(gl.int64, [DOUT_STAGES, 1], BAR)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], BAR)
    full = gl.allocate_shared_memory(gl.int64, [SENDERS, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [SENDERS, 1], BAR)
    for c in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=THREADS)
    for c in gl.static_range(DOUT_STAGES):
        mbarrier.init(dout_full.index(c), count=1)
        mbarrier.init(dout_empty.index(c), count=THREADS)
    mbarrier.init(kv_full.index(0), count=1)
    for c in gl.static_range(SENDERS):
        mbarrier.init(full.index(c), count=1)
        mbarrier.init(empty.index(c), count=1)
    tiles_s = (q_s, dout_s, k_s, v_s, rows_s, number_s)
    # In a tuple Gluon allows None only as an argument of the kernel, so the argument stands for the missing buffer.
    if biases_ptr is None:
        bias, of_bias = (biases_ptr, bias_of_batch, bias_of_head, biases_ptr), (biases_ptr, dkey_ptr, biases_ptr)
    else:
        bias_s = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        bias, of_bias = (biases_ptr, bias_of_batch, bias_of_head, bias_s), (biases_ptr, dkey_ptr, bias_s)
    stored = (
        has_batches, has_heads, tile_numbers_ptr, tile_pattern_ptr, tiles_of_batch, tiles_of_head, tile_rows, tile_words
    )  # fmt: skip
    if pairs_desc is None:
        pairs = (pairs_desc, pairs_desc, dpairs_desc, stored, inverse_unit)
    else:
        pairs_s = pair_buffers(pairs_desc, 1, ROWS, KEYS, THREADS)
        pairs = (pairs_desc, pairs_s, dpairs_desc, stored, inverse_unit)
    bars = (q_full, q_empty, dout_full, dout_empty, kv_full)
    lists = (start_ptr, work_ptr, entry_ptr)
    lengths = (lengths_ptr, lengths_stride)
    descriptors = (q_desc, dout_desc, k_desc, v_desc, rows_desc)
    decay = (qk_scale, inverse_unit, slopes_ptr, offset)
    table = (entries_ptr, until_ptr, buckets_ptr, q_len)
    loads = (descriptors, tiles_s, bars, lists, (heads, kv_heads, row_tiles), decay, table, bias, pairs)
    sends = (acc_desc, dq_s, out_s, full, empty, counter_ptr, lists, kv_heads)
    sizes = (qk_scale, scale, kv_heads)
    of_table = (entries_ptr, buckets_ptr, dtable_ptr, table_size, q_len, offset)
    changes = (cap_scale, slopes_ptr, dslopes_ptr, heads // kv_heads, of_table, of_bias, pairs)
    reads = (tiles_s, bars, lists, words_ptr, lengths, parts_ptr, ds_s, dq_s, out_s, full, empty, sizes, changes)
    gl.warp_specialize(
        [
            (consumer, (reads, ROWS, Q_STAGES, DOUT_STAGES, D, HAS_LENGTHS, HAS_PARTS, CHANGES)),
            (loader, (loads, ROWS, Q_STAGES, DOUT_STAGES, CHANGES)),
            (sender, (sends, dv_desc, 0, ROWS, HAS_PARTS)),
            (sender, (sends, dk_desc, 1, ROWS, HAS_PARTS)),
        ],
        [1, 1, 1],
        [REGISTERS, REGISTERS, REGISTERS],
    )
