"""A tile of streamed tokens is contiguous, or gathered from small blocks: `GATHERED` is their size in tokens, or 0.
`first` is the number of the first token, a scalar, or of a gathered tile the numbers of all its tokens, [TOKENS].
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.device_functions.fp32_split import PIECES, PIECES_CORRECTED


@triton.jit
def token_numbers(first, TOKENS: tl.constexpr):
    """The numbers of all tokens of a tile, [TOKENS]."""
    if first.type.is_block():
        return first
    else:
        return first + tl.arange(0, TOKENS)


@triton.jit
def along_queries(x, TRANSPOSED: tl.constexpr):
    """Expands a number per query to broadcast with scores, which are `[keys, queries]` if TRANSPOSED."""
    return x[None, :] if TRANSPOSED else x[:, None]


@triton.jit
def along_keys(x, TRANSPOSED: tl.constexpr):
    """Expands a number per key to broadcast with scores."""
    return x[:, None] if TRANSPOSED else x[None, :]


@triton.jit
def load_tokens(
    x, batch, head, first, length, strides,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TOKENS: tl.constexpr, INSIDE: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The tokens of a tile of x[batch, head], [TOKENS, PADDED_DIM], zeros past the ends; with PIECES, their pieces.

    `x` is a tensor descriptor if TMA, a pointer otherwise; INSIDE promises that no token is past the end.
    """
    if PRECISION == PIECES or PRECISION == PIECES_CORRECTED:
        first_piece = load_columns(
            x, batch, head, first, length, strides, 0, PADDED_DIM, PADDED_DIM, TOKENS, INSIDE, TMA
        )
        second_piece = load_columns(
            x, batch, head, first, length, strides, PADDED_DIM, PADDED_DIM, PADDED_DIM, TOKENS, INSIDE, TMA
        )
        third_piece = load_columns(
            x, batch, head, first, length, strides, 2 * PADDED_DIM, PADDED_DIM, PADDED_DIM, TOKENS, INSIDE, TMA
        )
        return first_piece, second_piece, third_piece
    else:
        return load_columns(x, batch, head, first, length, strides, 0, DIM, PADDED_DIM, TOKENS, INSIDE, TMA)


@triton.jit
def load_columns(
    x, batch, head, first, length, strides,
    COLUMN: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TOKENS: tl.constexpr, INSIDE: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """DIM columns of a tile of tokens from COLUMN on, padded with zeros to [TOKENS, PADDED_DIM]; see load_tokens."""
    if TMA:
        return x.load([batch, head, first, COLUMN]).reshape(TOKENS, PADDED_DIM)
    else:
        tokens = tl.arange(0, TOKENS)
        dims = tl.arange(0, PADDED_DIM)
        # The start is a 64-bit scalar and the rest fits in 32 bits, so tensors may have more than 2^31 elements.
        start = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1] + COLUMN
        if first.type.is_block():
            tokens = tl.cast(first, tl.int64)
        else:
            start += tl.cast(first, tl.int64) * strides[2]
        pointers = x + start + (tokens[:, None] * strides[2] + dims[None, :])
        if INSIDE:
            if PADDED_DIM == DIM:
                return tl.load(pointers)
            else:
                return tl.load(pointers, mask=dims[None, :] < DIM, other=0.0)
        else:
            if not first.type.is_block():
                tokens = first + tokens
            return tl.load(pointers, mask=(tokens < length)[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def store_tokens(
    x_ptr, value, batch, head, first, length, strides,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_tokens`."""
    tokens = tl.arange(0, TOKENS)
    dims = tl.arange(0, PADDED_DIM)
    start = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    start += tl.cast(first, tl.int64) * strides[2]
    pointers = x_ptr + start + (tokens[:, None] * strides[2] + dims[None, :])
    inside = (first + tokens < length)[:, None]
    tl.store(pointers, value, mask=inside if PADDED_DIM == DIM else inside & (dims < DIM)[None, :])


@triton.jit
def numbers_of_rows(
    x, batch_head, first_q, rows, q_len, row_stride, other,
    TOKENS: tl.constexpr, INSIDE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One number for each query in `rows`, [TOKENS]; past the end `other`, or 0 if TMA.

    `x` is a descriptor of [B * Hq, Nq] if TMA, otherwise a pointer to [B, Hq, row_stride], from which every thread
    loads its numbers one at a time.
    """
    if TMA:
        return x.load([batch_head, first_q]).reshape(TOKENS)
    else:
        at = x + tl.cast(batch_head, tl.int64) * row_stride + rows
        if INSIDE:
            return tl.load(at)
        else:
            return tl.load(at, mask=rows < q_len, other=other)


@triton.jit
def part_pointers(parts_ptr, part, SIZE: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Pointers to [ROWS, DIMS] numbers of a partial result, in row-major order. A part has SIZE numbers; FIRST is the
    offset in the part.
    """
    at = tl.arange(0, ROWS)[:, None] * DIMS + tl.arange(0, DIMS)[None, :]
    return parts_ptr + tl.cast(part, tl.int64) * SIZE + FIRST + at


@triton.jit
def live_scores(
    words_ptr, tile, first_q, first_k,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    MAY_BE_FULL: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The live scores of the TILE_M x TILE_N patch at (first_q, first_k) of a mask tile; all are live if tile is 0.

    A word is loaded once for all its scores (usually 32) and expanded by shifts. Loading it once per score takes
    several times as long.
    """
    STORED: tl.constexpr = min(BLOCK_K, 32)
    BITS: tl.constexpr = min(TILE_N, 32)
    WORDS: tl.constexpr = BLOCK_K // STORED
    q = first_q % BLOCK_Q + tl.arange(0, TILE_M)
    word = first_k % BLOCK_K // STORED + tl.arange(0, TILE_N // BITS)
    number = tl.maximum(tile, 1) - 1 if MAY_BE_FULL else tile - 1
    tile_ptr = words_ptr + tl.cast(number, tl.int64) * (BLOCK_Q * WORDS)
    shift = tl.arange(0, BITS)
    if BITS < STORED:  # the patch is narrower than a word
        shift += first_k % STORED
    if TRANSPOSED:
        words = tl.load(tile_ptr + (word[:, None] + q[None, :] * WORDS))
        if MAY_BE_FULL:
            words = tl.where(tile > 0, words, -1)
        bits = (words[:, None, :] >> shift[None, :, None]) & 1
        return bits.reshape(TILE_N, TILE_M) != 0
    else:
        words = tl.load(tile_ptr + (q[:, None] * WORDS + word[None, :]))
        if MAY_BE_FULL:
            words = tl.where(tile > 0, words, -1)
        bits = (words[:, :, None] >> shift[None, None, :]) & 1
        return bits.reshape(TILE_M, TILE_N) != 0


@triton.jit
def live_in_row(
    words_ptr, tile, first_q, first_k, k_length,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    GATHERED: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """`live_scores` of a tile of keys for a program that holds queries; keys past the sequence's length are dead."""
    patch_k = 0 if GATHERED > 0 else first_k
    live = live_scores(words_ptr, tile, first_q, patch_k, BLOCK_Q, BLOCK_K, TILE_M, TILE_N, HAS_LENGTHS, False)
    if HAS_LENGTHS:
        live = live & (token_numbers(first_k, TILE_N) < k_length)[None, :]
    return live
