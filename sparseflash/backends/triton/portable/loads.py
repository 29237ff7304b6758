"""What the kernels share: reading a tile of tokens, reading the bits of a tile, and the walk along a row's tiles.

A tile of the tokens that a kernel streams is one piece of the sequence, or is gathered from small blocks that lie
anywhere in it. `GATHERED` is the size of those blocks in tokens, and 0 where the tile is one piece. What is called
`first` is then the first token of the tile, a number; or else the numbers of all its tokens, [TOKENS].
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.portable.fp32_split import PIECES

ITEM = tl.constexpr(8)  # numbers a work item


@triton.jit
def listed_block(index_ptr, start, i, TOKENS: tl.constexpr, GATHERED: tl.constexpr):
    """The block of tile `start + i` of the lists; if GATHERED, for each token of the tile the block that it is from."""
    if GATHERED > 0:
        return tl.load(index_ptr + ((start + i) * (TOKENS // GATHERED) + tl.arange(0, TOKENS) // GATHERED))
    else:
        return tl.load(index_ptr + start + i)


@triton.jit
def first_blocks(item_ptr, index_ptr, start, full, TOKENS: tl.constexpr, GATHERED: tl.constexpr):
    """The `listed_block` of an item's first full tile and of its first partial one.

    Blocks that are one number stand in the item itself, so that no load waits for `start`.
    """
    if GATHERED > 0:
        first = listed_block(index_ptr, start, 0, TOKENS, GATHERED)
        first_partial = listed_block(index_ptr, start, full, TOKENS, GATHERED)
    else:
        first, first_partial = tl.load(item_ptr + 4), tl.load(item_ptr + 5)
    return first, first_partial


@triton.jit
def tokens_of_block(block, i, BLOCK: tl.constexpr, TOKENS: tl.constexpr, GATHERED: tl.constexpr):
    """`first` of the tile that step i takes, of a block of BLOCK tokens that is walked in tiles of TOKENS."""
    if GATHERED > 0:
        return block * GATHERED + tl.arange(0, TOKENS) % GATHERED
    else:
        return block * BLOCK + i % (BLOCK // TOKENS) * TOKENS


@triton.jit
def token_numbers(first, TOKENS: tl.constexpr):
    """The numbers of all tokens of a tile, [TOKENS]."""
    if first.type.is_block():
        return first
    else:
        return first + tl.arange(0, TOKENS)


@triton.jit
def load_tokens(
    x, batch, head, first, length, strides,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TOKENS: tl.constexpr, INSIDE: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The tokens of a tile of x[batch, head], [TOKENS, PADDED_DIM], zeros past the ends; in full fp32 their pieces.

    `x` is a tensor descriptor if TMA, a pointer otherwise; INSIDE promises that no token is past the end. What holds
    the pieces has them side by side, in PADDED_DIM columns each.
    """
    if PRECISION == PIECES:
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
    """The columns from COLUMN on of a tile of tokens, [TOKENS, PADDED_DIM], zeros past DIM of them; see load_tokens."""
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
def part_pointers(parts_ptr, part, SIZE: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Where [ROWS, DIMS] numbers of a partial result lie, of which a part holds SIZE: from FIRST on, row by row."""
    at = tl.arange(0, ROWS)[:, None] * DIMS + tl.arange(0, DIMS)[None, :]
    return parts_ptr + tl.cast(part, tl.int64) * SIZE + FIRST + at


@triton.jit
def live_scores(
    words_ptr, tile, first_q, first_k,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    MAY_BE_FULL: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Which scores of the TILE_M x TILE_N patch at (first_q, first_k) of a mask tile are live; all, if tile is 0.

    One word is loaded for its scores, mostly 32, and spread by shifts: loading it once a score is 3 to 6 times slower.
    """
    STORED: tl.constexpr = min(BLOCK_K, 32)
    BITS: tl.constexpr = min(TILE_N, 32)
    WORDS: tl.constexpr = BLOCK_K // STORED
    q = first_q % BLOCK_Q + tl.arange(0, TILE_M)
    word = first_k % BLOCK_K // STORED + tl.arange(0, TILE_N // BITS)
    number = tl.maximum(tile, 1) - 1 if MAY_BE_FULL else tile - 1
    tile_ptr = words_ptr + tl.cast(number, tl.int64) * (BLOCK_Q * WORDS)
    shift = tl.arange(0, BITS)
    if BITS < STORED:  # a patch narrower than a word
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
def exponentials(scores, maximum, qk_scale, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """2^(scores * qk_scale - maximum), with the maximum in units of raw scores if PRECISE, else already scaled.

    Scaling first is one fused multiply-add a score. It rounds numbers the size of the score, which half precision does
    not notice; in fp32 the difference is taken first, and what is rounded is small.
    """
    if PRECISE:
        exponent = (scores - maximum) * qk_scale
        if PRECISION == "tf32":
            return tl.exp2(exponent)
        else:
            return exp2_rounded(exponent)
    else:
        return tl.exp2(scores * qk_scale - maximum)


@triton.jit
def exp2_rounded(x):
    """2^x to within an ulp: the hardware's is twice as far off, and exact for whole numbers only."""
    whole = tl.floor(x + 0.5)
    fraction = x - whole  # in [-1/2, 1/2]: the Taylor series of degree 7 errs by 5e-9
    series = 1.5252733804e-05
    series = series * fraction + 1.5403530393e-04
    series = series * fraction + 1.3333558146e-03
    series = series * fraction + 9.6181291076e-03
    series = series * fraction + 5.5504108665e-02
    series = series * fraction + 2.4022650696e-01
    series = series * fraction + 6.9314718056e-01
    series = series * fraction + 1.0
    return series * tl.exp2(whole)


@triton.jit
def decay(old_maximum, new_maximum, qk_scale, PRECISE: tl.constexpr):
    """The factor by which sums taken relative to the old maximum count relative to the new one; 0 if there was none."""
    if PRECISE:
        first = old_maximum == float("-inf")  # and -inf * 0 would be NaN
        return tl.where(first, 0.0, tl.exp2(tl.where(first, 0.0, old_maximum - new_maximum) * qk_scale))
    else:
        return tl.exp2(old_maximum - new_maximum)


@triton.jit
def count_below(index_ptr, start, stop, limit, STRIDE: tl.constexpr):
    """How many of the increasing block numbers index[start * STRIDE : stop * STRIDE : STRIDE] are below `limit`."""
    CHUNK: tl.constexpr = 128
    count = 0
    for first in range(start, stop, CHUNK):
        at = first + tl.arange(0, CHUNK)
        block = tl.load(index_ptr + at * STRIDE, mask=at < stop, other=2147483647)
        count += tl.sum((block < limit).to(tl.int32), 0)
    return count


@triton.jit
def cut_at_length(
    index_ptr, start, full, count, length, BLOCK: tl.constexpr, TOKENS: tl.constexpr, GATHERED: tl.constexpr
):  # fmt: skip
    """Leaves out the tiles at or past a sequence's length: `(full, at_end, masked)`.

    A row lists `full` full tiles, then `count - full` partial ones, of one block of BLOCK tokens each, or of TOKENS
    tokens gathered from increasing blocks. Of the full ones, the first `full` returned lie inside; the next, if
    `at_end` is 1, is cut by the length. Of the partial ones, the first `masked` begin inside.
    """
    UNIT: tl.constexpr = GATHERED if GATHERED > 0 else BLOCK
    PARTS: tl.constexpr = TOKENS // GATHERED if GATHERED > 0 else 1
    inside = count_below(index_ptr + (PARTS - 1), start, start + full, length // UNIT, PARTS)
    touched = count_below(index_ptr, start, start + full, tl.cdiv(length, UNIT), PARTS)
    masked = count_below(index_ptr, start + full, start + count, tl.cdiv(length, UNIT), PARTS)
    return inside, touched - inside, masked
