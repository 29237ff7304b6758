"""The multiplying warpgroups of the Hopper backward."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from sparseflash.backends.triton.changes.hopper_backward_steps import (
    begun_tiles,
    finish,
    finished_heads,
    plus_gradients,
    plus_later_gradients,
    started,
    store_gradients,
    times_derivatives,
)
from sparseflash.backends.triton.hopper.backward_items import KEYS, SENDERS, header, items_of_program, part_of
from sparseflash.backends.triton.hopper.backward_sender import hand_over
from sparseflash.backends.triton.hopper.backward_steps import (
    in_registers,
    in_thread_order,
    layout_of_products,
    place_of_sums,
    plus_products,
    plus_weighted,
    store_part,
    weights_of,
)
from sparseflash.backends.triton.hopper.gluon_api import accumulator, local_mma_wait
from sparseflash.backends.triton.hopper.record import receive
from sparseflash.backends.triton.hopper.rows import TILE_ROWS


@gluon.jit
def consumer(
    reads, ROWS: gl.constexpr, JOINED: gl.constexpr, KEPT: gl.constexpr, Q_STAGES: gl.constexpr,
    DOUT_STAGES: gl.constexpr, D: gl.constexpr, USED: gl.constexpr, REST: gl.constexpr, V_USED: gl.constexpr,
    V_REST: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_PARTS: gl.constexpr, CHANGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of every item, and dq of every step."""
    tiles_s, bars, lists, words_ptr, lengths, parts_ptr, ds_s, dq_s, out_s, full, empty, sizes, changes, changes_s = (
        reads
    )
    scale, kv_heads, group, of_tokens = sizes
    qk_scale, q_len, offset = of_tokens
    q_s, dout_s, k_s, v_s, rows_s, number_s = tiles_s
    q_full, q_empty, dout_full, dout_empty, kv_full = bars
    start_ptr, work_ptr, _ = lists
    dtype: gl.constexpr = q_s.dtype
    S: gl.constexpr = layout_of_products(ROWS, 1)
    # Each warpgroup computes half the rows of dq or, of 64 rows, half the columns.
    Q: gl.constexpr = layout_of_products(D, 128 // (JOINED * ROWS))
    no_dq = gl.zeros([JOINED * ROWS, D], gl.float32, layout=Q)
    no_scores = gl.zeros([KEYS, ROWS], gl.float32, layout=S)
    no_sums = started(CHANGES, no_scores)
    STEPS: gl.constexpr = TILE_ROWS // ROWS
    step = 0
    # Parities, packed into one register: of the tiles given to each sender, and of the items with an entry.
    parities = 0
    begin, end = items_of_program(start_ptr)
    for item in range(begin, end):
        number, first_k, first, count = header(work_ptr, item)
        k_left = KEYS
        if HAS_LENGTHS:
            lengths_ptr, lengths_stride = lengths
            k_left = gl.load(lengths_ptr + (lengths_stride + number // kv_heads)) - first_k
        dk = gl.zeros([KEYS, USED], gl.float32, layout=layout_of_products(USED, 1))
        dv = gl.zeros([KEYS, V_USED], gl.float32, layout=layout_of_products(V_USED, 1))
        if REST > 0:
            dk_rest = gl.zeros([KEYS, REST], gl.float32, layout=layout_of_products(REST, 1))
        if V_REST > 0:
            dv_rest = gl.zeros([KEYS, V_REST], gl.float32, layout=layout_of_products(V_REST, 1))
        sums, member, place = no_sums, 0, 0
        if CHANGES.HAVE_SUMS:
            place = place_of_sums(item, number, first_k, gl.cdiv(q_len + offset, KEYS), HAS_PARTS)
        if count > 0:
            mbarrier.wait(kv_full.index(0), (parities >> SENDERS) & 1)
            parities ^= 1 << SENDERS
        k, v = k_s, v_s
        if KEPT:
            OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S, k_width=2)
            k, v = k_s.load(OPERAND), v_s.load(OPERAND)
        for turn in range(count * (STEPS // JOINED)):
            for each in gl.static_range(JOINED):
                i = turn * JOINED + each
                q_stage, dout_stage = step % Q_STAGES, step % DOUT_STAGES
                mbarrier.wait(q_full.index(q_stage), (step // Q_STAGES) & 1)
                tile = receive(number_s, q_stage, 0, CHANGES.SENT)
                is_partial = (tile != 0) | (k_left < KEYS)
                rows = rows_s.index(q_stage)
                of_step = number_s, q_stage, step, of_tokens
                of_tiles = begun_tiles(CHANGES, changes, of_step, no_scores)
                if CHANGES.HAVE_SUMS_OF_HEADS:
                    # A head's tiles are consecutive, so its sums are complete when the head changes.
                    of_group = receive(number_s, q_stage, CHANGES.SENT - 1, CHANGES.SENT)
                    if of_group != member:
                        sums = finished_heads(CHANGES, changes, sums, no_sums, place * group + member)
                    member = of_group
                s = no_scores
                if not CHANGES.HAVE_DERIVATIVES:
                    s = in_registers(rows.slice(0, 1, dim=0).load(S).broadcast_to(KEYS, ROWS))
                dp = in_registers(rows.slice(1, 1, dim=0).load(S).broadcast_to(KEYS, ROWS))
                q = q_s.index(q_stage).permute((1, 0))
                s = plus_products(k, q, s, not CHANGES.HAVE_DERIVATIVES, USED, REST)
                mbarrier.wait(dout_full.index(dout_stage), (step // DOUT_STAGES) & 1)
                dp = plus_products(v, dout_s.index(dout_stage).permute((1, 0)), dp, True, V_USED, V_REST)
                s = local_mma_wait(s, 1 if V_REST == 0 else 2)
                if each > 0:  # the products with the step before have ended, too
                    dk, dv = accumulator(dk), accumulator(dv)
                    if REST > 0:
                        dk_rest = accumulator(dk_rest)
                    if V_REST > 0:
                        dv_rest = accumulator(dv_rest)
                    async_copy.mbarrier_arrive(dout_empty.index((step - 1) % DOUT_STAGES), increment_count=False)
                    async_copy.mbarrier_arrive(q_empty.index((step - 1) % Q_STAGES), increment_count=False)
                mask = words_ptr, tile, i % STEPS * ROWS, k_left
                p, s, of_tiles = weights_of(
                    CHANGES, changes, changes_s, s, rows, of_tiles, of_step, is_partial, mask, qk_scale, ROWS,
                    HAS_LENGTHS,
                )  # fmt: skip
                weights = p.to(dtype)
                p = times_derivatives(CHANGES, changes, p, s, of_tiles)
                dv = plus_weighted(dv, weights, dout_s.index(dout_stage), 0)
                if V_REST > 0:
                    dv_rest = plus_weighted(dv_rest, weights, dout_s.index(dout_stage), V_USED)
                dp = local_mma_wait(dp, 1 if V_REST == 0 else 2)
                ds = p * dp
                sums = plus_gradients(CHANGES, changes, sums, ds, of_tiles)
                half_ds = ds.to(dtype)
                if CHANGES.STORES_GRADIENTS:
                    # Keys are contiguous, as in global memory: one buffer is the operand of dq and the source of the
                    # store.
                    tma.store_wait(0)
                    ds_by_row = ds_s
                    ds_by_row.permute((1, 0)).store(half_ds)
                    fence_async_shared()
                    store_gradients(CHANGES, changes, ds_by_row, of_step, number // kv_heads, first_k)
                else:
                    ds_s.slice(each * ROWS, ROWS, dim=1).store(half_ds)
                    ds_by_row = ds_s.permute((1, 0))
                if each == JOINED - 1:
                    if not CHANGES.STORES_GRADIENTS:
                        fence_async_shared()
                    dq = warpgroup_mma(ds_by_row, k_s, no_dq, use_acc=False, is_async=True)
                dk = plus_weighted(dk, half_ds, q_s.index(q_stage), 0)
                if REST > 0:
                    dk_rest = plus_weighted(dk_rest, half_ds, q_s.index(q_stage), USED)
                if each == JOINED - 1:
                    dq, dv = local_mma_wait(dq, 1 if REST == 0 else 2), accumulator(dv)
                    if V_REST > 0:
                        dv_rest = accumulator(dv_rest)
                    async_copy.mbarrier_arrive(dout_empty.index(dout_stage), increment_count=False)
                    which = (first * STEPS + turn * JOINED) % SENDERS
                    dq = in_thread_order(dq, ROWS, D)
                    hand_over(dq, dq, which, dq_s.index(which // JOINED), full, empty, parities, 0, JOINED)
                    parities ^= ((1 << JOINED) - 1) << which
                # After dq is handed over: other programs wait for dq, and it has left its registers.
                sums = plus_later_gradients(CHANGES, changes, sums, half_ds, of_tiles, of_step, (place, group), no_sums)
                step += 1
            dk = local_mma_wait(dk, 0)
            if REST > 0:
                dk_rest = local_mma_wait(dk_rest, 0)
            async_copy.mbarrier_arrive(q_empty.index((step - 1) % Q_STAGES), increment_count=False)
        if CHANGES.HAVE_SUMS_OF_HEADS:
            sums = finished_heads(CHANGES, changes, sums, no_sums, place * group + member)
        finish(CHANGES, changes, sums)
        part = part_of(work_ptr, item, HAS_PARTS)
        if HAS_PARTS and part > 0:
            store_part(parts_ptr, part, dk, False, 0, D)
            store_part(parts_ptr, part, dv, True, 0, D)
            if REST > 0:
                store_part(parts_ptr, part, dk_rest, False, USED, D)
            if V_REST > 0:
                store_part(parts_ptr, part, dv_rest, True, V_USED, D)
        else:
            half_dv, half_dk = dv.to(dtype), (dk * scale).to(dtype)
            half_dv_rest, half_dk_rest = half_dv, half_dk
            if V_REST > 0:
                half_dv_rest = dv_rest.to(dtype)
            if REST > 0:
                half_dk_rest = (dk_rest * scale).to(dtype)
            hand_over(half_dv, half_dv_rest, 0, out_s.index(0), full, empty, parities, V_REST, 1)
            hand_over(half_dk, half_dk_rest, 1, out_s.index(ROWS // 64), full, empty, parities, REST, 1)
            parities ^= (1 << SENDERS) - 1
    if CHANGES.STORES_GRADIENTS:
        tma.store_wait(0)
