"""Products, weights and masks of a step of the kernel for dk and dv of wide heads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from sparseflash.backends.triton.hopper.gluon_api import accumulator
from sparseflash.backends.triton.hopper.tiles import ROWS, opaque


@gluon.jit
def masked(
    s, words_ptr, tile, first_key, first_row, k_left, GROUPS: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    BITS: gl.constexpr,
):  # fmt: skip
    """s [ROWS keys, ROWS queries] where the tile's bits, from this key and row on, are set, else -inf; tile 0 is full.
    If HAS_LENGTHS, only the first `k_left` keys are live.
    """
    OF_WORDS: gl.constexpr = gl.SliceLayout(2, BITS)
    WORDS: gl.constexpr = GROUPS * ROWS // 32  # of a key
    key = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OF_WORDS))
    word = first_row // 32 + gl.arange(0, ROWS // 32, layout=gl.SliceLayout(0, OF_WORDS))
    tile_ptr = words_ptr + gl.cast(tile - 1, gl.int64) * (GROUPS * ROWS * WORDS)
    at = (first_key + key)[:, None] * WORDS + word[None, :]
    words = gl.load(tile_ptr + at, mask=(at >= 0) & (tile > 0), other=-1)
    if HAS_LENGTHS:
        words = gl.where((key < k_left)[:, None], words, 0)
    # `opaque` keeps the compiler from preparing the tests of bits before the loop, in eight registers.
    shift = opaque(gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(0, BITS))))
    bits = (words.expand_dims(2) >> shift.expand_dims(0).expand_dims(0)) & 1
    bits = gl.convert_layout(bits.reshape([ROWS, ROWS]), s.type.layout, assert_trivial=True)
    return gl.where(bits != 0, s, float("-inf"))


@gluon.jit
def store_part(part_ptr, x, first_row, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Writes channels from FIRST on of a warpgroup's keys of a part, [keys of an item, WIDTH]."""
    key = first_row + opaque(gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout)))
    column = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    gl.store(part_ptr + (key[:, None] * WIDTH + column[None, :]), x)


@gluon.jit
def product(x_s, y_s, S: gl.constexpr):
    """x y^T [ROWS, ROWS], in flight. Unlike in `backward.py`, the sums do not start as -lse or -delta: ptxas would wait
    for all earlier products before it sets them (C7515).
    """
    zero = gl.zeros([ROWS, ROWS], gl.float32, layout=S)
    return accumulator(warpgroup_mma(x_s, y_s.permute((1, 0)), zero, use_acc=False, is_async=True))


@gluon.jit
def plus_product(x, y_s, z_s):
    """x + y z^T, in flight."""
    return accumulator(warpgroup_mma(y_s, z_s.permute((1, 0)), x, is_async=True))


@gluon.jit
def plus_weighted(x, weights, y_s):
    """x + weights y, in flight, with weights in registers."""
    weights = gl.convert_layout(weights, gl.DotOperandLayout(operand_index=0, parent=x.type.layout, k_width=2))
    return accumulator(warpgroup_mma(weights, y_s, x, is_async=True))


@gluon.jit
def unpacked(x):
    """x in fp32. The numbers stay in pairs, in half the registers, until here: ptxas would take them apart at once."""
    OF_BF16: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    OF_FP16: gl.constexpr = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
    code: gl.constexpr = OF_BF16 if x.dtype == gl.bfloat16 else OF_FP16
    return gl.inline_asm_elementwise(code, "=f,=f,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def of_queries(rows_s, stage, WHICH: gl.constexpr, S: gl.constexpr):
    """-lse (0) or -delta (1) of the queries of a stage, for every key."""
    return rows_s.index(stage).slice(WHICH, 1, dim=0).load(S).broadcast_to(ROWS, ROWS)
