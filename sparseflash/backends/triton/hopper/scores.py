"""Changes of scores in the kernels for Hopper: a cap and a decay with distance. `sparseflash/scores/` defines them.

Each takes a few operations a score and no memory, which is why these kernels know it. Scores are in units of the cap,
or of 1 / scale without one: then a cap costs its tanh and one multiplication. A sink takes part in the sums of a row
alone, and is added where those are written.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.portable.change_flags import LOGARITHMIC
from sparseflash.backends.triton.portable.softmax import LN2

# In base 2 a token. Over 128 tokens the rounding of such a term is 2^-13.
STEEPEST = gl.constexpr(16.0)


@gluon.jit
def hyperbolic_tangent(x):
    """With a relative error of 2^-11, no more than rounding to half precision makes."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def slope_of(slopes_ptr, head, inverse_unit):
    """That of a head, in the units of scores."""
    return gl.cast(gl.load(slopes_ptr + head), gl.float32) * inverse_unit


@gluon.jit
def distance_term(
    first_row, first_column, slope,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, CHANGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS], what is subtracted from the scores for the distance of the tokens from `first_row` on and those
    from `first_column` on, both counted from the first key. Exact below 2^24 tokens.

    The number of a column is subtracted in two parts, the one in which threads differ and a constant, so that no thread
    holds a number for each column.
    """
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) + (first_row - first_column)
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    apart = gl.cast(row, gl.float32)[:, None] - gl.cast(column & 7, gl.float32)[None, :]
    apart = gl.abs(apart - gl.cast(column & -8, gl.float32)[None, :])
    if LOGARITHMIC & CHANGES:
        apart = gl.log2(apart + 1.0) * LN2
    return apart * slope


@gluon.jit
def slopes_of_tile(
    first_row, first_column, slope, qk_scale, ROWS: gl.constexpr, COLUMNS: gl.constexpr, CHANGES: gl.constexpr
):  # fmt: skip
    """`(lean, slope)`, of which one is 0: what scores gain from column to column where all columns of a tile lie on one
    side of all its rows, or the slope of `distance_term`, which takes twice the operations.
    """
    IS_LINEAR: gl.constexpr = not LOGARITHMIC & CHANGES
    # A lean is added apart from where the tile begins, which for a steep slope would lose digits of the difference.
    is_linear = IS_LINEAR & (gl.abs(slope) * qk_scale <= STEEPEST)
    lies_before = is_linear & (first_column + (COLUMNS - 1) <= first_row)
    lies_after = is_linear & (first_column >= first_row + (ROWS - 1))
    lean = gl.where(lies_before, slope, gl.where(lies_after, -slope, 0.0))
    return lean, gl.where(lies_before | lies_after, 0.0, slope)


@gluon.jit
def lean_within_thread(lean, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """[1, COLUMNS], what the lean adds to the scores for the distance from a thread's first column: the compiler knows
    these distances, so that no thread holds a number for each column."""
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    return gl.cast(column & ~6, gl.float32)[None, :] * lean


@gluon.jit
def lean_of_thread(lean, first_row, first_column, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """[ROWS, 4], what the lean adds for the distance of a row from a thread's first column. Exact below 2^24 tokens."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) + (first_row - first_column)
    column = 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))
    return gl.cast(column[None, :] - row[:, None], gl.float32) * lean


@gluon.jit
def by_thread(x):
    """[ROWS, COLUMNS] as [ROWS, ., 4, 4, 2]. A thread has all of a row but along the axis of four in the middle right,
    which four threads share; what it reduces itself it reduces in short chains."""
    return x.reshape([x.shape[0], x.shape[1] // 32, 4, 4, 2])


@gluon.jit
def across_columns(x):
    """[ROWS, 4], a number for each thread of a row, to be broadcast to what `by_thread` makes."""
    return x.expand_dims(1).expand_dims(2).expand_dims(4)


@gluon.jit
def exponentials(s, qk_scale, added):
    """exp2(s * qk_scale + added), of [ROWS, COLUMNS] and [ROWS, 4], a number for each thread of a row."""
    p = gl.exp2(by_thread(s) * qk_scale + across_columns(added))
    return gl.convert_layout(p.reshape(s.shape), s.type.layout, assert_trivial=True)
