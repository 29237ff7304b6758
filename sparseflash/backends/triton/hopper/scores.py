"""Score modifications in the Hopper kernels: a soft cap, a decay with distance, a relative position table, and biases
of keys and of pairs.

A cap and a decay take a few operations a score and no memory. Scores are in units of the cap, or of 1 / scale without
one: then a cap costs its tanh and one multiplication. (In the forward a bias of pairs keeps scores in their own units.)
A sink takes part only in the sums of a row, and is added where the sums are written.

Relative position tables are supported if their entry follows from the distance of query and key, and is mostly the same
from one distance to the next. Then the scores of nearly all tiles share one entry, which is added to numbers of rows
and costs nothing a score. Near the diagonal each score loads its own entry.

The forward loads a bias of keys with the keys, and adds it by a matrix instruction: see `changes/hopper_key_bias.py`.
In the backward rows are keys, so the bias is part of a multiplication and addition that is needed anyway. Biases of
pairs are loaded without conversion, a tile a step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.device_functions.softmax import LN2
from sparseflash.backends.triton.hopper.record import barriers

# The steepest slope for two parts, in powers of 2 a token. Over 128 tokens the rounding of a part is 2^-13.
STEEPEST = gl.constexpr(16.0)
# Padding of tables at both ends: tiles that lie partly past the ends of the tokens read this far beyond the valid
# distances.
MARGIN = gl.constexpr(128)
LARGEST_FINITE = gl.constexpr(3.4e38)  # about the largest finite number of fp32


@gluon.jit
def hyperbolic_tangent(x):
    """tanh(x), with a relative error of 2^-11: no more than rounding to half precision."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def read_later(x):
    """x, of 16 bits a number, behind a scheduling barrier. Without it the compiler converts x to fp32 at once, and
    registers spill.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def slope_of(slopes_ptr, head, inverse_unit):
    """The slope of a head, in the units of scores."""
    return gl.cast(gl.load(slopes_ptr + head), gl.float32) * inverse_unit


@gluon.jit
def side_of_columns(
    ahead, slope, qk_scale, ROWS: gl.constexpr, COLUMNS: gl.constexpr, IS_LOG: gl.constexpr
):  # fmt: skip
    """1 if all columns of a tile come before all its rows, -1 if all come after them, else 0.

    ahead: by how many tokens the first row comes after the first column.

    On one side of the diagonal the distance changes by one from column to column. So a linear decay is added in two
    parts: a compile-time constant for each of a thread's columns (`from_first_column`), and a number for each row of a
    thread (`to_first_column`). That is one operation a score instead of two. The side is also 0 for a logarithmic
    decay, and for a slope so steep that two parts would not be as exact.
    """
    IS_LINEAR: gl.constexpr = not IS_LOG
    # Each part is rounded by itself, and may be much larger than their sum.
    is_linear = IS_LINEAR & (gl.abs(slope) * qk_scale <= STEEPEST)
    return gl.where(is_linear & (ahead >= COLUMNS - 1), 1, gl.where(is_linear & (ahead <= 1 - ROWS), -1, 0))


@gluon.jit
def from_first_column(COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """[1, COLUMNS]: the number of columns from the first column of a thread to each of its columns. These are
    compile-time constants, so they take no registers.
    """
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    return gl.cast(column & ~6, gl.float32)[None, :]


@gluon.jit
def to_first_column(ahead, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """[ROWS, 4]: by how many tokens the first column of each of a row's four threads comes after the row. Exact below
    2^24 tokens.
    """
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) + ahead
    column = 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))
    return gl.cast(column[None, :] - row[:, None], gl.float32)


@gluon.jit
def distances(first, COLUMNS: gl.constexpr, IS_LOG: gl.constexpr, LAYOUT: gl.constexpr):
    """[ROWS, COLUMNS]: the distances of a tile's rows and columns in tokens, or their logarithms. first: the tile's
    `to_first_column`.
    """
    column = from_first_column(COLUMNS, LAYOUT).broadcast_to(first.shape[0], COLUMNS)
    apart = gl.abs(plus_of_threads(column, first))
    if IS_LOG:
        apart = gl.log2(apart + 1.0) * LN2
    return apart


@gluon.jit
def by_thread(x):
    """[ROWS, COLUMNS] as [ROWS, ., 4, 4, 2]. Four threads share a row, along axis 3; each reduces its own numbers,
    along the other axes, in short chains.
    """
    return x.reshape([x.shape[0], x.shape[1] // 32, 4, 4, 2])


@gluon.jit
def sums_of_threads(x):
    """[ROWS, 4]: the sums of x, [ROWS, COLUMNS], over the columns of each of the four threads of a row."""
    return gl.sum(gl.sum(gl.sum(by_thread(x), 4), 2), 1)


@gluon.jit
def store_sums(sums_ptr, sums, place):
    """Writes the sums of [KEYS, 4] over the threads of each row to the rows of `sums_ptr[place]`."""
    KEYS: gl.constexpr = sums.shape[0]
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, sums.type.layout))
    gl.store(sums_ptr + (gl.cast(place, gl.int64) * KEYS + key), gl.sum(sums, 1))


@gluon.jit
def plus_of_threads(x, added):
    """x, [ROWS, COLUMNS], plus a number for each thread of a row, [ROWS, 4]."""
    found = by_thread(x) + added.expand_dims(1).expand_dims(2).expand_dims(4)
    return gl.convert_layout(found.reshape(x.shape), x.type.layout, assert_trivial=True)


# ---------------------------------------------------------------------- biases of pairs


@gluon.jit
def pair_buffers(pairs_desc, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, THREADS: gl.constexpr):
    """Shared memory for COUNT tiles, each read by THREADS threads, with a full and an empty mbarrier for each."""
    dtype: gl.constexpr = pairs_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    pair_s = gl.allocate_shared_memory(dtype, [COUNT, ROWS, COLUMNS], LAYOUT)
    full, empty = barriers(COUNT, THREADS)
    return pair_s, full, empty


@gluon.jit
def place_of_pairs(tensors, whole, batch, head, first_q, first_k, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """Where a tile of a bias of live tiles begins in its tensor: batch element, head, query and key. The bias is one
    head with the tiles one below another.

    tensors: the numbers of tiles and the patterns of heads, see `StoredTiles`. whole: from `numbers_of_tiles`.
    """
    numbers_ptr, pattern_ptr = tensors
    tiles_of_batch, tiles_of_head, patterns_of_batch, patterns_of_head, rows, words = whole
    pattern = gl.load(pattern_ptr + (batch * patterns_of_batch + head * patterns_of_head))
    block_row, column = pattern * rows + first_q // BLOCK_Q, first_k // BLOCK_K
    word_ptr = numbers_ptr + 2 * (gl.cast(block_row, gl.int64) * words + column // 32)
    before = ones_of(gl.load(word_ptr) & ~(-1 << column % 32))
    tile = gl.load(word_ptr + 1) + before + batch * tiles_of_batch + head * tiles_of_head
    return 0, 0, tile * BLOCK_Q + first_q % BLOCK_Q, 0


@gluon.jit
def ones_of(x):
    """The number of set bits of x, whose highest bit must be 0."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 63


# ---------------------------------------------------------------------- tables of relative positions


@gluon.jit
def outer_runs(until_ptr, q_len, offset):
    """`(until_ptr of distance 0, last distance of the first run, first distance of the last run, first distance, last
    distance)`; None without a table. A run: consecutive distances with one entry.

    A distance is by how many tokens a query comes after a key. `until_ptr` has one number for each distance, and one
    more: see `sparseflash/scores/relative.py`.
    """
    runs = None
    if until_ptr is not None:
        first, last = 1 - q_len, q_len + offset - 1
        here_ptr = until_ptr + (q_len - 1)
        runs = here_ptr, gl.load(until_ptr) + first, gl.load(here_ptr + (last + 1)) + first, first, last
    return runs


@gluon.jit
def shared_distance(runs, least, most):
    """`(a distance, whether all scores of a tile have its entry)`. least, most: the distances of the tile. Loads
    nothing if all have the entry of the first distance or of the last.
    """
    until_ptr, first_end, last_start, first, last = runs
    is_first, is_last = most <= first_end, least >= last_start
    at = gl.where(is_first, first, gl.where(is_last, last, gl.maximum(least, first)))
    is_shared = is_first | is_last
    if not is_shared:
        is_shared = gl.load(until_ptr + at) + first >= gl.minimum(most, last)
    return at, is_shared


@gluon.jit
def can_be_shared(entry):
    """Whether an entry is finite. An infinite one would undo the mask, so scores that have one load it themselves."""
    return gl.abs(entry) <= LARGEST_FINITE


@gluon.jit
def shared_entry(runs, here_ptr, least, most):
    """`(a distance, its entry, whether all scores of a tile have this entry)`; if not, the entry is 0. The arguments
    are as in `shared_distance`; here_ptr: the entry of distance 0.
    """
    at, is_shared = shared_distance(runs, least, most)
    entry = gl.load(here_ptr + at)
    is_shared = is_shared & can_be_shared(entry)
    return at, gl.where(is_shared, entry, 0.0), is_shared


@gluon.jit
def outer_tiles(runs, first_position, first_entry, last_entry, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """`(past, future)` for queries from `first_position` on. In tiles with a first key up to `past` all scores have the
    last distance's entry; from `future` on, the first distance's. So most tiles need two comparisons.
    """
    past = first_position - (COLUMNS - 1) - runs[2]
    future = first_position + (ROWS - 1) - runs[1]
    return gl.where(can_be_shared(last_entry), past, -1), gl.where(can_be_shared(first_entry), future, 2147483647)


@gluon.jit
def as_float(bits):
    """The number of fp32 with these bits."""
    return gl.cast(bits, gl.float32, bitcast=True)


@gluon.jit
def entries_of_head(entries_ptr, head, q_len, offset):
    """The address of the entry of distance 0 of a head, written by `entries_kernel` of `changes/hopper_table.py`."""
    codes = 2 * q_len + offset - 1
    return entries_ptr + gl.cast(head, gl.int64) * (codes + 2 * MARGIN) + (MARGIN + q_len - 1)


@gluon.jit
def number_of(SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """0 .. SIZE - 1, hidden from the compiler. Otherwise it computes everything that follows from them before the loop,
    and spills the results.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.arange(0, SIZE, layout=LAYOUT)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def entries_of_scores(entries_ptr, ahead, SIGN: gl.constexpr, like):
    """The entry of each score of a tile, in the layout of `like`, [ROWS, COLUMNS].

    ahead: by how many tokens the first row comes after the first column. SIGN: 1 if rows are queries, -1 if they are
    keys. A thread computes two addresses, one for each of its rows; its columns are at compile-time offsets from these.
    """
    ROWS: gl.constexpr = like.shape[0]
    COLUMNS: gl.constexpr = like.shape[1]
    LAYOUT: gl.constexpr = like.type.layout
    THREADS: gl.constexpr = sums_of_threads(like).type.layout
    row = number_of(ROWS, gl.SliceLayout(1, THREADS)) + ahead
    mine = 2 * number_of(4, gl.SliceLayout(0, THREADS))
    first_ptr = entries_ptr + SIGN * (row[:, None] - mine[None, :])
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT)) & ~6
    columns = (-SIGN * column)[None, :].broadcast_to(ROWS, COLUMNS)
    return gl.load(plus_of_threads(columns, first_ptr))
