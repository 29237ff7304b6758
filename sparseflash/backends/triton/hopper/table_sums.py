"""Sums the gradients of the entries of a relative position table in the Hopper backward.

The scores of a diagonal share an entry. A tile's gradients are summed along its diagonals by exchanges between the
threads of a warp, and the sums are added to the buckets of their distances, each by one thread, so the order of
additions is always the same.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.hopper.scores import number_of, sums_of_threads

TABLE_SUMS = gl.constexpr(64)  # partial sums of a bucket, one a thread: eight threads of each warp


@gluon.jit
def from_lane(x, lane):
    """The x of another lane of the warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=f,f,r", [x, lane], dtype=gl.float32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def halved(parts, COUNT: gl.constexpr):
    """The first and the second half of each of COUNT tensors along its last axis, one after another."""
    found = parts[:0]
    for i in gl.static_range(COUNT):
        first, second = gl.split(parts[i].reshape([8, 8, 4, 2, parts[i].shape[3] // 2]).permute((0, 1, 2, 4, 3)))
        found += (first, second)
    return found


@gluon.jit
def by_column(x):
    """x, [8, 8, 4, J], as J tensors [64, 4] with one number a thread."""
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0], [32, 0]], [], [64, 4]
    )
    J: gl.constexpr = x.shape[3]
    parts = halved(halved(halved((x,), 1), 2), 4)
    if J == 16:
        parts = halved(parts, 8)
    found = parts[:0]
    for j in gl.static_range(J):
        found += (gl.convert_layout(parts[j].reshape([64, 4]), LAYOUT, assert_trivial=True),)
    return found


@gluon.jit
def with_shifted(x, y, BY: gl.constexpr, THREADS: gl.constexpr, COUNT: gl.constexpr):
    """COUNT + 1 tensors: the sums of COUNT tensors x and y, with y BY distances further: see `sums_by_distance`.

    THREADS: by how many threads the one with y comes after the one with x.
    """
    LAYOUT: gl.constexpr = x[0].type.layout
    row = number_of(64, gl.SliceLayout(1, LAYOUT)) & 7
    lane = (row * 4 + THREADS)[:, None] + number_of(4, gl.SliceLayout(0, LAYOUT))[None, :]
    is_next = (row < BY)[:, None]
    zero = gl.zeros([64, 4], gl.float32, layout=LAYOUT)
    found = x[:0]
    for i in gl.static_range(COUNT + 1):
        here = y[i] if i < COUNT else zero
        before = y[i - 1] if i > 0 else zero
        received = from_lane(gl.where(is_next, before, here), lane & 31)
        found += (x[i] + received if i < COUNT else received,)
    return found


@gluon.jit
def sums_by_distance(x):
    """Sums x, [128, COLUMNS], along its diagonals within the 16 rows of each warp: COLUMNS / 8 + 4 tensors [64, 4].

    `[8 * warp + g, 0]` of tensor i is the sum over column - row = 8 * (i - 1) - 16 * warp - g; the other columns hold
    nothing of use. Thread 4 * g + t of a warp has its rows 8 * a + g in columns 8 * j + 2 * t + b. A diagonal goes on
    from (j, a) to (j + 1, a + 1) in the same thread, and these numbers are added first. Then b = 1 is added to b = 0:
    the same diagonal is there in the thread 4 further, or 28 before with j + 1. In the same way odd t are added to even
    t, and at last t = 2 to t = 0.
    """
    J: gl.constexpr = x.shape[1] // 8
    upper, lower = gl.split(x.reshape([8, 2, 8, J, 4, 2]).permute((0, 2, 4, 3, 5, 1)))
    upper_even, upper_odd = gl.split(upper)
    lower_even, lower_odd = gl.split(lower)
    even = with_next(by_column(upper_even), by_column(lower_even), J)
    odd = with_next(by_column(upper_odd), by_column(lower_odd), J)
    sums = with_shifted(even, odd, 1, 4, J + 1)
    sums = with_shifted(sums, sums, 2, 9, J + 2)
    return with_shifted(sums, sums, 4, 18, J + 3)


@gluon.jit
def with_next(upper, lower, J: gl.constexpr):
    """J + 1 tensors: the first of `lower`, the sums of `upper[j]` and `lower[j + 1]`, and the last of `upper`."""
    found = lower[:1]
    for j in gl.static_range(J - 1):
        found += (upper[j] + lower[j + 1],)
    return found + upper[J - 1 :]


@gluon.jit
def sums_of_two_rows(x):
    """[64, 4]: the sums of x, [128, COLUMNS], over the columns of each thread and over two of its rows."""
    mine = gl.sum(sums_of_threads(x).reshape([8, 2, 8, 4]), 1)
    return mine.reshape([64, 4])


@gluon.jit
def add_to_bucket(sums, sums_ptr, bucket):
    """Adds the gradients of scores that share one entry, `sums_of_two_rows`, to `sums_ptr[bucket]`, fp32 rows of
    TABLE_SUMS; does nothing if bucket is -1. Each number has the same thread adding to it as in `add_by_distance`.
    """
    mine = gl.sum(sums, 1)
    LAYOUT: gl.constexpr = mine.type.layout
    row = number_of(64, LAYOUT)
    if bucket >= 0:
        target = sums_ptr + (gl.cast(bucket, gl.int64) * TABLE_SUMS + row)
        gl.atomic_add(target, mine, sem="relaxed", scope="gpu")


@gluon.jit
def add_by_distance(ds, sums_ptr, first_bucket, buckets_ptr, ahead, q_len, offset):
    """Adds the gradients of scores, [128, COLUMNS], with keys as rows, to the buckets of their distances.

    sums_ptr: fp32 [., TABLE_SUMS]. first_bucket: the row of bucket 0, for this item and head. Only one thread adds to
    each number, so the order is always the same. buckets_ptr: the bucket of every code.
    """
    COUNT: gl.constexpr = ds.shape[1] // 8 + 4
    sums = sums_by_distance(ds)
    LAYOUT: gl.constexpr = sums[0].type.layout
    row = number_of(64, gl.SliceLayout(1, LAYOUT))
    has_sum = (number_of(4, gl.SliceLayout(0, LAYOUT)) == 0)[None, :]
    # The code of `sums[0]`. Distances without a code have no scores, and 0 is added.
    first = (q_len - 9) - ahead - ((row >> 3) * 16 + (row & 7))
    sums_ptr += gl.cast(first_bucket, gl.int64) * TABLE_SUMS
    targets = sums[:0]
    for i in gl.static_range(COUNT):
        code = gl.minimum(gl.maximum(first + 8 * i, 0), 2 * q_len + offset - 2)
        targets += ((gl.load(buckets_ptr + code) * TABLE_SUMS + row)[:, None].broadcast_to(64, 4),)
    for i in gl.static_range(COUNT):
        gl.atomic_add(sums_ptr + targets[i], sums[i], mask=has_sum, sem="relaxed", scope="gpu")
