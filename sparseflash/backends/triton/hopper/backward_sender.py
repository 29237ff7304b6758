"""The two sending warps of the Hopper backward: they add dq to chains in a fixed order, and write dk and dv."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from sparseflash.backends.triton.hopper.backward_items import SENDERS, header, items_of_program, part_of
from sparseflash.backends.triton.hopper.gluon_api import async_add, async_store
from sparseflash.backends.triton.hopper.rows import TILE_ROWS
from sparseflash.backends.triton.persistent.backward_plan import ENTRY, ENTRY_CHAIN, ENTRY_RANK


@gluon.jit
def wait_for_turn(counter_ptr, rank):
    """Spins until `rank` additions to the chain are complete and visible.

    The counter is read without acquire semantics, because this warp reads nothing that the additions wrote. The next
    operation is the next addition, a reduction of the copy engine in the L2 cache, issued only after the counter was
    read; the earlier additions were complete in L2 before the counter was raised (`sent_is_visible`). PTX's memory
    model would ask for an acquire and a proxy fence here, which cost time; without them the bits were the same in all
    stored repeats.
    """
    made = gl.load(counter_ptr, volatile=True)
    while made < rank:
        made = gl.load(counter_ptr, volatile=True)


@gluon.jit
def sent_is_visible():
    """Waits until everything that this warp has sent is visible to any reader of a counter that it raises afterwards.

    `tma.store_wait` is not enough: it returns when the source has been read.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r",
        [gl.zeros([32], gl.int32, layout=LANES)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def sender(
    sends, out_desc, WHICH: gl.constexpr, ROWS: gl.constexpr, BOXES: gl.constexpr, HAS_PARTS: gl.constexpr
):  # fmt: skip
    """Sends dq of every second step of the plan, in the order of its chain; and dv (WHICH 0) or dk (WHICH 1) of every
    item that is not a part.

    dq is sent in BOXES boxes of dq_s, which holds them one after another; what follows them in a buffer is zeros.
    """
    acc_desc, dq_s, out_s, full, empty, counter_ptr, lists, kv_heads = sends
    start_ptr, work_ptr, entry_ptr = lists
    STEPS: gl.constexpr = TILE_ROWS // ROWS
    sent = 0
    begin, end = items_of_program(start_ptr)
    for item in range(begin, end):
        number, first_k, first, count = header(work_ptr, item)
        # The sender of a step follows from the entry's number: Triton 3.6 and 3.7 lose a counter that is carried from
        # item to item if only the start of this loop uses it.
        for i in range((first * STEPS + WHICH) & 1, count * STEPS, SENDERS):
            at = entry_ptr + (first + i // STEPS) * ENTRY
            place = gl.load(at + ENTRY_CHAIN) * STEPS + i % STEPS
            rank = gl.load(at + ENTRY_RANK)
            wait_for_turn(counter_ptr + place, rank)
            mbarrier.wait(full.index(WHICH), sent & 1)
            for box in gl.static_range(BOXES):
                first_row = (place * BOXES + box) * dq_s.shape[1]
                source = dq_s.index(WHICH * (dq_s.shape[0] // SENDERS) + box)
                if rank == 0:
                    async_store(acc_desc, [first_row, 0], source)
                else:
                    async_add(acc_desc, [first_row, 0], source)
            tma.store_wait(0)
            mbarrier.arrive(empty.index(WHICH), count=1)
            sent_is_visible()
            gl.atomic_add(counter_ptr + place, 1, sem="relaxed", scope="gpu")
            sent += 1
        if part_of(work_ptr, item, HAS_PARTS) == 0:
            mbarrier.wait(full.index(WHICH), sent & 1)
            target = out_s.index(WHICH * (ROWS // 64))
            async_store(out_desc, [number // kv_heads, number % kv_heads, first_k, 0], target)
            tma.store_wait(0)
            mbarrier.arrive(empty.index(WHICH), count=1)
            sent += 1


@gluon.jit
def hand_over(x, rest, which, target_s, full, empty, parities, REST: gl.constexpr, SENT: gl.constexpr):
    """Waits for the buffers of SENT senders, from `which` on, and gives them a tile: x and, if REST is not 0, as many
    more channels. Bit `which` of `parities`: whether this sender has received an odd number of tiles before.
    """
    for i in gl.static_range(SENT):
        mbarrier.wait(empty.index(which + i), ((parities >> (which + i)) & 1) ^ 1)
    if x.shape[1] < target_s.shape[1]:
        target_s.slice(0, x.shape[1], dim=1).store(x)
    else:
        target_s.store(x)
    if REST > 0:
        target_s.slice(x.shape[1], REST, dim=1).store(rest)
    fence_async_shared()
    for i in gl.static_range(SENT):
        mbarrier.arrive(full.index(which + i), count=1)
