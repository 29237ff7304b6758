"""The steps of a warpgroup in the Hopper forward.

At two places the order of the source matters, because the machine code showed that the compiler would order it
otherwise:

- The softmax ends with the wait for the next keys, which splits the code in two. Instructions before it stay before the
  wait for the product, and run under it. Without it the compiler waits for the product first.
- The accumulator is rescaled before the next scores are multiplied, and only by a warp that has a row whose maximum has
  grown by more than SLACK: seldom after the first steps of an item. After the products, the compiler would wait for
  them at that branch.

Biases of pairs are loaded last, into one buffer per warpgroup; at D = 128 it takes the memory of a second buffer of
queries. A warpgroup frees the buffer as soon as it has read it, so the next biases arrive while it computes weights.

KEPT: how many pieces of queries are kept in registers. A product with few keys takes as long as reading both operands
from shared memory, whose bandwidth values and loads need, too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from sparseflash.backends.triton.changes.hopper_steps import (
    begun_items,
    begun_tiles,
    changed_in_masked_tiles,
    changed_scores,
    left_to_rows,
    multiplied,
    no_items,
)
from sparseflash.backends.triton.hopper.forward_ends import finish_out, finish_rows
from sparseflash.backends.triton.hopper.forward_softmax import at_turn_of, rescaled, softmax
from sparseflash.backends.triton.hopper.gluon_api import accumulator
from sparseflash.backends.triton.hopper.record import BLOCK, COUNT, FULL, JUMP, JUMP_LEFT, K_LIMIT, START, TILE, field
from sparseflash.backends.triton.hopper.scores import sums_of_threads
from sparseflash.backends.triton.hopper.tiles import (
    ROWS,
    block_at,
    exchanged_with_nobody,
    layout_of_bits,
    live_words,
    masked,
    opaque,
)


@gluon.jit
def words_of_step(
    words_ptr, index_ptr, tile, place, k_limit, C: gl.constexpr, SHAPE: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    MAY_BE_FULL: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """The mask bits of the rows of warpgroup C, see `live_words`. k_limit: the number of live keys if HAS_LENGTHS."""
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    k_left = BLOCK_N
    if HAS_LENGTHS:
        k_left = k_limit - block_at(index_ptr, place, SHAPE.SPLIT) * BLOCK_N
    return live_words(
        words_ptr, tile, C * ROWS, place, k_left, SHAPE.GROUPS * ROWS, BLOCK_N, SHAPE.SPLIT, HAS_LENGTHS, MAY_BE_FULL,
        gl.SliceLayout(2, BITS),
    )  # fmt: skip


@gluon.jit
def masked_scores(CHANGES: gl.constexpr, changes, s, of_tiles, words, block, item, C: gl.constexpr, BITS: gl.constexpr):
    """The scores of a tile that is not full, after score modifications and the mask's bits."""
    BLOCK_N: gl.constexpr = s.shape[1]
    s = changed_in_masked_tiles(CHANGES, changes, s, of_tiles, block, item, C, BLOCK_N)
    words = exchanged_with_nobody(words) if CHANGES.KEEPS_BRANCH else opaque(words)
    return masked(s, words, BLOCK_N, BITS)


@gluon.jit
def consumer(
    own, reads,
    C: gl.constexpr,  # which of the warpgroups
    SHAPE: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_PARTS: gl.constexpr, CHANGES: gl.constexpr,
):  # fmt: skip
    """out and lse of ROWS queries of every item."""
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    D: gl.constexpr = SHAPE.D  # in a list, Triton 3.6 takes no attribute of a constant
    D_REST: gl.constexpr = SHAPE.D_REST
    DV: gl.constexpr = SHAPE.DV
    DV_REST: gl.constexpr = SHAPE.DV_REST
    GROUPS: gl.constexpr = SHAPE.GROUPS
    Q_BUFFERS: gl.constexpr = SHAPE.Q_BUFFERS
    KEPT: gl.constexpr = SHAPE.KEPT
    IN_TURNS: gl.constexpr = SHAPE.IN_TURNS
    tiles_s, rests_s, changes_s = own  # Triton 3.6 takes no tuple within a tuple as a target
    tiles_s, o_s, record_s, bars = tiles_s
    q_s, k_s, v_s = tiles_s
    q_rest_s, k_rest_s, v_rest_s, o_rest_s = rests_s
    lists, words_ptr, out_descs, lse_ptr, parts_ptr, qk_scale, q_len, offset, changes = reads
    outputs = out_descs, (o_s, o_rest_s), parts_ptr
    q_full, q_empty, k_full, v_full, kv_empty = bars
    index_ptr, tile_ptr = lists
    dtype: gl.constexpr = q_s.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=A, k_width=2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S)
    A_ROWS: gl.constexpr = gl.SliceLayout(1, A)
    BITS: gl.constexpr = layout_of_bits(BLOCK_N)
    KEEPS_Q: gl.constexpr = (1 if D_REST == 0 else 2) == KEPT
    Q: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S, k_width=2)

    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=S)
    no_maximum, no_sum = gl.full([ROWS], float("-inf"), gl.float32, layout=S_ROWS), sums_of_threads(zero)
    m_i, l_i = no_maximum, no_sum  # l_i is spread over the four threads of a row
    alpha = gl.zeros([ROWS], gl.float32, layout=S_ROWS)
    acc = gl.zeros([ROWS, DV], gl.float32, layout=A)
    if DV_REST > 0:
        R: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV_REST, 16])
        R_ROWS: gl.constexpr = gl.SliceLayout(1, R)
        acc_rest = gl.zeros([ROWS, DV_REST], gl.float32, layout=R)
    p = zero.to(dtype)
    kept_q = gl.zeros([ROWS, D], dtype, layout=Q)
    if KEPT == 2:
        kept_rest = gl.zeros([ROWS, D_REST], dtype, layout=Q)
    goes_on = False  # whether the next product is added to acc; False for the first of an item
    step, turn, left, partial_left, place, tile, k_limit, jump_left, next_block = 0, -1, 0, 0, 0, 0, 0, 0, 0
    of_items = no_items(CHANGES)
    mbarrier.wait(k_full.index(0), 0)
    if IN_TURNS and C == 1:
        at_turn_of(0, "arrive")
    running = True
    while running:
        begins = left == 0
        if begins:
            turn += 1
            mbarrier.wait(q_full.index((turn & (Q_BUFFERS - 1)) * GROUPS + C), (turn >> (Q_BUFFERS - 1)) & 1)
            left, place = field(record_s, turn, COUNT), field(record_s, turn, START)
            partial_left = left - field(record_s, turn, FULL)
            tile = field(record_s, turn, TILE)
            if HAS_LENGTHS:
                k_limit, jump_left = field(record_s, turn, K_LIMIT), field(record_s, turn, JUMP_LEFT)
            of_items = begun_items(CHANGES, changes, of_items, (record_s, turn, q_len, offset, qk_scale), C, BLOCK_N)
            if CHANGES.READS_BLOCKS:
                next_block = field(record_s, turn, BLOCK)
            running = left > 0
            if KEPT > 0:
                kept_q = q_s.index((turn & (Q_BUFFERS - 1)) * GROUPS + C).load(Q)
                if KEPT == 2:
                    kept_rest = q_rest_s.index((turn & (Q_BUFFERS - 1)) * GROUPS + C).load(Q)
                if Q_BUFFERS == 1 and KEEPS_Q:
                    async_copy.mbarrier_arrive(q_empty.index(C), increment_count=False)
        is_mixed = left <= partial_left
        block, item = next_block, (record_s, turn, q_len, offset, qk_scale)
        of_tiles, is_mixed = begun_tiles(CHANGES, changes, of_items, is_mixed, block, item, C, BLOCK_N)
        words = gl.zeros([ROWS, BLOCK_N // 32], gl.int32, layout=gl.SliceLayout(2, BITS))
        if is_mixed:
            words = words_of_step(
                words_ptr, index_ptr, tile, place, k_limit, C, SHAPE, HAS_LENGTHS, CHANGES.READS_BLOCKS, BITS
            )
        left, place = left - 1, place + 1
        if HAS_LENGTHS and left == jump_left:
            place += field(record_s, turn, JUMP)
        # Prefetched for the next step: the mask's words depend on it, and two dependent loads would stall.
        tile = gl.load(tile_ptr + (place if SHAPE.SPLIT == 1 else place // SHAPE.SPLIT))
        if CHANGES.READS_BLOCKS:
            next_block = block_at(index_ptr, place, SHAPE.SPLIT)

        stage, phase = step % SHAPE.STAGES, (step // SHAPE.STAGES) & 1
        factors = gl.convert_layout(alpha, A_ROWS)[:, None]
        acc = acc * factors if IN_TURNS else rescaled(acc, factors)
        if DV_REST > 0:
            factors = gl.convert_layout(alpha, R_ROWS)[:, None]
            acc_rest = acc_rest * factors if IN_TURNS else rescaled(acc_rest, factors)
        q = kept_q if KEPT > 0 else q_s.index((turn & (Q_BUFFERS - 1)) * GROUPS + C)
        s = warpgroup_mma(q, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        if D_REST > 0:
            q = kept_rest if KEPT == 2 else q_rest_s.index((turn & (Q_BUFFERS - 1)) * GROUPS + C)
            s = warpgroup_mma(q, k_rest_s.index(stage).permute((1, 0)), accumulator(s), is_async=True)
        s = multiplied(CHANGES, changes, changes_s, s, stage, Q)
        mbarrier.wait(v_full.index(stage), phase)
        weights = gl.convert_layout(p, P)
        acc = warpgroup_mma(weights, v_s.index(stage), acc, use_acc=goes_on, is_async=True)
        if DV_REST > 0:
            weights = gl.convert_layout(p, gl.DotOperandLayout(operand_index=0, parent=R, k_width=2))
            acc_rest = warpgroup_mma(weights, v_rest_s.index(stage), acc_rest, use_acc=goes_on, is_async=True)
        s = warpgroup_mma_wait(1 if DV_REST == 0 else 2, deps=(s,))
        if Q_BUFFERS == 1 and not KEEPS_Q and left == 0:
            # Before the wait for the next keys: they belong to the next item, and are loaded after its queries.
            async_copy.mbarrier_arrive(q_empty.index(C), increment_count=False)
        if IN_TURNS:
            at_turn_of(C, "sync")

        s, of_tiles = changed_scores(CHANGES, changes, changes_s, s, of_tiles, step, C)
        if is_mixed:
            s = masked_scores(CHANGES, changes, s, of_tiles, words, block, item, C, BITS)
        s, added = left_to_rows(CHANGES, changes, s, of_tiles, item, BLOCK_N)
        inverse, ended = gl.zeros([ROWS], gl.float32, layout=S_ROWS), turn - 1
        if begins:
            if turn > 0:
                if Q_BUFFERS == 2:
                    # Before the wait for the next keys: after an item of one tile, they follow the next item's queries.
                    mbarrier.arrive(q_empty.index((ended & 1) * GROUPS + C), count=1)
                inverse = finish_rows(
                    CHANGES, changes, m_i, l_i, record_s, ended, (lse_ptr, parts_ptr, qk_scale, q_len), C, SHAPE,
                    HAS_LENGTHS, HAS_PARTS,
                )  # fmt: skip
            m_i, l_i = no_maximum, no_sum
        if IN_TURNS:
            at_turn_of(1 - C, "arrive")
        p, m_i, l_i, decay = softmax(CHANGES, s, added, m_i, l_i, qk_scale, IN_TURNS)
        p, alpha = p.to(dtype), gl.where(begins, inverse, decay)

        step += 1
        mbarrier.wait(k_full.index(step % SHAPE.STAGES), (step // SHAPE.STAGES) & 1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if DV_REST > 0:
            acc_rest = warpgroup_mma_wait(0, deps=(acc_rest,))
        # Each thread arrives by itself, without waiting for the others.
        async_copy.mbarrier_arrive(kv_empty.index(stage), increment_count=False)
        goes_on = not begins
        if begins and turn > 0:
            acc = finish_out(
                acc, acc_rest if DV_REST > 0 else acc, alpha, outputs, record_s, ended, C, SHAPE,
                HAS_LENGTHS and CHANGES.MAY_BE_NAN, HAS_PARTS,
            )  # fmt: skip
    if IN_TURNS and C == 0:
        at_turn_of(0, "sync")
    tma.store_wait(0)
