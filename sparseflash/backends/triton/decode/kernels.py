"""Split-K decoding: one program sums over a share of the keys for a group of query heads; a second kernel combines the
shares.

The query heads that share a key head are rows of one tile, so the keys are read once for all of them. The kernels read
the lengths from device memory: there is no plan, and the grid depends only on the capacity of the cache, so a CUDA
graph can be replayed while the cache grows.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from sparseflash.backends.triton.decode.changes import changed
from sparseflash.backends.triton.device_functions.softmax import LN2, decay, softmax_step

PAGES = tl.constexpr("pages")
MASK = tl.constexpr("mask")


@dataclass(frozen=True)
class Shape:
    """The compile-time argument SHAPE of `decode_kernel`: its tiles, and what of it is compiled."""

    D: int
    DV: int
    PADDED_D: int
    PADDED_DV: int
    BLOCK_M: int  # the kernel's tiles
    BLOCK_N: int
    PAGE: int  # tokens of a page
    BLOCK_Q: int  # of the mask
    BLOCK_K: int
    WALK: str  # "range", PAGES or MASK
    KEEP: bool  # see softmax.py
    PRECISION: str
    CAPPED: bool
    IS_LOG: bool
    CHANGED: bool  # whether any score modification is applied
    HARDWARE_TANH: bool


@triton.jit
def live_range(length, start, q_len, window, sinks, BLOCK_N: tl.constexpr):
    """The tiles of BLOCK_N keys with a live key.

    Returns `(first tile of the sinks, number of these tiles, first tile of the rest, number of all tiles)`.
    """
    end = (length + BLOCK_N - 1) // BLOCK_N
    first_sink = start // BLOCK_N
    first, sink_tiles = first_sink, tl.zeros([], tl.int32)
    if window > 0:
        first = tl.maximum(length - q_len - window + 1, start) // BLOCK_N
        if sinks > 0:
            stop = (start + sinks + BLOCK_N - 1) // BLOCK_N
            sink_tiles = tl.maximum(tl.minimum(stop, first) - first_sink, 0)
    return first_sink, sink_tiles, first, sink_tiles + tl.maximum(end - first, 0)


@triton.jit
def parts_of(sums_ptr, parts, PADDED_DV: tl.constexpr):
    """Pointers to the maxima and the totals, fp32 [parts] each. They follow the sums in one array, because one
    allocation costs the host less than three."""
    maxima_ptr = sums_ptr + tl.cast(parts, tl.int64) * PADDED_DV
    return maxima_ptr, maxima_ptr + parts


@triton.jit
def entry_of(i, upper_start, upper_count, lower_start, SUB: tl.constexpr):
    """The entry of the mask's lists for the i-th tile; the upper block row's tiles come before the lower's."""
    return tl.where(i < upper_count * SUB, upper_start + i // SUB, lower_start + i // SUB - upper_count)


@triton.jit
def first_key_of(
    i, walked,
    onward,  # offset in keys, a number or int32 [BLOCK_N]
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, BLOCK_K: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """The number of the key at offset `onward` in the i-th tile.

    A chosen page that does not exist gives the sequence's length, which marks a dead key. After the last tile it is any
    key that is valid in the block table.
    """
    span, pages, rows, _ = walked
    count, first_sink, sink_tiles, first, length, capacity = span
    if WALK == PAGES:
        pages_ptr, choices = pages
        place = i * BLOCK_N + onward
        page = tl.load(pages_ptr + place // PAGE, mask=place < choices * PAGE, other=-1)
        exists = (page >= 0) & (page < (capacity + PAGE - 1) // PAGE)
        key = tl.where(exists, page.to(tl.int32) * PAGE + place % PAGE, length)
    elif WALK == MASK:
        index_ptr, upper_start, upper_count, lower_start = rows
        SUB: tl.constexpr = BLOCK_K // BLOCK_N
        entry = entry_of(i, upper_start, upper_count, lower_start, SUB)
        block = tl.load(index_ptr + entry, mask=i < count, other=0)
        key = block * BLOCK_K + i % SUB * BLOCK_N + onward
    else:
        key = tl.where(i < sink_tiles, first_sink + i, first + i - sink_tiles) * BLOCK_N + onward
    return key


@triton.jit
def page_of(key, walked, PAGE: tl.constexpr):
    """The page of the caches with a key, int64; without pages, the batch element."""
    span, _, _, table = walked
    _, _, _, _, length, _ = span
    table_ptr, table_width, batch = table
    page = batch
    if table_ptr is not None:
        page = tl.load(table_ptr + batch * table_width + key // PAGE, mask=key < length, other=0).to(tl.int64)
    return page


@triton.jit
def keys_of(
    i, walked, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, BLOCK_K: tl.constexpr, WALK: tl.constexpr
):  # fmt: skip
    """The keys of the i-th tile, int32 [BLOCK_N], and their pages, int64 [BLOCK_N] or a scalar if all are the same."""
    lane = tl.arange(0, BLOCK_N)
    # If a tile has few pages, the page number is loaded once per page, not once per key.
    FEW: tl.constexpr = BLOCK_N % PAGE == 0 and BLOCK_N // PAGE <= 8
    if PAGE % BLOCK_N == 0:
        first_key = first_key_of(i, walked, 0, BLOCK_N, PAGE, BLOCK_K, WALK)
        key, page = first_key + lane, page_of(first_key, walked, PAGE)
    elif FEW:
        key, page = lane, tl.zeros([BLOCK_N], tl.int64)
        for piece in tl.static_range(BLOCK_N // PAGE):
            first_key = first_key_of(i, walked, piece * PAGE, BLOCK_N, PAGE, BLOCK_K, WALK)
            is_here = lane // PAGE == piece
            key = tl.where(is_here, first_key + lane % PAGE, key)
            page = tl.where(is_here, page_of(first_key, walked, PAGE), page)
    else:
        key = first_key_of(i, walked, lane, BLOCK_N, PAGE, BLOCK_K, WALK)
        page = page_of(key, walked, PAGE)
    return key, page


@triton.jit(
    do_not_specialize=[
        "lengths_stride", "starts_stride", "choices", "table_width", "batch_patterns", "head_patterns", "row_blocks",
        "parts", "scale", "qk_scale", "q_len", "rows", "heads", "kv_group", "group", "splits", "row_tiles", "window",
        "sinks", "capacity", "cap", "entries", "bias_batch", "bias_head", "bias_token",
    ],
    do_not_specialize_on_alignment=[
        "lengths_ptr", "starts_ptr", "table_ptr", "pages_ptr", "indptr_ptr", "index_ptr", "tile_ptr", "words_ptr",
        "pattern_ptr", "slopes_ptr", "relative_ptr", "buckets_ptr", "key_bias_ptr",
    ],
)  # fmt: skip
def decode_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, Hq, Nq, D]; [B or pages, Hkv, tokens, D and DV]
    sums_ptr,  # fp32 [parts, PADDED_DV], followed by the maxima and totals: see `parts_of`
    lengths_ptr, starts_ptr,  # integers [B], and [B] or None
    table_ptr, pages_ptr,  # integers [B, table_width] or None; [B, Hkv, choices] or None
    indptr_ptr, index_ptr, tile_ptr, words_ptr, pattern_ptr,  # of the mask, or None
    slopes_ptr, relative_ptr,  # [Hq], and [Hq, entries], or None
    buckets_ptr, key_bias_ptr,  # int32 [capacity], by distance; [B, Hq, capacity]; or None
    lengths_stride, starts_stride, choices, table_width,
    batch_patterns, head_patterns, row_blocks,  # strides of the patterns, 0 if shared; block rows of the mask
    parts,  # B * heads * rows * splits
    scale, qk_scale,  # of modified scores; scale / ln 2, or 1 / ln 2 for modified scores
    q_len, rows,  # rows: group * q_len
    heads, kv_group,  # groups of query heads with a program each, and how many of these groups share a key head
    group,  # query heads per program
    splits, row_tiles, window, sinks, capacity,
    cap, entries, bias_batch, bias_head, bias_token,  # of score modifications
    strides,  # of q, k and v, each of batch, head and token
    SHAPE: tl.constexpr,
):  # fmt: skip
    """The sums over one share of the keys, for up to BLOCK_M rows. Row r is query r % q_len of head r // q_len."""
    D: tl.constexpr = SHAPE.D
    DV: tl.constexpr = SHAPE.DV
    PADDED_D: tl.constexpr = SHAPE.PADDED_D
    PADDED_DV: tl.constexpr = SHAPE.PADDED_DV
    BLOCK_M: tl.constexpr = SHAPE.BLOCK_M
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    PAGE: tl.constexpr = SHAPE.PAGE
    BLOCK_Q: tl.constexpr = SHAPE.BLOCK_Q
    BLOCK_K: tl.constexpr = SHAPE.BLOCK_K
    WALK: tl.constexpr = SHAPE.WALK
    KEEP: tl.constexpr = SHAPE.KEEP
    PRECISION: tl.constexpr = SHAPE.PRECISION
    CHANGED: tl.constexpr = SHAPE.CHANGED
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token = strides
    program = tl.program_id(0)
    split, item = program % splits, program // splits
    row_tile, batch_head = item % row_tiles, item // row_tiles
    batch, head = (batch_head // heads).to(tl.int64), batch_head % heads
    kv_head = head // kv_group
    # Lengths may be 64-bit integers, so they are clamped before the conversion to 32 bits.
    length = tl.maximum(tl.minimum(tl.load(lengths_ptr + batch * lengths_stride), capacity), 0).to(tl.int32)
    start = tl.zeros([], tl.int32)
    if starts_ptr is not None:
        start = tl.maximum(tl.minimum(tl.load(starts_ptr + batch * starts_stride), capacity), 0).to(tl.int32)

    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    position = length - q_len + row % q_len
    dims, v_dims = tl.arange(0, PADDED_D), tl.arange(0, PADDED_DV)
    of_row = (head * group + row // q_len).to(tl.int64) * q_head + (row % q_len).to(tl.int64) * q_token
    q_tile = tl.load(
        q_ptr + batch * q_batch + of_row[:, None] + dims[None, :], mask=(row < rows)[:, None] & (dims < D)[None, :],
        other=0.0,
    )  # fmt: skip

    # The tiles of keys, and this program's share of them.
    first_sink, sink_tiles, first, count = live_range(length, start, q_len, window, sinks, BLOCK_N)
    if WALK == PAGES:
        count = (choices * PAGE + BLOCK_N - 1) // BLOCK_N
        pages_ptr += (batch * (heads // kv_group) + kv_head) * choices
    SUB: tl.constexpr = BLOCK_K // BLOCK_N
    upper_start, upper_count, lower_start = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    if WALK == MASK:
        WORDS: tl.constexpr = (BLOCK_K + 31) // 32
        upper = tl.maximum(length - q_len, 0) // BLOCK_Q
        lower = tl.maximum(length - 1, 0) // BLOCK_Q  # the queries lie in one block row of the mask, or in two
        pattern = tl.load(pattern_ptr + batch * batch_patterns + head * head_patterns).to(tl.int64)
        indptr_ptr += pattern * row_blocks
        upper_start = tl.load(indptr_ptr + upper)
        upper_count = tl.load(indptr_ptr + upper + 1) - upper_start
        lower_start = tl.load(indptr_ptr + lower)
        lower_count = tl.where(lower > upper, tl.load(indptr_ptr + lower + 1) - lower_start, 0)
        count = (upper_count + lower_count) * SUB
    share = (count + splits - 1) // splits
    begin, end = split * share, tl.minimum((split + 1) * share, count)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DV], tl.float32)
    # The addresses of keys depend on loads (pages, tile lists), which are prefetched one tile ahead.
    walked = (
        (count, first_sink, sink_tiles, first, length, capacity), (pages_ptr, choices),
        (index_ptr, upper_start, upper_count, lower_start), (table_ptr, table_width, batch),
    )  # fmt: skip
    next_key, next_page = keys_of(begin, walked, BLOCK_N, PAGE, BLOCK_K, WALK)
    for i in range(begin, end):
        key, of_page = next_key, next_page
        next_key, next_page = keys_of(i + 1, walked, BLOCK_N, PAGE, BLOCK_K, WALK)
        exists = (key < length) & (key >= start)
        live = exists[None, :] & (key[None, :] <= position[:, None])
        if window > 0:
            live = live & ((key[None, :] > position[:, None] - window) | (key < start + sinks)[None, :])
        if WALK == MASK:
            of_block = tl.where(i < upper_count * SUB, upper, lower)
            live = live & (position // BLOCK_Q == of_block)[:, None]
            entry = entry_of(i, upper_start, upper_count, lower_start, SUB)
            number = tl.load(tile_ptr + entry).to(tl.int64)
            if number > 0:
                inner, bit = tl.maximum(position, 0) % BLOCK_Q, key % BLOCK_K
                word = ((number - 1) * BLOCK_Q + inner[:, None]) * WORDS + (bit // 32)[None, :]
                live = live & (((tl.load(words_ptr + word) >> (bit % 32)[None, :]) & 1) != 0)

        at = key.to(tl.int64)
        if table_ptr is not None:
            at = (key % PAGE).to(tl.int64)
        k_at = of_page * k_batch + kv_head.to(tl.int64) * k_head + at * k_token
        k_tile = tl.load(
            k_ptr + k_at[:, None] + dims[None, :], mask=exists[:, None] & (dims < D)[None, :], other=0.0
        )  # fmt: skip
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if CHANGED:
            of_head = tl.where(row < rows, head * group + row // q_len, 0)
            scores = changed(
                scores * scale, live & (row < rows)[:, None], position, key, batch, of_head, cap, slopes_ptr,
                relative_ptr, buckets_ptr, key_bias_ptr, entries, bias_batch, bias_head, bias_token, SHAPE,
            )  # fmt: skip
        p, alpha, m_i, l_i = softmax_step(scores, live, m_i, l_i, qk_scale, KEEP, PRECISION, CHANGED)
        v_at = of_page * v_batch + kv_head.to(tl.int64) * v_head + at * v_token
        v_tile = tl.load(
            v_ptr + v_at[:, None] + v_dims[None, :], mask=exists[:, None] & (v_dims < DV)[None, :], other=0.0
        )  # fmt: skip
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)

    part = (batch_head.to(tl.int64) * rows + row) * splits + split
    maxima_ptr, totals_ptr = parts_of(sums_ptr, parts, PADDED_DV)
    tl.store(maxima_ptr + part, m_i, mask=row < rows)
    tl.store(totals_ptr + part, l_i, mask=row < rows)
    tl.store(sums_ptr + part[:, None] * PADDED_DV + v_dims[None, :], acc, mask=(row < rows)[:, None])


@triton.jit(
    do_not_specialize=["parts", "scale", "qk_scale", "splits", "q_len", "q_heads"],
    do_not_specialize_on_alignment=["sink_ptr"],
)
def combine_kernel(
    sums_ptr,  # of decode_kernel
    out_ptr, lse_ptr,  # [B, Hq, Nq, DV], fp32 [B, Hq, Nq], both contiguous
    sink_ptr,  # [Hq], or None
    parts, scale, qk_scale, splits, q_len, q_heads,
    DV: tl.constexpr, PADDED_DV: tl.constexpr, SPLITS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Computes out and lse of one query of one head. A share without a live key has maximum -inf and sum 0.

    KEEP: maxima are of raw scores, in fp32, or of modified scores, whose scale is 1.
    """
    row = tl.program_id(0).to(tl.int64)
    split, dims = tl.arange(0, SPLITS), tl.arange(0, PADDED_DV)
    here = split < splits
    part = row * splits + split
    maxima_ptr, totals_ptr = parts_of(sums_ptr, parts, PADDED_DV)
    m_part = tl.load(maxima_ptr + part, mask=here, other=float("-inf"))
    l_part = tl.load(totals_ptr + part, mask=here, other=0.0)
    acc_part = tl.load(sums_ptr + part[:, None] * PADDED_DV + dims[None, :], mask=here[:, None], other=0.0)
    m_i = tl.max(m_part, 0)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + row // q_len % q_heads).to(tl.float32)
        m_i = tl.maximum(m_i, sink)
    empty = m_i == float("-inf")
    m_safe = tl.where(empty, 0.0, m_i)
    alpha = decay(m_part, m_safe, qk_scale, KEEP)
    total = tl.sum(l_part * alpha, 0)
    if sink_ptr is not None:
        total += tl.exp2((sink - m_safe) * qk_scale)
    total = tl.where(empty, 1.0, total)
    out = tl.sum(acc_part * alpha[:, None], 0)
    if KEEP:
        out = tl.div_rn(out, tl.full([PADDED_DV], 1.0, tl.float32) * total)
        lse = m_safe * scale + tl.log2(total) * LN2
    else:
        out = out / total
        lse = (m_safe + tl.log2(total)) * LN2
    tl.store(lse_ptr + row, tl.where(empty, float("-inf"), lse))
    out = tl.where(empty, 0.0, out)
    tl.store(out_ptr + row * DV + dims, out.to(out_ptr.dtype.element_ty), mask=dims < DV)
