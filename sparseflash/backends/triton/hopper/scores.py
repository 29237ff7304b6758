"""Changes of scores in the kernels for Hopper: a cap, a decay with distance, and a table of relative positions.
`sparseflash/scores/` defines them.

A cap and a decay take a few operations a score and no memory, which is why these kernels know them. Scores are in units
of the cap, or of 1 / scale without one: then a cap costs its tanh and one multiplication. A sink takes part in the sums
of a row alone, and is added where those are written.

Of a table these kernels know those whose entry follows from the distance of query and key, and is mostly the same from
one distance to the next. Then the scores of nearly all tiles have one entry, which is added to the numbers of rows and
costs nothing a score; near the diagonal each score reads its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.hopper.tables import MARGIN
from sparseflash.backends.triton.portable.change_flags import LOGARITHMIC
from sparseflash.backends.triton.portable.softmax import LN2

# In base 2 a token. Over 128 tokens the rounding of such a term is 2^-13.
STEEPEST = gl.constexpr(16.0)
LARGEST = gl.constexpr(3.4e38)  # finite numbers of fp32 are no larger


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
def side_of_columns(
    ahead, slope, qk_scale, ROWS: gl.constexpr, COLUMNS: gl.constexpr, CHANGES: gl.constexpr
):  # fmt: skip
    """1 if all columns of a tile come before all its rows, -1 if they come after them, else 0.

    ahead: by how many tokens the first row comes after the first column.

    On one side the distance grows or shrinks by one from column to column. So a linear decay is added in two parts, one
    that the compiler knows for each of a thread's columns (`from_first_column`) and one for each row of a thread
    (`to_first_column`), with one operation a score and not two. 0 also for a logarithmic decay, and for a slope so
    steep that this would not be as exact.
    """
    IS_LINEAR: gl.constexpr = not LOGARITHMIC & CHANGES
    # Each part is rounded by itself, and may be much larger than their sum.
    is_linear = IS_LINEAR & (gl.abs(slope) * qk_scale <= STEEPEST)
    return gl.where(is_linear & (ahead >= COLUMNS - 1), 1, gl.where(is_linear & (ahead <= 1 - ROWS), -1, 0))


@gluon.jit
def from_first_column(COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """[1, COLUMNS], how many columns come before each, from the first that its thread has. The compiler knows these
    numbers, so that no thread holds one for each column."""
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    return gl.cast(column & ~6, gl.float32)[None, :]


@gluon.jit
def to_first_column(ahead, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """[ROWS, 4], how many tokens the first column of each of the threads of a row comes after the row. Exact below 2^24
    tokens."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) + ahead
    column = 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))
    return gl.cast(column[None, :] - row[:, None], gl.float32)


@gluon.jit
def distances(first, COLUMNS: gl.constexpr, CHANGES: gl.constexpr, LAYOUT: gl.constexpr):
    """[ROWS, COLUMNS], the distances of the tokens of a tile's rows and columns, or their logarithms. first: what
    `to_first_column` says of the tile."""
    column = from_first_column(COLUMNS, LAYOUT).broadcast_to(first.shape[0], COLUMNS)
    apart = gl.abs(plus_of_threads(column, first))
    if LOGARITHMIC & CHANGES:
        apart = gl.log2(apart + 1.0) * LN2
    return apart


@gluon.jit
def by_thread(x):
    """[ROWS, COLUMNS] as [ROWS, ., 4, 4, 2]. A thread has all of a row but along the axis of four in the middle right,
    which four threads share; what it reduces itself it reduces in short chains."""
    return x.reshape([x.shape[0], x.shape[1] // 32, 4, 4, 2])


@gluon.jit
def sums_of_threads(x):
    """[ROWS, 4], what each of the four threads of a row sums of x, [ROWS, COLUMNS]."""
    return gl.sum(gl.sum(gl.sum(by_thread(x), 4), 2), 1)


@gluon.jit
def plus_of_threads(x, added):
    """x, [ROWS, COLUMNS], plus a number for each thread of a row, [ROWS, 4]."""
    found = by_thread(x) + added.expand_dims(1).expand_dims(2).expand_dims(4)
    return gl.convert_layout(found.reshape(x.shape), x.type.layout, assert_trivial=True)


# ---------------------------------------------------------------------- tables of relative positions


@gluon.jit
def outer_runs(until_ptr, q_len, offset):
    """`(until_ptr of distance 0, last distance with the entry of the first one, first with that of the last one, the
    first distance, the last)`; or None without a table. A distance is by how many tokens a query comes after a key;
    `until_ptr` has one number for each, and one more: see `sparseflash/scores/relative.py`."""
    runs = None
    if until_ptr is not None:
        first, last = 1 - q_len, q_len + offset - 1
        here_ptr = until_ptr + (q_len - 1)
        runs = here_ptr, gl.load(until_ptr) + first, gl.load(here_ptr + (last + 1)) + first, first, last
    return runs


@gluon.jit
def shared_entry(runs, entries_ptr, outer_entries, least, most):
    """`(an entry, whether all scores of a tile have it)`; 0 if not.

    entries_ptr: the entry of distance 0. outer_entries: those of the first and the last distance, so that most tiles
    need no load. least, most: the distances of the tile. An entry that is not finite would undo the mask, so scores
    that have it read it themselves.
    """
    until_ptr, first_end, last_start, first, last = runs
    is_first, is_last = most <= first_end, least >= last_start
    entry = gl.where(is_first, outer_entries[0], outer_entries[1])
    is_shared = is_first | is_last
    if not is_shared:
        inside = gl.maximum(least, first)
        is_shared = gl.load(until_ptr + inside) + first >= gl.minimum(most, last)
        entry = gl.load(entries_ptr + inside)
    is_shared = is_shared & (gl.abs(entry) <= LARGEST)
    return gl.where(is_shared, entry, 0.0), is_shared


@gluon.jit
def entries_of_head(entries_ptr, head, q_len, offset):
    """Where the entry of distance 0 is of those that `tables.entries_kernel` writes of a head."""
    codes = 2 * q_len + offset - 1
    return entries_ptr + gl.cast(head, gl.int64) * (codes + 2 * MARGIN) + (MARGIN + q_len - 1)


@gluon.jit
def entries_of_scores(entries_ptr, ahead, SIGN: gl.constexpr, like):
    """The entry of each score of a tile, in the layout of `like`, [ROWS, COLUMNS].

    ahead: by how many tokens the first row comes after the first column; SIGN: 1 if rows are queries, -1 if they are
    keys. A thread computes two addresses, for its two rows; those of its columns differ from them by numbers that the
    compiler knows.
    """
    ROWS: gl.constexpr = like.shape[0]
    COLUMNS: gl.constexpr = like.shape[1]
    LAYOUT: gl.constexpr = like.type.layout
    THREADS: gl.constexpr = sums_of_threads(like).type.layout
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, THREADS)) + ahead
    mine = 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, THREADS))
    first_ptr = entries_ptr + SIGN * (row[:, None] - mine[None, :])
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT)) & ~6
    columns = (-SIGN * column)[None, :].broadcast_to(ROWS, COLUMNS)
    return gl.load(plus_of_threads(columns, first_ptr))
