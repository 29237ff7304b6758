"""Tiles in shared memory, and the bits of a mask: shared by the forward and the backward in two kernels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.hopper import configs
from sparseflash.backends.triton.hopper.gluon_api import async_load

ROWS = gl.constexpr(configs.ROWS)  # of a warpgroup


@gluon.jit
def block_at(index_ptr, place, SPLIT: gl.constexpr):
    """The number of the BLOCK_N keys of the step at `place`: a tile of the list is SPLIT steps."""
    if SPLIT == 1:
        block = gl.load(index_ptr + place)
    else:
        block = gl.load(index_ptr + place // SPLIT) * SPLIT + place % SPLIT
    return block


@gluon.constexpr_function
def bytes_of(desc, rest_desc):
    """The bytes of a box, and of the box of the rest of its channels if it has one."""
    return desc.block_type.nbytes + (0 if rest_desc is None else rest_desc.block_type.nbytes)


@gluon.jit
def load_tile(desc, rest_desc, x_s, rest_s, stage, bar, batch, head, token):
    """Starts to load a box, in one or two pieces of channels, into tile `stage`. `bar` must expect `bytes_of` both."""
    async_load(desc, [batch, head, token, 0], bar, x_s.index(stage))
    if rest_desc is not None:
        FIRST: gl.constexpr = x_s.shape[2]
        async_load(rest_desc, [batch, head, token, FIRST], bar, rest_s.index(stage))


@gluon.jit
def tiles_of(dtype: gl.constexpr, COUNT: gl.constexpr, TOKENS: gl.constexpr, CHANNELS: gl.constexpr):
    """Shared memory for COUNT tiles of TOKENS tokens."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, CHANNELS], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, TOKENS, CHANNELS], LAYOUT)


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


@gluon.constexpr_function
def layout_of_key_bits(KEYS, QUERIES):
    """The same for [KEYS, QUERIES] scores of a backward, with registers in the order in which it reads them."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], [0, 1, 0]] + ([[0, 2, 0]] if QUERIES == 128 else []),
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]] + ([[64, 0, 0]] if KEYS == 128 else []),
        [],
        [KEYS, QUERIES // 32, 32],
    )


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
def masked_keys(
    x, words_ptr, tile, first_key, first_q, k_left, dead, TILE: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    IS_OPAQUE: gl.constexpr,
):  # fmt: skip
    """x [keys, queries] where the bit of the mask is set, else `dead`. The bits are read from `first_key` and `first_q`
    of a tile of TILE x TILE on; tile 0 is full. If HAS_LENGTHS, only the first `k_left` keys are live.
    """
    KEYS: gl.constexpr = x.shape[0]
    QUERIES: gl.constexpr = x.shape[1]
    WORDS: gl.constexpr = TILE // 32  # of a key
    BITS: gl.constexpr = layout_of_key_bits(KEYS, QUERIES)
    OF_WORDS: gl.constexpr = gl.SliceLayout(2, BITS)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, OF_WORDS))
    word = first_q // 32 + gl.arange(0, QUERIES // 32, layout=gl.SliceLayout(0, OF_WORDS))
    tile_ptr = words_ptr + gl.cast(tile - 1, gl.int64) * (TILE * WORDS)
    at = (first_key + key)[:, None] * WORDS + word[None, :]
    words = gl.load(tile_ptr + at, mask=(at >= 0) & (tile > 0), other=-1)
    if HAS_LENGTHS:
        words = gl.where((key < k_left)[:, None], words, 0)
    shift = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(0, BITS)))
    if IS_OPAQUE:  # keeps the compiler from preparing the tests of bits before the loop, in eight registers
        shift = opaque(shift)
    bits = (words.expand_dims(2) >> shift.expand_dims(0).expand_dims(0)) & 1
    bits = gl.convert_layout(bits.reshape([KEYS, QUERIES]), x.type.layout, assert_trivial=True)
    return gl.where(bits != 0, x, dead)
