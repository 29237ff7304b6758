"""Clears the memory of a dynamic mask that its tiles do not fill: a jit function of the kernels that
write the tiles.
"""

import triton
import triton.language as tl


@triton.jit
def clear_unused(indices_ptr, tile_ptr, used, share, room, SIZE: tl.constexpr):
    """Stores zeros in the program's `share` of both arrays [room] as far as they lie past the `used` entries."""
    program = tl.program_id(0).to(tl.int64)
    stop = tl.minimum((program + 1) * share, room)
    for first in range(program * share, stop, SIZE):
        place = first + tl.arange(0, SIZE)
        is_unused = (place >= used) & (place < stop)
        tl.store(indices_ptr + place, tl.zeros([SIZE], tl.int32), mask=is_unused)
        tl.store(tile_ptr + place, tl.zeros([SIZE], tl.int32), mask=is_unused)
