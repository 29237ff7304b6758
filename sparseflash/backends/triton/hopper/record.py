"""The record of an item: numbers that the forward's loading warp passes to the warpgroups by shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

RECORD = gl.constexpr(16)  # numbers
# More than the one or two buffers of queries: an item's queries are freed before its record is read for the
# last time.
RECORDS = gl.constexpr(4)

# Indices of the numbers.
BATCH_HEAD = gl.constexpr(0)
BATCH = gl.constexpr(1)
HEAD = gl.constexpr(2)
FIRST_Q = gl.constexpr(3)
FULL = gl.constexpr(4)  # steps whose scores are all live, which come first
COUNT = gl.constexpr(5)  # steps; 0: the stream ends
START = gl.constexpr(6)  # where the list begins
TILE = gl.constexpr(7)  # the number of the first tile's bits, 0: full, -1: dead
PART = gl.constexpr(8)  # which chunk of a longer item, from 1; 0: a whole one
Q_LIMIT = gl.constexpr(9)  # queries from here on are dead
K_LIMIT = gl.constexpr(10)  # and keys
JUMP_LEFT = gl.constexpr(11)  # when this many steps are left,
JUMP = gl.constexpr(12)  # this many tiles of the list, full ones past the lengths, are skipped
BLOCK = gl.constexpr(13)  # the number of the first tile
OF_CHANGE_FIRST = gl.constexpr(14)  # two numbers of the score modification that has `record`
OF_CHANGE_SECOND = gl.constexpr(15)


@gluon.jit
def field(record_s, turn, N: gl.constexpr):
    """Number N of an item's record."""
    layout: gl.constexpr = gl.BlockedLayout([RECORD], [32], [4], [0])
    number = gl.arange(0, RECORD, layout=layout)
    return gl.sum(gl.where(number == N, record_s.index(turn % RECORDS).load(layout), 0), 0)
