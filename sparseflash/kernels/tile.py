"""What the kernels share: reading a tile of tokens, reading the bits of a tile, and the walk along a row's tiles.

A tile of the tokens that a kernel streams is one piece of the sequence, or is gathered from small blocks that lie
anywhere in it. `GATHERED` is the size of those blocks in tokens, and 0 where the tile is one piece. What is called
`first` is then the first token of the tile, a number; or else the numbers of all its tokens, [TOKENS].
"""

import triton
import triton.language as tl

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
):  # fmt: skip
    """The tokens of a tile of x[batch, head], [TOKENS, PADDED_DIM], zeros past the ends.

    `x` is a tensor descriptor if TMA, a pointer otherwise; INSIDE promises that no token is past the end.
    """
    if TMA:
        return x.load([batch, head, first, 0]).reshape(TOKENS, PADDED_DIM)
    else:
        return load_dims(x, batch, head, first, length, strides, 0, PADDED_DIM, DIM, TOKENS, INSIDE)


@triton.jit
def load_dims(
    x_ptr, batch, head, first, length, strides,
    FIRST_DIM: tl.constexpr, DIMS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Dims `FIRST_DIM .. FIRST_DIM + DIMS` of the tokens, [TOKENS, DIMS], zeros past DIM."""
    tokens = tl.arange(0, TOKENS)
    dims = FIRST_DIM + tl.arange(0, DIMS)
    # The start is a 64-bit scalar and the rest fits in 32 bits, so tensors may have more than 2^31 elements.
    start = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    if first.type.is_block():
        tokens = tl.cast(first, tl.int64)
    else:
        start += tl.cast(first, tl.int64) * strides[2]
    pointers = x_ptr + start + (tokens[:, None] * strides[2] + dims[None, :])
    if INSIDE:
        if FIRST_DIM + DIMS <= DIM:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=dims[None, :] < DIM, other=0.0)
    else:
        if not first.type.is_block():
            tokens = first + tokens
        return tl.load(pointers, mask=(tokens < length)[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def products(
    x_tile, x, x_head, first_x, x_length, x_strides, y_tile, y, y_head, first_y, y_length, y_strides, batch, one,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, X_TOKENS: tl.constexpr, Y_TOKENS: tl.constexpr,
    X_INSIDE: tl.constexpr, Y_INSIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x y^T of two tiles of tokens, [X_TOKENS, Y_TOKENS].

    Full fp32 has no tensor cores: its products are one sum after the other, whose rounding errors grow with its length,
    over 256 dims to thrice those of a library that sums in many lanes. So there 32 dims at a time are read again and
    summed by themselves. `one`: see accumulate.
    """
    if PRECISION == "ieee":
        PART: tl.constexpr = min(PADDED_DIM, 32)
        total = tl.zeros([X_TOKENS, Y_TOKENS], tl.float32)
        for at in tl.static_range(0, PADDED_DIM, PART):
            x_part = load_dims(x, batch, x_head, first_x, x_length, x_strides, at, PART, DIM, X_TOKENS, X_INSIDE)
            y_part = load_dims(y, batch, y_head, first_y, y_length, y_strides, at, PART, DIM, Y_TOKENS, Y_INSIDE)
            total = accumulate(x_part, y_part.T, total, one, PRECISION)
        return total
    else:
        return tl.dot(x_tile, y_tile.T, input_precision=PRECISION)


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
def accumulate(a, b, acc, one, PRECISION: tl.constexpr):
    """acc + a b.

    In full fp32 the product is summed by itself first, so that rounding errors grow with the root of the tiles, not of
    the tokens. `one` is 1.0 in a way that the compiler cannot know: it would make one long sum of the two again.
    """
    if PRECISION == "ieee":
        return acc + tl.dot(a, b, input_precision=PRECISION) * one
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def exponentials(scores, maximum, qk_scale, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """2^(scores * qk_scale - maximum), with the maximum in units of raw scores if PRECISE, else already scaled.

    Scaling first is one fused multiply-add a score. It rounds numbers the size of the score, which half precision does
    not notice; in fp32 the difference is taken first, and what is rounded is small.
    """
    if PRECISE:
        exponent = (scores - maximum) * qk_scale
        if PRECISION == "ieee":
            return exp2_rounded(exponent)
        else:
            return tl.exp2(exponent)
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
