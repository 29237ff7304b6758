"""The items and entries of the Hopper backward, as its kernels read them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.hopper.configs import BLOCK
from sparseflash.backends.triton.persistent.backward_plan import (
    ITEM,
    ITEM_COUNT,
    ITEM_FIRST_ENTRY,
    ITEM_FIRST_KEY,
    ITEM_NUMBER,
    ITEM_PART,
)

KEYS = gl.constexpr(BLOCK[1])  # of an item; its tiles have TILE_ROWS queries, in TILE_ROWS // ROWS steps
SENDERS = gl.constexpr(2)


@gluon.jit
def items_of_program(start_ptr):
    """The numbers of this program's first item and of the next program's."""
    return gl.load(start_ptr + gl.program_id(0)), gl.load(start_ptr + gl.program_id(0) + 1)


@gluon.jit
def header(work_ptr, item):
    """Number of batch element and KV head, first key, first entry, and number of entries of an item."""
    item_ptr = work_ptr + item * ITEM
    number, first_k = gl.load(item_ptr + ITEM_NUMBER), gl.load(item_ptr + ITEM_FIRST_KEY)
    first, count = gl.load(item_ptr + ITEM_FIRST_ENTRY), gl.load(item_ptr + ITEM_COUNT)
    return number, first_k, first, count


@gluon.jit
def part_of(work_ptr, item, HAS_PARTS: gl.constexpr):
    """An item's number among all parts, from 1; 0 if it is not a part."""
    part = 0
    if HAS_PARTS:
        part = gl.load(work_ptr + item * ITEM + ITEM_PART)
    return part
