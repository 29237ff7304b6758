"""Kernels that give the items of the backward to programs: those of `backward_plan.assigned`, with the same result."""

from __future__ import annotations

import triton
import triton.language as tl

# A program is kept as one number: its work, 31 bits; its number, as many as PADDED needs; its items, COUNT_BITS. So
# sorting finds the program with the least work, and the first of several.
COUNT_BITS = tl.constexpr(24)
_MASK = tl.constexpr((1 << 24) - 1)
_LARGEST = tl.constexpr(1 << 31)  # no item has as much work
_NEVER = tl.constexpr((1 << 63) - 1)  # comes last


@triton.jit(
    do_not_specialize=["batch_stride", "head_stride", "items", "kv_heads", "columns", "group"],
    do_not_specialize_on_alignment=["pattern_ptr", "count_ptr"],
)
def size_kernel(
    pattern_ptr, count_ptr,  # int32 [B, Hq], [P * columns]
    size_ptr,  # int32 [items]
    batch_stride, head_stride, items, kv_heads, columns, group,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes how many entries every item has."""
    item = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    here = item < items
    kv_head, column = item // columns, item % columns
    head_ptr = pattern_ptr + (kv_head // kv_heads).to(tl.int64) * batch_stride
    size = tl.zeros([AT_ONCE], tl.int32)
    for member in range(group):
        pattern = tl.load(head_ptr + (kv_head % kv_heads * group + member) * head_stride, mask=here, other=0)
        size += tl.load(count_ptr + pattern.to(tl.int64) * columns + column, mask=here, other=0)
    tl.store(size_ptr + item, size, mask=here)


@triton.jit(do_not_specialize=["items", "programs"], do_not_specialize_on_alignment=["key_ptr"])
def key_kernel(size_ptr, key_ptr, items, programs, AT_ONCE: tl.constexpr):
    """Writes what items are sorted by for `plan.start_order`; one program does all."""
    lane = tl.arange(0, AT_ONCE)
    total = tl.zeros([], tl.int64)
    for first in range(0, items, AT_ONCE):
        size = tl.load(size_ptr + first + lane, mask=first + lane < items, other=0)
        total += tl.sum(size.to(tl.int64), 0)
    others = tl.zeros([], tl.int32)  # items that are not long
    for first in range(0, items, AT_ONCE):
        size = tl.load(size_ptr + first + lane, mask=first + lane < items, other=0)
        is_short = (size.to(tl.int64) * items <= 2 * total) & (first + lane < items)
        others += tl.sum(is_short.to(tl.int32), 0)
    before = tl.zeros([], tl.int32)
    for first in range(0, items, AT_ONCE):
        size = tl.load(size_ptr + first + lane, mask=first + lane < items, other=0)
        is_long = size.to(tl.int64) * items > 2 * total
        is_short = (~is_long & (first + lane < items)).to(tl.int32)
        place = before + tl.cumsum(is_short, 0)
        is_last = ~is_long & (place > others - 3 * programs)
        key = tl.where(is_long, -1 - size, tl.where(is_last, 2147483647 - size, 0))
        tl.store(key_ptr + first + lane, key, mask=first + lane < items)
        before += tl.sum(is_short, 0)


@triton.jit(do_not_specialize=["items", "programs"], do_not_specialize_on_alignment=["first_ptr", "chain_ptr"])
def deal_kernel(
    order_ptr, size_ptr,  # int64, int32 [items]
    first_ptr, chain_ptr,  # int32: the number of all entries, and of all chains
    dealt_ptr,  # int32 [3, items]: program, time, how many items the program has before
    given_ptr, total_ptr,  # int32 [2, programs + 1]: after a zero, items and entries of each; [3]
    items, programs,
    PADDED: tl.constexpr, PROGRAM_BITS: tl.constexpr,
):  # fmt: skip
    """Gives every item to a program, and writes how many entries, chains and times there are. One program does all."""
    SHIFT: tl.constexpr = PROGRAM_BITS + COUNT_BITS
    lane = tl.arange(0, PADDED).to(tl.int64)
    entries = tl.load(first_ptr).to(tl.int64)
    total = entries + items
    state = tl.where(lane < programs, lane << COUNT_BITS, _NEVER)
    at = 0
    while at < items:
        load = state >> SHIFT
        is_free = ((load - tl.min(load, 0)) * 2 * items <= total) & (state < _NEVER)
        free = tl.sum(is_free.to(tl.int32), 0)
        here = (lane < free) & (at + lane < items)
        item = tl.load(order_ptr + at + lane, mask=here, other=0)
        size = tl.load(size_ptr + item, mask=here, other=0).to(tl.int64)
        # The longest first, of equal ones the first: 31 bits, as many as PADDED needs, and the number of the item.
        key = tl.where(here, ((_LARGEST - 1 - size) << SHIFT) | (lane << COUNT_BITS) | item, _NEVER)
        # Both are sorted at once, which takes as long as one. Those that are free come first.
        state, key = tl.split(tl.trans(tl.sort(tl.trans(tl.join(state, key)))))
        load = state >> SHIFT
        is_given = key < _NEVER
        item, cost = key & _MASK, _LARGEST - (key >> SHIFT)
        tl.store(dealt_ptr + item, ((state >> COUNT_BITS) & (PADDED - 1)).to(tl.int32), mask=is_given)
        tl.store(dealt_ptr + items + item, load.to(tl.int32), mask=is_given)
        tl.store(dealt_ptr + 2 * items + item, (state & _MASK).to(tl.int32), mask=is_given)
        state += tl.where(is_given, (cost << SHIFT) + 1, 0)
        at += free

    is_program = state < _NEVER
    load, count = state >> SHIFT, state & _MASK
    number = (state >> COUNT_BITS) & (PADDED - 1)
    tl.store(given_ptr + number + 1, count.to(tl.int32), mask=is_program)
    tl.store(given_ptr + (programs + 1) + number + 1, (load - count).to(tl.int32), mask=is_program)
    tl.store(given_ptr, 0)
    tl.store(given_ptr + programs + 1, 0)
    tl.store(total_ptr, entries.to(tl.int32))
    tl.store(total_ptr + 1, tl.load(chain_ptr))
    tl.store(total_ptr + 2, tl.max(tl.where(is_program, load, 0), 0).to(tl.int32))
