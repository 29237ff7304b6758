"""The loading warp of the Hopper forward: finds items, and loads queries, keys and values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseflash.backends.triton.changes.hopper_steps import load_last, load_with_keys, recorded
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
)
from sparseflash.backends.triton.hopper.tiles import ROWS, block_at, bytes_of, load_tile
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

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of one warp


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
def count_below(index_ptr, start, stop, limit):
    """How many of the increasing numbers index[start : stop] are below `limit`."""
    CHUNK: gl.constexpr = 128
    count = 0
    for first in range(start, stop, CHUNK):
        at = first + gl.arange(0, CHUNK, layout=LANES)
        block = gl.load(index_ptr + at, mask=at < stop, other=2147483647)
        count += gl.sum((block < limit).to(gl.int32), 0)
    return count


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
                at = slot * GROUPS + c
                load_tile(q_desc, q_rest_desc, q_s, q_rest_s, at, bar, batch, head, first_q + c * ROWS)
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
                load_tile(k_desc, k_rest_desc, k_s, k_rest_s, stage, k_full.index(stage), batch, kv_head, first_k)
            else:
                mbarrier.arrive(k_full.index(stage), count=1)
            if step == 0:
                mbarrier.arrive(v_full.index(stage), count=1)
            elif is_item | (i == 0):
                mbarrier.expect(v_full.index(stage), V_BYTES)
                load_tile(v_desc, v_rest_desc, v_s, v_rest_s, stage, v_full.index(stage), v_batch, v_head, v_first)
            load_last(CHANGES, changes, changes_s, step, is_item, batch, head, first_q, first_k, GROUPS, BLOCK_N)
            v_batch, v_head, v_first = batch, kv_head, first_k
            step += 1
