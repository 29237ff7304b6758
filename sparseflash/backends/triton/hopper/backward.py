"""The backward kernel for Hopper (sm_90): one pass over the keys, five products a step, dq added in a fixed order.

An item is a tile of KEYS keys of one KV head, with the tiles of queries that see it, of every query head of the group.
A step takes ROWS queries. Two warpgroups together hold dk and dv of the keys in registers and compute

    S = K Q^T - lse,  P = exp(S),  dV += P dO,  dP = V dO^T - delta,  dS = P * dP,  dQ = dS^T K,  dK += dS Q

with keys as rows of S. The accumulators of S and dP start as -lse and -delta, so these take no registers of their own.
Head dims between 64 and 128 have tiles of 128 channels.

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
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from sparseflash.backends.triton.changes.hopper_backward_steps import (
    arguments_of_changes,
    begun,
    begun_tiles,
    buffers_of_changes,
    changed_in_masked_tiles,
    changed_scores,
    exponentials,
    finish,
    finished_heads,
    load_last,
    plus_gradients,
    plus_later_gradients,
    started,
    store_gradients,
    tell,
    times_derivatives,
)
from sparseflash.backends.triton.changes.kind import WHOLE_NUMBERS
from sparseflash.backends.triton.hopper.configs import BLOCK
from sparseflash.backends.triton.hopper.gluon_api import (
    accumulator,
    async_add,
    async_load,
    async_store,
    local_mma_wait,
    reinterpret,
)
from sparseflash.backends.triton.hopper.record import heard, told
from sparseflash.backends.triton.hopper.rows import TILE_ROWS, WIDTH
from sparseflash.backends.triton.persistent.backward_plan import (
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

KEYS = gl.constexpr(BLOCK[1])  # of an item; its tiles have TILE_ROWS queries, in TILE_ROWS // ROWS steps
SENDERS = gl.constexpr(2)
WORDS = gl.constexpr(BLOCK[0] // 32)  # of bits of a key of a tile
# A dead score, where the derivatives of score modifications are computed from the scores: its square is finite. Its
# weight is 0 where lse is above -1e7, for every cap (`softcap.CAPS`); `attention` promises no gradients from a million
# on.
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
def loader(
    loads, ROWS: gl.constexpr, Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr, CHANGES: gl.constexpr,
):  # fmt: skip
    """Loads queries, with their -lse and -delta, and dout for every step; keys and values once an item."""
    descriptors, tiles_s, bars, lists, sizes, changes, changes_s = loads
    q_desc, dout_desc, k_desc, v_desc, rows_desc = descriptors
    q_s, dout_s, k_s, v_s, rows_s, number_s = tiles_s
    q_full, q_empty, dout_full, dout_empty, kv_full = bars
    start_ptr, work_ptr, entry_ptr = lists
    heads, kv_heads, row_tiles, of_tokens = sizes
    of_program = begun(CHANGES, changes, of_tokens)
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
            told(number_s, stage, 0, tile, CHANGES.TOLD)
            member = head - kv_head * (heads // kv_heads)
            if CHANGES.HAVE_SUMS_OF_HEADS:
                told(number_s, stage, CHANGES.TOLD - 1, member, CHANGES.TOLD)
            place = batch, head, member, first_q, first_k
            kept = tell(CHANGES, changes, of_program, place, of_tokens, number_s, stage, ROWS)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + rows_desc.block_type.nbytes)
            async_load(q_desc, [batch, head, first_q, 0], q_full.index(stage), q_s.index(stage))
            async_load(rows_desc, [(row * STEPS + piece) * 2, 0], q_full.index(stage), rows_s.index(stage))
            stage = step % DOUT_STAGES
            mbarrier.wait(dout_empty.index(stage), ((step // DOUT_STAGES) & 1) ^ 1)
            mbarrier.expect(dout_full.index(stage), dout_desc.block_type.nbytes)
            async_load(dout_desc, [batch, head, first_q, 0], dout_full.index(stage), dout_s.index(stage))
            load_last(CHANGES, changes, changes_s, step, kept)
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
    operation is the next addition, a reduction of the copy engine in the L2 cache, issued only after the counter was
    read; the earlier additions were complete in L2 before the counter was raised (`sent_is_visible`). PTX's memory
    model would ask for an acquire and a proxy fence here, which cost time; without them the bits were the same in all
    stored repeats.
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
        # The sender of a step follows from the entry's number: Triton 3.6 and 3.7 lose a counter that is carried from
        # item to item if only the start of this loop uses it.
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
def plus_products(x_s, y_s, acc, use_acc, USED: gl.constexpr, REST: gl.constexpr):
    """Starts the product acc + x y over the first USED + REST channels; the other channels hold zeros. acc counts as 0
    unless `use_acc`.

    A piece begins at a multiple of 64 channels, where a swizzled tile has a new row of shared memory.
    """
    if x_s.shape[1] == USED:
        acc = warpgroup_mma(x_s, y_s, acc, use_acc=use_acc, is_async=True)
    else:
        acc = warpgroup_mma(
            x_s.slice(0, USED, dim=1), y_s.slice(0, USED, dim=0), acc, use_acc=use_acc, is_async=True
        )  # fmt: skip
        if REST > 0:
            x_s, y_s = x_s.slice(USED, REST, dim=1), y_s.slice(USED, REST, dim=0)
            acc = warpgroup_mma(x_s, y_s, accumulator(acc), is_async=True)
    return acc


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
def hand_over(x, rest, which, target_s, full, empty, parities, REST: gl.constexpr):
    """Waits for a sender's buffer and gives it a tile: x and, if REST is not 0, as many more channels. Bit `which` of
    `parities`: whether this sender has received an odd number of tiles before.
    """
    mbarrier.wait(empty.index(which), ((parities >> which) & 1) ^ 1)
    if x.shape[1] < target_s.shape[1]:
        target_s.slice(0, x.shape[1], dim=1).store(x)
    else:
        target_s.store(x)
    if REST > 0:
        target_s.slice(x.shape[1], REST, dim=1).store(rest)
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
def place_of_sums(item, number, first_k, tiles, HAS_PARTS: gl.constexpr):
    """Where the gradient sums of an item are stored: in the order of keys, with `tiles` items a head; or in the order
    of the list if some items are parts.
    """
    return item if HAS_PARTS else number * tiles + first_k // KEYS


@gluon.jit
def weights_of(
    CHANGES: gl.constexpr, changes, changes_s, s, rows, of_tiles, step, is_partial, mask, qk_scale,
    ROWS: gl.constexpr, HAS_LENGTHS: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """`(weights in fp32, modified scores, of_tiles)` from products of keys and queries.

    mask: the arguments of `masked` for the tile's bits.
    """
    LAYOUT: gl.constexpr = s.type.layout
    s = changed_scores(CHANGES, changes, changes_s, s, of_tiles, step)
    if CHANGES.MAY_BE_NAN and HAS_LENGTHS:  # past the lengths
        is_dead = rows.slice(0, 1, dim=0).load(LAYOUT).broadcast_to(KEYS, ROWS) == float("-inf")
        s = gl.where(is_dead, float("-inf"), s)
    dead = float("-inf")
    if CHANGES.HAVE_DERIVATIVES:
        dead = DEAD
    if is_partial:
        s, of_tiles = changed_in_masked_tiles(CHANGES, changes, s, of_tiles)
        words_ptr, tile, first_row, k_left = mask
        s = masked(s, words_ptr, tile, first_row, k_left, dead, ROWS, HAS_LENGTHS, BITS)
    changed = s
    if CHANGES.HAVE_DERIVATIVES:
        changed += rows.slice(0, 1, dim=0).load(LAYOUT).broadcast_to(KEYS, ROWS)
    p, of_tiles = exponentials(CHANGES, changes, changed, of_tiles, qk_scale)
    return p, s, of_tiles


@gluon.jit
def store_part(parts_ptr, part, x, IS_DV: gl.constexpr, FIRST: gl.constexpr, D: gl.constexpr):
    """Writes channels from FIRST on of dk or dv of a part of an item, in fp32 rows of D.

    It writes from registers, because at D=128 dk does not fit into one buffer of dq, and the senders use both buffers.
    """
    LAYOUT: gl.constexpr = x.type.layout
    key = gl.cast(gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT)), gl.int64)
    column = gl.cast(FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT)), gl.int64)
    before = gl.cast(part - 1, gl.int64) * (2 * KEYS)  # dk, then dv, as in `combine_gradients_kernel`
    if IS_DV:
        before += KEYS
    gl.store(parts_ptr + ((key + before)[:, None] * D + column[None, :]), x)


@gluon.jit
def plus_weighted(x, weights, y_s, FIRST: gl.constexpr):
    """x + weights y over the channels of y from FIRST on that x has, in flight. weights: in registers."""
    weights = gl.convert_layout(weights, gl.DotOperandLayout(operand_index=0, parent=x.type.layout, k_width=2))
    if x.shape[1] < y_s.shape[1]:
        y_s = y_s.slice(FIRST, x.shape[1], dim=1)
    return warpgroup_mma(weights, y_s, x, is_async=True)


@gluon.constexpr_function
def layout_of_products(columns, parts):
    """The layout of products with this many columns by eight warps. parts: warpgroups that share the columns."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8 // parts, parts], instr_shape=[16, columns // parts, 16]
    )


@gluon.constexpr_function
def layout_of_bits(ROWS):
    """The layout of scores, seen as [KEYS, ROWS // 32, 32]: each thread holds the mask words of its scores."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], [0, 1, 0]] + ([[0, 2, 0]] if ROWS == 128 else []),
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0], [64, 0, 0]],
        [],
        [KEYS, ROWS // 32, 32],
    )


@gluon.jit
def consumer(
    reads, ROWS: gl.constexpr, Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr, D: gl.constexpr, USED: gl.constexpr,
    REST: gl.constexpr, V_USED: gl.constexpr, V_REST: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_PARTS: gl.constexpr,
    CHANGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of every item, and dq of every step."""
    tiles_s, bars, lists, words_ptr, lengths, parts_ptr, ds_s, dq_s, out_s, full, empty, sizes, changes, changes_s = (
        reads
    )
    scale, kv_heads, group, of_tokens = sizes
    qk_scale, q_len, offset = of_tokens
    q_s, dout_s, k_s, v_s, rows_s, number_s = tiles_s
    q_full, q_empty, dout_full, dout_empty, kv_full = bars
    start_ptr, work_ptr, _ = lists
    dtype: gl.constexpr = q_s.dtype
    S: gl.constexpr = layout_of_products(ROWS, 1)
    # Each warpgroup computes half the rows of dq or, of 64 rows, half the columns.
    Q: gl.constexpr = layout_of_products(D, 128 // ROWS)
    BITS: gl.constexpr = layout_of_bits(ROWS)
    no_dq = gl.zeros([ROWS, D], gl.float32, layout=Q)
    no_scores = gl.zeros([KEYS, ROWS], gl.float32, layout=S)
    no_sums = started(CHANGES, no_scores)
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
        dk = gl.zeros([KEYS, USED], gl.float32, layout=layout_of_products(USED, 1))
        dv = gl.zeros([KEYS, V_USED], gl.float32, layout=layout_of_products(V_USED, 1))
        if REST > 0:
            dk_rest = gl.zeros([KEYS, REST], gl.float32, layout=layout_of_products(REST, 1))
        if V_REST > 0:
            dv_rest = gl.zeros([KEYS, V_REST], gl.float32, layout=layout_of_products(V_REST, 1))
        sums, member, place = no_sums, 0, 0
        if CHANGES.HAVE_SUMS:
            place = place_of_sums(item, number, first_k, gl.cdiv(q_len + offset, KEYS), HAS_PARTS)
        if count > 0:
            mbarrier.wait(kv_full.index(0), (parities >> SENDERS) & 1)
            parities ^= 1 << SENDERS
        for i in range(count * STEPS):
            q_stage, dout_stage = step % Q_STAGES, step % DOUT_STAGES
            mbarrier.wait(q_full.index(q_stage), (step // Q_STAGES) & 1)
            tile = heard(number_s, q_stage, 0, CHANGES.TOLD)
            is_partial = (tile != 0) | (k_left < KEYS)
            rows = rows_s.index(q_stage)
            of_step = number_s, q_stage, step, of_tokens
            of_tiles = begun_tiles(CHANGES, changes, of_step, no_scores)
            if CHANGES.HAVE_SUMS_OF_HEADS:
                # A head's tiles are consecutive, so its sums are complete when the head changes.
                of_group = heard(number_s, q_stage, CHANGES.TOLD - 1, CHANGES.TOLD)
                if of_group != member:
                    sums = finished_heads(CHANGES, changes, sums, no_sums, place * group + member)
                member = of_group
            s = no_scores
            if not CHANGES.HAVE_DERIVATIVES:
                s = in_registers(rows.slice(0, 1, dim=0).load(S).broadcast_to(KEYS, ROWS))
            dp = in_registers(rows.slice(1, 1, dim=0).load(S).broadcast_to(KEYS, ROWS))
            q = q_s.index(q_stage).permute((1, 0))
            s = plus_products(k_s, q, s, not CHANGES.HAVE_DERIVATIVES, USED, REST)
            mbarrier.wait(dout_full.index(dout_stage), (step // DOUT_STAGES) & 1)
            dp = plus_products(v_s, dout_s.index(dout_stage).permute((1, 0)), dp, True, V_USED, V_REST)
            s = local_mma_wait(s, 1 if V_REST == 0 else 2)
            mask = words_ptr, tile, i % STEPS * ROWS, k_left
            p, s, of_tiles = weights_of(
                CHANGES, changes, changes_s, s, rows, of_tiles, of_step, is_partial, mask, qk_scale, ROWS, HAS_LENGTHS,
                BITS,
            )  # fmt: skip
            weights = p.to(dtype)
            p = times_derivatives(CHANGES, changes, p, s, of_tiles)
            dv = plus_weighted(dv, weights, dout_s.index(dout_stage), 0)
            if V_REST > 0:
                dv_rest = plus_weighted(dv_rest, weights, dout_s.index(dout_stage), V_USED)
            dp = local_mma_wait(dp, 1 if V_REST == 0 else 2)
            ds = p * dp
            sums = plus_gradients(CHANGES, changes, sums, ds, of_tiles)
            half_ds = ds.to(dtype)
            if CHANGES.STORES_GRADIENTS:
                # Keys are contiguous, as in global memory: one buffer is the operand of dq and the source of the store.
                tma.store_wait(0)
                ds_by_row = ds_s
                ds_by_row.permute((1, 0)).store(half_ds)
                fence_async_shared()
                store_gradients(CHANGES, changes, ds_by_row, of_step, number // kv_heads, first_k)
            else:
                ds_s.store(half_ds)
                fence_async_shared()
                ds_by_row = ds_s.permute((1, 0))
            dq = warpgroup_mma(ds_by_row, k_s, no_dq, use_acc=False, is_async=True)
            dk = plus_weighted(dk, half_ds, q_s.index(q_stage), 0)
            if REST > 0:
                dk_rest = plus_weighted(dk_rest, half_ds, q_s.index(q_stage), USED)
            dq, dv = local_mma_wait(dq, 1 if REST == 0 else 2), accumulator(dv)
            if V_REST > 0:
                dv_rest = accumulator(dv_rest)
            async_copy.mbarrier_arrive(dout_empty.index(dout_stage), increment_count=False)
            which = (first * STEPS + i) % SENDERS
            dq = in_thread_order(dq, ROWS, D)
            hand_over(dq, dq, which, dq_s.index(which), full, empty, parities, 0)
            parities ^= 1 << which
            # After dq is handed over: other programs wait for dq, and it has left its registers.
            sums = plus_later_gradients(CHANGES, changes, sums, half_ds, of_tiles, of_step, (place, group), no_sums)
            dk = local_mma_wait(dk, 0)
            if REST > 0:
                dk_rest = local_mma_wait(dk_rest, 0)
            async_copy.mbarrier_arrive(q_empty.index(q_stage), increment_count=False)
            step += 1
        if CHANGES.HAVE_SUMS_OF_HEADS:
            sums = finished_heads(CHANGES, changes, sums, no_sums, place * group + member)
        finish(CHANGES, changes, sums)
        part = part_of(work_ptr, item, HAS_PARTS)
        if HAS_PARTS and part > 0:
            store_part(parts_ptr, part, dk, False, 0, D)
            store_part(parts_ptr, part, dv, True, 0, D)
            if REST > 0:
                store_part(parts_ptr, part, dk_rest, False, USED, D)
            if V_REST > 0:
                store_part(parts_ptr, part, dv_rest, True, V_USED, D)
        else:
            half_dv, half_dk = dv.to(dtype), (dk * scale).to(dtype)
            half_dv_rest, half_dk_rest = half_dv, half_dk
            if V_REST > 0:
                half_dv_rest = dv_rest.to(dtype)
            if REST > 0:
                half_dk_rest = (dk_rest * scale).to(dtype)
            hand_over(half_dv, half_dv_rest, 0, out_s.index(0), full, empty, parities, V_REST)
            hand_over(half_dk, half_dk_rest, 1, out_s.index(ROWS // 64), full, empty, parities, REST)
            parities ^= (1 << SENDERS) - 1
    if CHANGES.STORES_GRADIENTS:
        tma.store_wait(0)


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
    acc_desc,  # fp32 [chains * TILE_ROWS * D // WIDTH, WIDTH] in boxes of ROWS * D each, see `in_thread_order`
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
    DS_SHAPE: gl.constexpr = [ROWS, KEYS] if CHANGES.STORES_GRADIENTS else [KEYS, ROWS]
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
    number_s = gl.allocate_shared_memory(gl.int32, [Q_STAGES * CHANGES.TOLD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
    sends = (acc_desc, dq_s, out_s, full, empty, counter_ptr, lists, kv_heads)
    sizes = (scale, kv_heads, heads // kv_heads, of_tokens)
    reads = (
        tiles_s, bars, lists, words_ptr, lengths, parts_ptr, ds_s, dq_s, out_s, full, empty, sizes, changes, changes_s
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                consumer,
                (
                    reads, ROWS, Q_STAGES, DOUT_STAGES, D, SHAPE.USED, SHAPE.REST, SHAPE.V_USED, SHAPE.V_REST,
                    HAS_LENGTHS, HAS_PARTS, CHANGES,
                ),
            ),
            (loader, (loads, ROWS, Q_STAGES, DOUT_STAGES, CHANGES)),
            (sender, (sends, dv_desc, 0, ROWS, HAS_PARTS)),
            (sender, (sends, dk_desc, 1, ROWS, HAS_PARTS)),
        ],
        [1, 1, 1],
        [REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip
