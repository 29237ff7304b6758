"""The forward kernel for Hopper (sm_90): a persistent kernel, one program per SM, that runs its items as one stream.

An item is a tile of queries with the list of its tiles of keys, full ones first. One warp loads; each of GROUPS
warpgroups holds ROWS queries of the item. A step of the stream multiplies the queries with the keys of one tile and,
under the softmax of these scores, the weights of the previous tile with its values. So the first keys of an item are
multiplied under the last values of the previous one, and the tensor cores do not idle between items.

At two places the order of the source matters, because the machine code showed that the compiler would order it
otherwise:

- The softmax ends with the wait for the next keys, which splits the code in two. Instructions before it stay before the
  wait for the product, and run under it. Without it the compiler waits for the product first.
- The accumulator is rescaled before the next scores are multiplied, and only by a warp that has a row whose maximum has
  grown by more than SLACK: seldom after the first steps of an item. After the products, the compiler would wait for
  them at that branch.

Biases of pairs are loaded last, into one buffer per warpgroup; at D = 128 it takes the memory of a second buffer of
queries. A warpgroup frees the buffer as soon as it has read it, so the next biases arrive while it computes weights.

The stream runs for two steps after the last item. They load nothing, and so no step needs a condition.

For a mask in blocks of 64 x 64 an item is a tile of 64 queries, and a program runs two streams, each with one loading
warp and one warpgroup: neighbouring rows see different keys, so two warpgroups would share nothing.

Head dims that are not a power of 2 are split into two pieces that are, each with its own buffers and descriptors; the
second has 16 to 64 channels. Both pieces of a product with keys accumulate onto the same scores; each piece of values
has its own accumulator. The copy engine pads with zeros. Where wide heads leave no room for 128 keys, a tile of the
lists is SPLIT steps of BLOCK_N keys.

IN_TURNS: at D = 64 the exponentials take as long as the products. Left alone, both warpgroups compute exponentials at
the same time, and then both multiply. So they start their softmaxes by turns, which keeps them apart. If each also
waits for the end of the other's exponentials, the forward takes longer (experiments/results/tried/kernels.csv).

KEPT: how many pieces of queries are kept in registers. A product with few keys takes as long as reading both operands
from shared memory, whose bandwidth values and loads need, too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparseflash.backends.triton.changes.hopper_steps import (
    arguments_of_changes,
    begun_items,
    begun_tiles,
    buffers_of_changes,
    changed_in_masked_tiles,
    changed_scores,
    finished_rows,
    left_to_rows,
    load_last,
    load_with_keys,
    multiplied,
    no_items,
    recorded,
)
from sparseflash.backends.triton.changes.kind import WHOLE_NUMBERS
from sparseflash.backends.triton.device_functions.softmax import LN2, LOWEST
from sparseflash.backends.triton.hopper import configs
from sparseflash.backends.triton.hopper.gluon_api import accumulator, async_load, async_store
from sparseflash.backends.triton.hopper.record import (
    BATCH,
    BATCH_HEAD,
    BLOCK,
    COUNT,
    FIRST_Q,
    FULL,
    HEAD,
    JUMP,
    JUMP_LEFT,
    K_LIMIT,
    PART,
    Q_LIMIT,
    RECORD,
    RECORDS,
    START,
    TILE,
    field,
)
from sparseflash.backends.triton.hopper.scores import as_float, by_thread, plus_of_threads, sums_of_threads
from sparseflash.backends.triton.persistent.plan import (
    ITEM,
    ITEM_BLOCK,
    ITEM_COUNT,
    ITEM_FULL,
    ITEM_NUMBER,
    ITEM_PART,
    ITEM_START,
    ITEM_TILE,
)

NO_SCALE = gl.constexpr(2e-30)  # in units of log2(e); a scale of 0 arrives as less, see `configs.SMALLEST_SCALE`
ROWS = gl.constexpr(configs.ROWS)  # of a warpgroup
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of one warp
# How far, in powers of 2, the running maximum may lag behind the true one. Weights then stay below 256, which half
# precision and fp32 sums hold as exactly as weights below 1.
SLACK = gl.constexpr(8.0)
COARSE = gl.constexpr(configs.COARSE)


# ---------------------------------------------------------------------- the loading warp


@gluon.jit
def next_item(counter_ptr, items, streams):
    """The stream that draws the last number resets the counter for the next launch: each stream draws once for every
    item that it runs, so `items` numbers are drawn.
    """
    drawn = gl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
    if drawn == items - 1:
        gl.store(counter_ptr, 0)
    return drawn + streams


@gluon.jit
def block_at(index_ptr, place, SPLIT: gl.constexpr):
    """The number of the BLOCK_N keys of the step at `place`: a tile of the list is SPLIT steps."""
    if SPLIT == 1:
        block = gl.load(index_ptr + place)
    else:
        block = gl.load(index_ptr + place // SPLIT) * SPLIT + place % SPLIT
    return block


@gluon.jit
def count_below(index_ptr, start, stop, limit):
    """How many of the increasing numbers index[start : stop] are below `limit`."""
    CHUNK: gl.constexpr = 128
    count = 0
    for first in range(start, stop, CHUNK):
        at = first + gl.arange(0, CHUNK, layout=LANES)
        block = gl.load(index_ptr + at, mask=at < stop, other=2147483647)
        count += gl.sum((block < limit).to(gl.int32), 0)
    return count


@gluon.constexpr_function
def bytes_of(desc, rest_desc):
    """The bytes of a box, and of the box of the rest of its channels if it has one."""
    return desc.block_type.nbytes + (0 if rest_desc is None else rest_desc.block_type.nbytes)


@gluon.jit
def cut_at_lengths(index_ptr, start, full, count, first_q, q_limit, k_limit, BLOCK_N: gl.constexpr):
    """Leaves out the tiles at or past the lengths: `(first, full, count, k_limit, jump_left, jump)`, as in a record.

    Full tiles inside the lengths stay full; the one that the lengths cut becomes a partial one. The other full tiles
    are skipped: by a jump, or before `first` if all of them are. A wholly dead item keeps one step without a live key,
    so that its output is written like any other.
    """
    inside = count_below(index_ptr, start, start + full, k_limit // BLOCK_N)
    touched = count_below(index_ptr, start, start + full, gl.cdiv(k_limit, BLOCK_N))
    partial = count_below(index_ptr, start + full, start + count, gl.cdiv(k_limit, BLOCK_N))
    is_dead = (first_q >= q_limit) | (touched + partial == 0)
    inside = gl.where(is_dead, 0, inside)
    partial = gl.where(is_dead, 0, partial)
    k_limit = gl.where(is_dead, 0, k_limit)
    jump = gl.where(is_dead, 0, full - touched)
    first = start + gl.where(touched == 0, jump, 0)
    return first, inside, gl.where(is_dead, 1, touched + partial), k_limit, partial, jump


@gluon.jit
def loader(
    own, loads, stream, SHAPE: gl.constexpr, HAS_LENGTHS: gl.constexpr, CHANGES: gl.constexpr,
):  # fmt: skip
    """Finds items, writes their records, and loads queries, the keys of a step and the values of the step before."""
    BLOCK_N: gl.constexpr = SHAPE.BLOCK_N
    SPLIT: gl.constexpr = SHAPE.SPLIT
    D: gl.constexpr = SHAPE.D
    DV: gl.constexpr = SHAPE.DV
    GROUPS: gl.constexpr = SHAPE.GROUPS
    STAGES: gl.constexpr = SHAPE.STAGES
    Q_BUFFERS: gl.constexpr = SHAPE.Q_BUFFERS
    buffers_s, rests_s, changes_s = own
    tiles_s, _, record_s, bars = buffers_s
    q_rest_s, k_rest_s, v_rest_s, _ = rests_s
    descriptors, work_ptr, lists, lengths, counter_ptr, sizes, streams, changes = loads
    index_ptr, tile_ptr = lists
    q_desc, k_desc, v_desc, q_rest_desc, k_rest_desc, v_rest_desc = descriptors
    q_s, k_s, v_s = tiles_s
    Q_BYTES: gl.constexpr = bytes_of(q_desc, q_rest_desc)
    K_BYTES: gl.constexpr = bytes_of(k_desc, k_rest_desc)
    V_BYTES: gl.constexpr = bytes_of(v_desc, v_rest_desc)
    q_full, q_empty, k_full, v_full, kv_empty = bars
    items, heads, group, q_len, k_len, row_tiles = sizes
    number = gl.arange(0, RECORD, layout=LANES)
    ticket = stream
    step = 0
    turn = 0
    v_batch, v_head, v_first = 0, 0, 0
    while ticket >= 0:
        is_item = ticket < items
        item_ptr = work_ptr + gl.minimum(ticket, items - 1) * ITEM
        item, start = gl.load(item_ptr + ITEM_NUMBER), gl.load(item_ptr + ITEM_START)
        full, count = gl.load(item_ptr + ITEM_FULL), gl.load(item_ptr + ITEM_COUNT)
        block, tile, part = gl.load(item_ptr + ITEM_BLOCK), gl.load(item_ptr + ITEM_TILE), gl.load(item_ptr + ITEM_PART)
        if is_item:
            ticket = next_item(counter_ptr, items, streams)
        else:
            ticket = -1
        batch_head = item // row_tiles
        first_q = item % row_tiles * (GROUPS * ROWS)
        batch, head = batch_head // heads, batch_head % heads
        kv_head = head // group
        q_limit, k_limit = q_len, k_len
        jump_left, jump = -1, 0
        if HAS_LENGTHS:
            lengths_ptr, lengths_stride = lengths
            q_limit = gl.minimum(gl.load(lengths_ptr + batch), q_len)
            k_limit = gl.minimum(gl.load(lengths_ptr + (lengths_stride + batch)), k_len)
            first, full, count, k_limit, jump_left, jump = cut_at_lengths(
                index_ptr, start, full, count, first_q, q_limit, k_limit, BLOCK_N * SPLIT
            )
            if first > start:
                start, block, tile = first, gl.load(index_ptr + first), gl.load(tile_ptr + first)
        if SPLIT > 1:
            # A row without tiles has one dead tile, which needs only its first step.
            count = gl.where(tile < 0, 1, count * SPLIT)
            start, full, block = start * SPLIT, full * SPLIT, block * SPLIT
            jump_left, jump = jump_left * SPLIT, jump * SPLIT
        steps = gl.where(is_item, count, 2)

        slot = turn & (Q_BUFFERS - 1)
        for c in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(slot * GROUPS + c), ((turn >> (Q_BUFFERS - 1)) & 1) ^ 1)
        record = gl.where(number == BATCH_HEAD, batch_head, 0)
        record = gl.where(number == BATCH, batch, record)
        record = gl.where(number == HEAD, head, record)
        record = gl.where(number == FIRST_Q, first_q, record)
        record = gl.where(number == FULL, gl.where(is_item, full, 1), record)
        record = gl.where(number == COUNT, gl.where(is_item, count, 0), record)
        record = gl.where(number == START, start, record)
        record = gl.where(number == TILE, tile, record)
        record = gl.where(number == PART, part, record)
        record = gl.where(number == Q_LIMIT, q_limit, record)
        record = gl.where(number == K_LIMIT, k_limit, record)
        record = gl.where(number == JUMP_LEFT, jump_left, record)
        record = gl.where(number == JUMP, jump, record)
        record = gl.where(number == BLOCK, block, record)
        record = recorded(CHANGES, changes, record, number, head, q_len, k_len)
        record_s.index(turn % RECORDS).store(record)
        for c in gl.static_range(GROUPS):
            bar = q_full.index(slot * GROUPS + c)
            mbarrier.arrive(bar, count=1)
            if is_item:
                mbarrier.expect(bar, Q_BYTES)
                async_load(q_desc, [batch, head, first_q + c * ROWS, 0], bar, q_s.index(slot * GROUPS + c))
                if q_rest_desc is not None:
                    async_load(
                        q_rest_desc, [batch, head, first_q + c * ROWS, D], bar, q_rest_s.index(slot * GROUPS + c)
                    )
            else:
                mbarrier.arrive(bar, count=1)
        turn += 1

        place = start
        for i in range(steps):
            stage = step % STAGES
            first_k = block * BLOCK_N
            place += gl.where(is_item, 1, 0)
            if HAS_LENGTHS and (is_item & (count - i - 1 == jump_left)):
                place += jump
            block = block_at(index_ptr, place, SPLIT)
            mbarrier.wait(kv_empty.index(stage), ((step // STAGES) & 1) ^ 1)
            if is_item:
                mbarrier.expect(k_full.index(stage), K_BYTES + CHANGES.BYTES_OF_KEY * BLOCK_N)
                load_with_keys(CHANGES, changes, changes_s, stage, k_full.index(stage), batch, head, first_k)
                async_load(k_desc, [batch, kv_head, first_k, 0], k_full.index(stage), k_s.index(stage))
                if k_rest_desc is not None:
                    async_load(k_rest_desc, [batch, kv_head, first_k, D], k_full.index(stage), k_rest_s.index(stage))
            else:
                mbarrier.arrive(k_full.index(stage), count=1)
            if step == 0:
                mbarrier.arrive(v_full.index(stage), count=1)
            elif is_item | (i == 0):
                mbarrier.expect(v_full.index(stage), V_BYTES)
                async_load(v_desc, [v_batch, v_head, v_first, 0], v_full.index(stage), v_s.index(stage))
                if v_rest_desc is not None:
                    async_load(v_rest_desc, [v_batch, v_head, v_first, DV], v_full.index(stage), v_rest_s.index(stage))
            load_last(CHANGES, changes, changes_s, step, is_item, batch, head, first_q, first_k, GROUPS, BLOCK_N)
            v_batch, v_head, v_first = batch, kv_head, first_k
            step += 1


# ---------------------------------------------------------------------- the warpgroups


@gluon.jit
def row_maximum(s, added):
    """The maximum of each row of s, [ROWS]. added: what is added to the scores of each thread, [ROWS, 4], or of the
    tile, a number; or None.
    """
    mine = gl.max(gl.max(gl.max(by_thread(s), 4), 2), 1)
    if added is not None:
        mine += added
    return gl.convert_layout(gl.max(mine, 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def scale_of_rows(maximum, qk_scale):
    """The factor of scores with biases, [ROWS]. maximum: of each row, already times qk_scale.

    The factor is qk_scale, unless the maximum is so large that its rounding could make weights infinite, or all of them
    0. Then it is the next power of 2 above qk_scale: products are exact, the largest score has weight 1, and smaller
    scores keep their order, but their weights are next to arbitrary.
    """
    power_above = as_float((gl.cast(qk_scale, gl.int32, bitcast=True) & 0x7F800000) + 0x00800000)
    return gl.where(gl.abs(maximum) < COARSE, qk_scale, power_above)


@gluon.jit
def by_own_scale(maximum, qk_scale):
    """A maximum in the scale of `scale_of_rows`, converted to qk_scale without a division, which would round."""
    of_power_above = as_float((gl.cast(qk_scale, gl.int32, bitcast=True) & 0x007FFFFF) + 0x3F000000)  # 1/2 to 1
    return maximum * gl.where(gl.abs(maximum) < COARSE, 1.0, of_power_above)


@gluon.constexpr_function
def rescaling(numbers):
    """The PTX of `rescaled` for this many numbers a thread, and its operands: results, numbers, factors. A thread holds
    numbers of two rows, in pairs: two of the first row, two of the second, and so on.
    """
    differ = f"setp.neu.f32 p, ${2 * numbers}, 0f3F800000; setp.neu.or.f32 p, ${2 * numbers + 2}, 0f3F800000, p;"
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * numbers + i};" for i in range(numbers))
    code = f".reg .pred p; {differ} vote.sync.any.pred p, p, -1; @!p bra same; {products} same:"
    operands = [*["=f"] * numbers, *map(str, range(numbers)), *["f"] * numbers]
    return "{ " + code + " }", ",".join(operands)


@gluon.jit
def rescaled(acc, factors):
    """acc times one factor a row, [ROWS, 1]. A warp whose factors are all 1 skips the multiplications."""
    NUMBERS: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    CODE: gl.constexpr = rescaling(NUMBERS)
    factors = factors.broadcast_to(acc.shape[0], acc.shape[1])
    return gl.inline_asm_elementwise(
        CODE[0], CODE[1], [acc, factors], dtype=gl.float32, is_pure=False, pack=NUMBERS
    )  # fmt: skip


@gluon.jit
def opaque(x):
    """x, unchanged: a scheduling barrier, written as a volatile move for which ptxas emits no instruction.

    LLVM cannot move computations of x across it. Without it, LLVM in Triton 3.7 and 3.9 hoists the tests of mask bits
    out of the branch for partial tiles, and every tile runs them before its matrix products.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def exchanged_with_nobody(x):
    """x, through a shuffle of each thread with itself: a scheduling barrier.

    ptxas does not move a shuffle across the wait behind it, so the instructions that compute x stay before the wait. A
    branch that contains a shuffle stays a branch; ptxas would rather predicate one that only masks scores, and run it
    at every step.
    """
    CONSTRAINTS: gl.constexpr = "=f,f" if x.dtype == gl.float32 else "=r,r"
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 0, 31, -1;", CONSTRAINTS, [x], dtype=x.dtype, is_pure=False, pack=1
    )


@gluon.jit
def at_turn_of(C: gl.constexpr, OPERATION: gl.constexpr):
    """Waits at ("sync") or arrives at ("arrive") the named barrier of warpgroup C, which opens when the other arrives.

    A program has 16 named barriers; Triton itself uses the first few.
    """
    token = gl.zeros([128], gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    CODE: gl.constexpr = "bar." + OPERATION + (" 8" if C == 0 else " 9") + ", 256; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(CODE, "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def live_words(
    words_ptr, tile, first_row, place, k_left,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLIT: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    MAY_BE_FULL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The mask bits of the step at `place`, one a score, [ROWS, BLOCK_N // 32]. No bit is set if `tile` is -1. All are
    set if it is 0 and MAY_BE_FULL or HAS_LENGTHS. If HAS_LENGTHS, only the first `k_left` keys are live.
    """
    WORDS: gl.constexpr = BLOCK_N // 32 * SPLIT
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, BLOCK_N // 32, layout=gl.SliceLayout(0, LAYOUT))
    at = row[:, None] * WORDS + word[None, :]
    if SPLIT > 1:
        at += place % SPLIT * (BLOCK_N // 32)
    is_stored = (at >= 0) & (tile > 0)
    tile_ptr = words_ptr + gl.cast(tile - 1, gl.int64) * (BLOCK_M * WORDS)
    words = gl.load(tile_ptr + at, mask=is_stored, other=0)
    if MAY_BE_FULL or HAS_LENGTHS:
        words = gl.where(tile == 0, -1, words)
    if HAS_LENGTHS:
        left = gl.minimum(gl.maximum(k_left - word * 32, 0), 32)
        inside = gl.where(left == 32, -1, (1 << (left & 31)) - 1)
        words = words & inside[None, :]
    return words


@gluon.jit
def masked(s, words, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """s where its bit is set, else -inf."""
    shift = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    bits = (words.expand_dims(2) >> shift.expand_dims(0).expand_dims(0)) & 1
    bits = gl.convert_layout(bits.reshape([ROWS, BLOCK_N]), s.type.layout, assert_trivial=True)
    return gl.where(bits != 0, s, float("-inf"))


@gluon.jit
def finished(acc, factors, IS_NAN: gl.constexpr):
    """acc times one factor a row, [ROWS, 1]. IS_NAN: accumulators may be NaN where the factor is 0, and give 0."""
    out = acc * factors
    if IS_NAN:
        out = gl.where(factors == 0.0, 0.0, out)
    return out


@gluon.jit
def store_part(part_ptr, out, first_row, FIRST: gl.constexpr, PADDED_DV: gl.constexpr):
    """Writes channels from FIRST on to a chunk [., PADDED_DV].

    `opaque` keeps the compiler from computing the addresses before the loop, which has no registers for them.
    """
    row = opaque(first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, out.type.layout)))
    column = gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout))
    if FIRST > 0:
        column += FIRST
    gl.store(part_ptr + (row[:, None] * PADDED_DV + column[None, :]), out)


@gluon.jit
def send(
    out, rest, out_descs, out_s, C: gl.constexpr, batch, head, first_q, FIRST: gl.constexpr, DV: gl.constexpr,
    DV_REST: gl.constexpr,
):  # fmt: skip
    """Writes channels from FIRST on, and the rest from DV on if DV_REST is not 0, through this warpgroup's buffers."""
    o_desc, o_rest_desc = out_descs
    o_s, o_rest_s = out_s
    tma.store_wait(0)  # until the last tile has been read
    o_s.index(C).store(out.to(o_s.dtype))
    if DV_REST > 0:
        o_rest_s.index(C).store(rest.to(o_s.dtype))
    fence_async_shared()
    async_store(o_desc, [batch, head, first_q, FIRST], o_s.index(C))
    if DV_REST > 0:
        async_store(o_rest_desc, [batch, head, first_q, DV], o_rest_s.index(C))


@gluon.constexpr_function
def layout_of_bits(BLOCK_N):
    """The layout of [ROWS, BLOCK_N] scores, seen as [ROWS, BLOCK_N // 32, 32]: each thread holds the mask words of its
    scores.
    """
    return gl.DistributedLinearLayout(
        ([[0, 1, 0], [0, 2, 0]] if BLOCK_N == 128 else [[0, 1, 0]]) + [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [ROWS, BLOCK_N // 32, 32],
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
def softmax(CHANGES: gl.constexpr, s, added, m_i, l_i, qk_scale, IN_TURNS: gl.constexpr):
    """`(weights, new maxima, new sums, factors of what is summed so far)`. added: from `left_to_rows`."""
    OF_THREADS: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    highest = row_maximum(s, added) if CHANGES.LEAVES_TO_ROWS else row_maximum(s, None)
    if CHANGES.KEEPS_UNITS:
        m_new = gl.maximum(m_i, highest)
        grows = (m_new - m_i) * qk_scale > SLACK
    else:
        scale = scale_of_rows(highest * qk_scale, qk_scale) if CHANGES.MAY_BE_COARSE else qk_scale
        m_new = gl.maximum(m_i, highest * scale)
        grows = m_new - m_i > SLACK
    if not IN_TURNS:
        m_new = gl.where(grows, m_new, m_i)
    # A query that has met no live key yet has maximum -inf, and -inf - -inf is NaN; 0 gives exp2(-inf) = 0.
    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    if not CHANGES.LEAVES_TO_ROWS:
        if CHANGES.KEEPS_UNITS:
            p = gl.exp2((s - m_safe[:, None]) * qk_scale)
        else:
            scale = scale_of_rows(m_new, qk_scale)[:, None] if CHANGES.MAY_BE_COARSE else qk_scale
            p = gl.exp2(s * scale - m_safe[:, None])
    elif not CHANGES.BY_THREAD:  # one number for the tile
        p = gl.exp2(s * qk_scale - (m_safe - added * qk_scale)[:, None])
    else:
        less = gl.convert_layout(m_safe, OF_THREADS, assert_trivial=True)[:, None]
        if CHANGES.KEEPS_UNITS:
            exponents = plus_of_threads(s, added - less) * qk_scale
            # The decay may be lost to rounding; no weight may become infinite then.
            p = gl.exp2(gl.where(exponents > SLACK, SLACK, exponents))
        else:
            p = gl.exp2(plus_of_threads(s * qk_scale, added * qk_scale - less))
    decay = gl.exp2((m_i - m_safe) * qk_scale if CHANGES.KEEPS_UNITS else m_i - m_safe)
    l_i = l_i * gl.convert_layout(decay, OF_THREADS, assert_trivial=True)[:, None] + sums_of_threads(p)
    return p, m_new, exchanged_with_nobody(l_i), decay


@gluon.jit
def finish_rows(
    CHANGES: gl.constexpr, changes, m_i, l_i, record_s, ended, outputs, C: gl.constexpr, SHAPE: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """Writes the lse of an item's rows, or the maxima and sums of a chunk's. Returns the factors of the accumulator."""
    PADDED_DV: gl.constexpr = SHAPE.PADDED_DV
    BLOCK_M: gl.constexpr = SHAPE.GROUPS * ROWS
    S_ROWS: gl.constexpr = m_i.type.layout
    lse_ptr, parts_ptr, qk_scale, q_len = outputs
    total = gl.convert_layout(gl.sum(l_i, 1), S_ROWS, assert_trivial=True)
    row = C * ROWS + gl.arange(0, ROWS, layout=S_ROWS)
    part = field(record_s, ended, PART)
    maximum = m_i
    if CHANGES.KEEPS_UNITS:  # a bias may be the lowest number of fp32
        maximum = gl.where(m_i == float("-inf"), float("-inf"), gl.maximum(m_i * qk_scale, LOWEST))
    elif CHANGES.MAY_BE_COARSE:
        maximum = by_own_scale(m_i, qk_scale)
    if HAS_PARTS and part > 0:
        inverse = gl.full([ROWS], 1.0, gl.float32, layout=S_ROWS)
        if HAS_LENGTHS and CHANGES.MAY_BE_NAN:  # past the lengths a bias may be NaN
            is_past = field(record_s, ended, FIRST_Q) + row >= field(record_s, ended, Q_LIMIT)
            maximum = gl.where(is_past, float("-inf"), maximum)
            total = gl.where(is_past, 0.0, total)
            inverse = gl.where(is_past, 0.0, 1.0)
        part_ptr = parts_ptr + gl.cast(part - 1, gl.int64) * (BLOCK_M * (PADDED_DV + 2))
        gl.store(part_ptr + BLOCK_M * PADDED_DV + row, maximum)
        gl.store(part_ptr + BLOCK_M * (PADDED_DV + 1) + row, total)
    else:
        q_row = field(record_s, ended, FIRST_Q) + row
        is_empty = total == 0.0
        if HAS_LENGTHS:
            is_empty = is_empty | (q_row >= field(record_s, ended, Q_LIMIT))
        maximum = gl.where(qk_scale < NO_SCALE, 0.0, maximum)
        maximum, total, shrinks = finished_rows(CHANGES, changes, maximum, total, field(record_s, ended, HEAD))
        lse = gl.where(is_empty, float("-inf"), (maximum + gl.log2(total)) * LN2)
        at = gl.cast(field(record_s, ended, BATCH_HEAD), gl.int64) * q_len + q_row
        gl.store(lse_ptr + at, lse, mask=q_row < q_len)
        inverse = gl.where(is_empty, 0.0, shrinks / total)
    return inverse


@gluon.jit
def finish_out(
    acc, acc_rest, alpha, outputs, record_s, ended, C: gl.constexpr, SHAPE: gl.constexpr, IS_NAN: gl.constexpr,
    HAS_PARTS: gl.constexpr,
):  # fmt: skip
    """Writes an item's rows of out, or a chunk's accumulator. Returns the new accumulator.

    acc_rest: the accumulator of the channels from DV on if DV_REST is not 0. IS_NAN: accumulators past the lengths may
    be NaN.
    """
    DV: gl.constexpr = SHAPE.DV
    DV_REST: gl.constexpr = SHAPE.DV_REST
    OUT: gl.constexpr = SHAPE.OUT
    PADDED_DV: gl.constexpr = SHAPE.PADDED_DV
    out_descs, out_s, parts_ptr = outputs
    out = finished(acc, gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None], IS_NAN)
    rest = out
    if DV_REST > 0:
        rest = finished(acc_rest, gl.convert_layout(alpha, gl.SliceLayout(1, acc_rest.type.layout))[:, None], IS_NAN)
    # Without this ptxas keeps out in other registers than acc, and spills at D = 128. Kernels that did not spill keep
    # the code that was measured.
    if SHAPE.D != DV or SHAPE.D_REST > 0 or DV > 128 or HAS_PARTS:
        acc = out  # in the same registers: the next product does not accumulate onto it
    part = field(record_s, ended, PART)
    if HAS_PARTS and part > 0:
        part_ptr = parts_ptr + gl.cast(part - 1, gl.int64) * (SHAPE.GROUPS * ROWS * (PADDED_DV + 2))
        store_part(part_ptr, out, C * ROWS, 0, PADDED_DV)
        if DV_REST > 0:
            store_part(part_ptr, rest, C * ROWS, DV, PADDED_DV)
    else:
        batch, head = field(record_s, ended, BATCH), field(record_s, ended, HEAD)
        first_q = field(record_s, ended, FIRST_Q) + C * ROWS
        if OUT == DV:
            send(out, rest, out_descs, out_s, C, batch, head, first_q, 0, DV, DV_REST)
        else:
            halves = gl.split(out.reshape([ROWS, 2, OUT]).permute((0, 2, 1)))
            send(halves[0], rest, out_descs, out_s, C, batch, head, first_q, 0, DV, DV_REST)
            send(halves[1], rest, out_descs, out_s, C, batch, head, first_q, OUT, DV, 0)
    return acc


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


@gluon.jit
def tiles_of(dtype: gl.constexpr, COUNT: gl.constexpr, TOKENS: gl.constexpr, CHANNELS: gl.constexpr):
    """Shared memory for COUNT tiles of TOKENS tokens."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, CHANNELS], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, TOKENS, CHANNELS], LAYOUT)


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
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * GROUPS, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * GROUPS, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for c in gl.static_range(Q_BUFFERS * GROUPS):
        mbarrier.init(q_full.index(c), count=2)
        mbarrier.init(q_empty.index(c), count=1 if Q_BUFFERS == 2 else 128)
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
