"""Attention to chosen blocks, the forward: a program has a block of keys and gathers queries that have chosen it.

It writes their attention to this block alone. Then each query joins its blocks.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.softmax import LN2, softmax_step
from sparseflash.backends.triton.selected.forward import values_of
from sparseflash.backends.triton.selected.loads import store_columns, token_offsets
from sparseflash.backends.triton.selected.pieces import load_pieces, scores_of

SIZES = ["q_len", "k_len", "shift", "heads", "repeats", "group", "choices", "blocks", "span", "first_pair", "first"]


@dataclass(frozen=True)
class BlockShape:
    """A compile-time argument: see `tiles.Shape`."""

    LOW: int
    HIGH: int
    PADDED_LOW: int
    PADDED_HIGH: int
    DV: int
    PADDED_DV: int
    ROWS: int  # of a tile: queries times heads
    GROUP: int  # heads that share a choice, padded to a power of two
    PADDED: bool  # whether there are fewer
    BITS: int  # of an entry that hold the slot
    BLOCK_N: int
    CAUSAL: bool
    PRECISION: str
    FAR: bool


@triton.jit
def entries_at(entries_ptr, at, stop, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The entry of each row of a tile, of those from `at` on; -1 past the last."""
    place = at + tl.arange(0, ROWS) // GROUP
    return tl.load(entries_ptr + place, mask=place < stop, other=-1)


@triton.jit
def rows_of_entries(entry, choices, group, SHAPE: tl.constexpr):
    """`(query, place in all lists, head of the group, whether there is such a row)` of each row of a tile."""
    in_group = tl.arange(0, SHAPE.ROWS) % SHAPE.GROUP
    inside = entry >= 0
    if SHAPE.PADDED:
        inside = inside & (in_group < group)
    entry = tl.where(inside, entry, 0)
    query = entry >> SHAPE.BITS
    if SHAPE.FAR:
        query, in_group = query.to(tl.int64), in_group.to(tl.int64)
    return query, query.to(tl.int64) * choices + (entry & ((1 << SHAPE.BITS) - 1)), in_group, inside


@triton.jit
def item_of_program(
    stops_ptr, blocks_ptr, ends_ptr, first, number, blocks, GROUP: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """`(pair from the first of the chunk, block, first entry, end of the entries)` of a tile; none past the last."""
    program = tl.program_id(0)
    found = tl.load(blocks_ptr + program)
    exists = found < number
    found = tl.where(exists, found, 0)
    before = tl.load(stops_ptr + found - 1, mask=found > 0, other=0)
    stop = tl.load(ends_ptr + first + found)
    begin = tl.load(ends_ptr + first + found - 1, mask=first + found > 0, other=0)
    begin += ((program - before) * (ROWS // GROUP)).to(tl.int32)
    return found // blocks, found % blocks, begin, tl.where(exists, stop, begin)


@triton.jit
def keys_of_block(block, position, inside, k_len, span, CAUSAL: tl.constexpr):
    """`(first key, where the keys end that all rows see, where the keys end that some row sees)`."""
    begin = block * span
    end = tl.minimum(begin + span, k_len)
    whole = end
    if CAUSAL:
        end = tl.minimum(end, tl.max(tl.where(inside, position, -1), 0).to(tl.int32) + 1)
        whole = tl.minimum(end, tl.min(tl.where(inside, position, 2147483646), 0).to(tl.int32) + 1)
    return begin, whole, end


@triton.jit
def _with_keys(
    acc, m_i, l_i, q_low, q_high, k_ptr, v_ptr, start, position, k_len, qk_scale, k_strides, v_strides,
    SHAPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds BLOCK_N keys from `start` on to the running sums. If not MASKED, every query sees all of them."""
    PRECISION: tl.constexpr = SHAPE.PRECISION
    key = start + tl.arange(0, SHAPE.BLOCK_N)
    is_key = key < k_len
    scores, k_low, _ = scores_of(
        q_low, q_high, k_ptr, token_offsets(key, is_key, k_strides[2], SHAPE.FAR), is_key, SHAPE
    )  # fmt: skip
    live = None
    if MASKED:
        live = tl.broadcast_to(is_key[None, :], scores.shape)
        if SHAPE.CAUSAL:
            live = live & (key[None, :] <= position[:, None])
    p, alpha, m_i, l_i = softmax_step(scores, live, m_i, l_i, qk_scale, False, PRECISION, False)
    values = values_of(v_ptr, k_low, key, is_key, v_strides[2], SHAPE)
    return tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION), m_i, l_i


@triton.jit(do_not_specialize=[*SIZES, "number", "qk_scale"])
def block_forward_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, Hq, Nq, D], [B, Hkv, Nk, D], [B, Hkv, Nk, DV]
    entries_ptr, ends_ptr, stops_ptr, blocks_ptr,  # see Transposed, and items_of
    parts_ptr, lse_ptr,  # fp32 [pairs of the chunk, queries, choices, group, DV], and without DV in base 2; written
    q_len, k_len, shift, heads, repeats, group, choices, blocks, span, first_pair, first, number, qk_scale,
    strides,  # of batch, head that chooses, token and head of its group, of q; batch, head and token, of k and v
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Computes attention of the queries of a tile to one block."""
    ROWS: tl.constexpr = SHAPE.ROWS
    GROUP: tl.constexpr = SHAPE.GROUP
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    PADDED_DV: tl.constexpr = SHAPE.PADDED_DV
    q_strides, k_strides, v_strides = strides
    local, block, at, stop = item_of_program(stops_ptr, blocks_ptr, ends_ptr, first, number, blocks, GROUP, ROWS)
    pair = (first_pair + local).to(tl.int64)
    batch, head = pair // heads, pair % heads
    entry = entries_at(entries_ptr, at, stop, GROUP, ROWS)
    query, place, in_group, inside = rows_of_entries(entry, choices, group, SHAPE)
    position = query + shift
    offsets = query * q_strides[2] + in_group * q_strides[3]
    q_low, q_high = load_pieces(q_ptr + batch * q_strides[0] + head * q_strides[1], offsets, inside, SHAPE)
    k_ptr += batch * k_strides[0] + head // repeats * k_strides[1]
    v_ptr += batch * v_strides[0] + head // repeats * v_strides[1]
    begin, whole, end = keys_of_block(block, position, inside, k_len, span, SHAPE.CAUSAL)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DV], tl.float32)
    whole = begin + (whole - begin) // BLOCK_N * BLOCK_N
    for start in range(begin, whole, BLOCK_N):
        acc, m_i, l_i = _with_keys(
            acc, m_i, l_i, q_low, q_high, k_ptr, v_ptr, start, position, k_len, qk_scale, k_strides, v_strides, SHAPE,
            MASKED=False,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        acc, m_i, l_i = _with_keys(
            acc, m_i, l_i, q_low, q_high, k_ptr, v_ptr, start, position, k_len, qk_scale, k_strides, v_strides, SHAPE,
            MASKED=True,
        )  # fmt: skip

    empty = l_i == 0.0
    total = tl.where(empty, 1.0, l_i)
    row = (local.to(tl.int64) * q_len * choices + place) * group + in_group
    out = tl.where(empty[:, None], 0.0, acc / total[:, None])
    store_columns(parts_ptr, out, row * SHAPE.DV, inside, 0, SHAPE.DV, PADDED_DV)
    tl.store(lse_ptr + row, tl.where(empty, float("-inf"), m_i + tl.log2(total)), mask=inside)


@triton.jit
def queries_of_program(q_len, group, choices, first_pair, ROWS: tl.constexpr):
    """For each row of a program that merges the parts of queries: `(pair from the first, pair, head of the group,
    query, whether the query exists, its place in the lists of the pair)`.
    """
    tiles = tl.cdiv(q_len, ROWS)
    of_group = tl.program_id(0) // tiles
    local, in_group = (of_group // group).to(tl.int64), of_group % group
    pair = first_pair + local
    query = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    is_row = query < q_len
    lists = query.to(tl.int64) * choices
    return local, pair, in_group, query, is_row, lists


@triton.jit(do_not_specialize=["q_len", "heads", "group", "choices", "first_pair"])
def join_kernel(
    parts_ptr, lse_of_parts_ptr,  # as block_forward_kernel writes them
    chosen_ptr,  # see Transposed
    out_ptr, lse_ptr,  # [B, Hq, Nq, DV], fp32 [B, Hq, Nq] contiguous; written
    q_len, heads, group, choices, first_pair, strides,  # of out
    DV: tl.constexpr, PADDED_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Joins the blocks of some queries of one head, in the order of their lists."""
    local, pair, in_group, query, is_row, lists = queries_of_program(q_len, group, choices, first_pair, ROWS)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    for slot in range(0, choices):
        live = is_row & (tl.load(chosen_ptr + pair * q_len * choices + lists + slot, mask=is_row, other=-1) >= 0)
        row = (local * q_len * choices + lists + slot) * group + in_group
        highest = tl.maximum(highest, tl.load(lse_of_parts_ptr + row, mask=live, other=float("-inf")))
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DV], tl.float32)
    dims = tl.arange(0, PADDED_DV)
    for slot in range(0, choices):
        live = is_row & (tl.load(chosen_ptr + pair * q_len * choices + lists + slot, mask=is_row, other=-1) >= 0)
        row = (local * q_len * choices + lists + slot) * group + in_group
        weight = tl.exp2(tl.load(lse_of_parts_ptr + row, mask=live, other=float("-inf")) - safe)
        part = tl.load(
            parts_ptr + (row * DV)[:, None] + dims[None, :], mask=live[:, None] & (dims < DV)[None, :], other=0.0
        )  # fmt: skip
        total += weight
        acc += weight[:, None] * part
    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    head = pair % heads * group + in_group
    out_ptr += pair // heads * strides[0] + head * strides[1]
    store_columns(out_ptr, out, query.to(tl.int64) * strides[2], is_row, 0, DV, PADDED_DV)
    lse = tl.where(empty, float("-inf"), (safe + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    tl.store(lse_ptr + (pair * group + in_group) * q_len + query, lse, mask=is_row)
