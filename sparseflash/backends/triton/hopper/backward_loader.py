"""The loading warp of the Hopper backward: queries and dout of every step, keys and values of every item."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseflash.backends.triton.changes.hopper_backward_steps import begun, load_last, send_changes
from sparseflash.backends.triton.hopper.backward_items import header, items_of_program
from sparseflash.backends.triton.hopper.gluon_api import async_load
from sparseflash.backends.triton.hopper.record import send
from sparseflash.backends.triton.hopper.rows import TILE_ROWS
from sparseflash.backends.triton.persistent.backward_plan import ENTRY, ENTRY_ROW, ENTRY_TILE


@gluon.jit
def loader(
    loads, ROWS: gl.constexpr, Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr, CHANGES: gl.constexpr,
):  # fmt: skip
    """Loads queries, with their -lse and -delta, and dout for every step; keys and values once an item."""
    descriptors, tiles_s, bars, lists, sizes, changes, changes_s = loads
    q_desc, dout_desc, k_desc, v_desc, rows_desc = descriptors
    q_s, dout_s, k_s, v_s, rows_s, number_s = tiles_s
    q_full, q_empty, dout_full, dout_empty, kv_full = bars
    start_ptr, work_ptr, entry_ptr = lists
    heads, kv_heads, row_tiles, of_tokens = sizes
    of_program = begun(CHANGES, changes, of_tokens)
    STEPS: gl.constexpr = TILE_ROWS // ROWS
    step = 0
    begin, end = items_of_program(start_ptr)
    for item in range(begin, end):
        number, first_k, first, count = header(work_ptr, item)
        batch, kv_head = number // kv_heads, number % kv_heads
        for i in range(count * STEPS):
            at = entry_ptr + (first + i // STEPS) * ENTRY
            row, tile = gl.load(at + ENTRY_ROW), gl.load(at + ENTRY_TILE)
            piece = i % STEPS
            head = row // row_tiles % heads
            first_q = row % row_tiles * TILE_ROWS + piece * ROWS
            stage = step % Q_STAGES
            mbarrier.wait(q_empty.index(stage), ((step // Q_STAGES) & 1) ^ 1)
            send(number_s, stage, 0, tile, CHANGES.SENT)
            member = head - kv_head * (heads // kv_heads)
            if CHANGES.HAVE_SUMS_OF_HEADS:
                send(number_s, stage, CHANGES.SENT - 1, member, CHANGES.SENT)
            place = batch, head, member, first_q, first_k
            kept = send_changes(CHANGES, changes, of_program, place, of_tokens, number_s, stage, ROWS)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + rows_desc.block_type.nbytes)
            async_load(q_desc, [batch, head, first_q, 0], q_full.index(stage), q_s.index(stage))
            async_load(rows_desc, [(row * STEPS + piece) * 2, 0], q_full.index(stage), rows_s.index(stage))
            stage = step % DOUT_STAGES
            mbarrier.wait(dout_empty.index(stage), ((step // DOUT_STAGES) & 1) ^ 1)
            mbarrier.expect(dout_full.index(stage), dout_desc.block_type.nbytes)
            async_load(dout_desc, [batch, head, first_q, 0], dout_full.index(stage), dout_s.index(stage))
            load_last(CHANGES, changes, changes_s, step, kept)
            if i == 0:
                # The previous item's keys and values have been read once dout of its last step has been read.
                before = step + DOUT_STAGES - 1
                mbarrier.wait(dout_empty.index(before % DOUT_STAGES), ((before // DOUT_STAGES) & 1) ^ 1)
                mbarrier.expect(kv_full.index(0), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
                async_load(k_desc, [batch, kv_head, first_k, 0], kv_full.index(0), k_s)
                async_load(v_desc, [batch, kv_head, first_k, 0], kv_full.index(0), v_s)
            step += 1
