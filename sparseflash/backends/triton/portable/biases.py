"""Biases in the kernels, whole or stored for the live tiles of a mask: what a tile of scores reads and what it writes
of their gradients.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.portable.loads import along_keys, along_queries, token_numbers


@triton.jit
def load_bias(
    bias_ptr, strides, batch, head, first_q, first_k, q, k, q_stop, k_len,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """A tile of a bias; if CUT, 0 for queries from `q_stop` on."""
    at = pointers_of_pairs(bias_ptr, strides, batch, head, first_q, first_k, TILE_M, TILE_N, TRANSPOSED)
    if MASKED:
        inside = along_queries(q < q_stop, TRANSPOSED) & along_keys(k < k_len, TRANSPOSED)
        return tl.load(at, mask=inside, other=0.0)
    elif CUT:
        return tl.load(at, mask=along_queries(q < q_stop, TRANSPOSED), other=0.0)
    else:
        return tl.load(at)


@triton.jit
def pointers_of_pairs(
    ptr, strides, batch, head, first_q, first_k, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    """Where the numbers of a tile of scores lie in a tensor [B, Hq, Nq, Nk] of these strides.

    The start is a 64-bit scalar and the rest fits in 32 bits, unless tokens are gathered or there is a fifth stride
    (`changed.strides_of_pairs`). 64-bit addresses for all scores would need more registers than a thread has.
    """
    rows, columns = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    if len(strides) > 4:
        rows = tl.cast(rows, tl.int64)
    start = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    if first_q.type.is_block():
        rows = tl.cast(first_q, tl.int64)
    else:
        start += tl.cast(first_q, tl.int64) * strides[2]
    if first_k.type.is_block():
        columns = tl.cast(first_k, tl.int64)
    else:
        start += tl.cast(first_k, tl.int64) * strides[3]
    return ptr + start + (
        along_queries(rows * strides[2], TRANSPOSED) + along_keys(columns * strides[3], TRANSPOSED)
    )  # fmt: skip


@triton.jit
def load_tile_bias(
    tile_bias_ptrs, numbers, batch, head, first_q, first_k, q, q_stop,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, CUT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """As `load_bias`, of one stored for the live tiles of the mask, in whose own tiles the kernel must run.

    tile_bias_ptrs: `StoredTiles`: the values, contiguous, the numbers of the tiles, int32 [P, Mq, W, 2], and the
    patterns. numbers: TileNumbers, of which the last two are Mq and W. Tiles are stored whole, so nothing is read past
    an end.
    """
    tile = number_of_tile(tile_bias_ptrs, numbers, batch, head, first_q // BLOCK_Q, first_k // BLOCK_K)
    tile += tl.cast(batch, tl.int64) * numbers.tiles_of_batch + tl.cast(head, tl.int64) * numbers.tiles_of_head
    at = places_in_tile(first_q, first_k, BLOCK_Q, BLOCK_K, TILE_M, TILE_N, TRANSPOSED)
    values = tile_bias_ptrs[0] + tile * (BLOCK_Q * BLOCK_K) + at
    if CUT:
        return tl.load(values, mask=along_queries(q < q_stop, TRANSPOSED), other=0.0)
    else:
        return tl.load(values)


@triton.jit
def number_of_tile(tile_bias_ptrs, numbers, batch, head, row, column):
    """The place of a live tile in the mask's list, int64, from its block row and column; see blockmask/numbering.py."""
    _, tile_numbers_ptr, pattern_ptr = tile_bias_ptrs
    pattern = tl.load(pattern_ptr + batch * numbers.patterns_of_batch + head * numbers.patterns_of_head)
    block_row = tl.cast(pattern * numbers.tile_rows + row, tl.int64)
    word_ptr = tile_numbers_ptr + 2 * (block_row * numbers.tile_words + column // 32)
    x = tl.load(word_ptr) & ~(-1 << column % 32)  # the live tiles before it, which are counted
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return tl.cast(tl.load(word_ptr + 1) + ((x + (x >> 16)) & 63), tl.int64)


@triton.jit
def places_in_tile(
    first_q, first_k,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Where the scores of a step stand in their tile of BLOCK_Q x BLOCK_K, row by row."""
    rows, columns = first_q % BLOCK_Q + tl.arange(0, TILE_M), first_k % BLOCK_K + tl.arange(0, TILE_N)
    return along_queries(rows * BLOCK_K, TRANSPOSED) + along_keys(columns, TRANSPOSED)


@triton.jit
def store_pair_gradients(
    ds, dpairs_ptr, strides, batch, head, first_q, first_k, q_len, k_len, MASKED: tl.constexpr
):  # fmt: skip
    """Writes the gradients of a tile of scores to `[B, Hq, Nq, Nk]` of these strides."""
    TILE_M: tl.constexpr = ds.shape[0]
    TILE_N: tl.constexpr = ds.shape[1]
    at = pointers_of_pairs(dpairs_ptr, strides, batch, head, first_q, first_k, TILE_M, TILE_N, False)
    ds = ds.to(dpairs_ptr.dtype.element_ty)
    if MASKED:
        q, k = token_numbers(first_q, TILE_M), token_numbers(first_k, TILE_N)
        tl.store(at, ds, mask=(q < q_len)[:, None] & (k < k_len)[None, :])
    else:
        tl.store(at, ds)


@triton.jit
def store_tile_gradients(
    ds, dtiles_ptr, dtiles_starts_ptr, tile_bias_ptrs, numbers, batch_head, batch, head, first_q, first_k,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of a bias of live tiles by a tile of scores, those of dead ones, which are 0, too.

    dtiles_starts_ptr: int64 [B * Hq], the first of the tiles to which each batch element and head writes.
    """
    tile = number_of_tile(tile_bias_ptrs, numbers, batch, head, first_q // BLOCK_Q, first_k // BLOCK_K)
    tile += tl.load(dtiles_starts_ptr + batch_head)
    at = places_in_tile(first_q, first_k, BLOCK_Q, BLOCK_K, TILE_M, TILE_N, False)
    tl.store(dtiles_ptr + tile * (BLOCK_Q * BLOCK_K) + at, ds.to(dtiles_ptr.dtype.element_ty))
