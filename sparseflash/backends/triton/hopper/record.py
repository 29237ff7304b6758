"""Numbers that the loading warp passes to the warpgroups by shared memory: in the forward the record of an item, in the
backward a few numbers of each step. And the mbarriers of buffers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

RECORD = gl.constexpr(16)  # numbers
# More than the one or two buffers of queries: an item's queries are freed before its record is read for the
# last time.
RECORDS = gl.constexpr(4)

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
def barriers(COUNT: gl.constexpr, READERS: gl.constexpr, LOADS: gl.constexpr = 1):
    """A full and an empty mbarrier for each of COUNT buffers: LOADS arrivals fill one, READERS threads empty it."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(COUNT):
        mbarrier.init(full.index(c), count=LOADS)
        mbarrier.init(empty.index(c), count=READERS)
    return full, empty


@gluon.jit
def field(record_s, turn, N: gl.constexpr):
    """Number N of an item's record."""
    layout: gl.constexpr = gl.BlockedLayout([RECORD], [32], [4], [0])
    number = gl.arange(0, RECORD, layout=layout)
    return gl.sum(gl.where(number == N, record_s.index(turn % RECORDS).load(layout), 0), 0)


@gluon.jit
def send(number_s, stage, WHICH: gl.constexpr, number, OF: gl.constexpr):
    """Passes number WHICH of the OF numbers of a backward's step, so that no warpgroup waits for global memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    number_s.index(stage * OF + WHICH).store(gl.full([1], number, gl.int32, layout=layout))


@gluon.jit
def receive(number_s, stage, WHICH: gl.constexpr, OF: gl.constexpr):
    """The number that `send` has stored."""
    return gl.max(number_s.index(stage * OF + WHICH).load(gl.BlockedLayout([1], [32], [8], [0])), 0)


@gluon.jit
def received(CHANGES: gl.constexpr, NUMBER: gl.constexpr, step, WHICH: gl.constexpr):
    """Number WHICH of those that `send` of score modification NUMBER has returned."""
    number_s, stage, _, _ = step
    return receive(number_s, stage, CHANGES.FIRST_SENT[NUMBER] + WHICH, CHANGES.SENT)
