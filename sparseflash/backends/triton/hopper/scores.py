"""Changes of scores in the kernels for Hopper: a cap and a decay with distance. `sparseflash/scores/` defines them.

Each takes a few operations a score and no memory, which is why these kernels know it. Scores are in units of the cap,
or of 1 / scale without one: then a cap costs its tanh and one multiplication. A sink takes part in the sums of a row
alone, and is added where those are written.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.portable.change_flags import LOGARITHMIC
from sparseflash.backends.triton.portable.softmax import LN2


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
