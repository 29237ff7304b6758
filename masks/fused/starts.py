"""Where the tiles of each row begin: a jit function of the kernels that write the tiles."""

import triton
import triton.language as tl

# Every program of so few reads the counts of all rows, which takes less time than the two launches of a running sum.
MOST_SUMMED = 2048
_AT_ONCE = tl.constexpr(512)


@triton.jit
def start_of(counts_ptr, indptr_ptr, IS_MADE: tl.constexpr):
    """The first place of the program's row, and the number of places that all rows use.

    counts_ptr: int32 [1 + programs], the first one 0. indptr_ptr: its running sum, which is written unless it is made.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if IS_MADE:
        start, used = tl.load(indptr_ptr + program), tl.load(indptr_ptr + programs)
    else:
        lane = tl.arange(0, _AT_ONCE)
        before, all_rows = tl.zeros([_AT_ONCE], tl.int32), tl.zeros([_AT_ONCE], tl.int32)
        for first in range(0, programs + 1, _AT_ONCE):
            count = tl.load(counts_ptr + first + lane, mask=first + lane <= programs, other=0)
            all_rows += count
            before += tl.where(first + lane <= program, count, 0)
        start, used = tl.sum(before, 0), tl.sum(all_rows, 0)
        tl.store(indptr_ptr + program, start)
        if program == 0:
            tl.store(indptr_ptr + programs, used)
    return start, used
