"""Loops over the score modifications of a call, for the Hopper forward; `hopper.py` describes their functions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def arguments_of_changes(CHANGES: gl.constexpr, tensors, numbers, whole, desc):
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        own = whole[CHANGES.STARTS[i] : CHANGES.STARTS[i] + CHANGES.kinds[i].WHOLE]
        if CHANGES.HAVE_DESCRIPTORS[i]:
            args = (tensors[i], numbers[i], own, desc)
        else:
            args = (tensors[i], numbers[i], own, ())
        found += (args,)
    return found


# ---------------------------------------------------------------------- the loading warp


@gluon.jit
def buffers_of_changes(
    CHANGES: gl.constexpr, changes, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr
):  # fmt: skip
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].buffers is None:
            found += ((),)
        else:
            found += (CHANGES.kinds[i].buffers(CHANGES, i, changes[i], BLOCK_N, STAGES, GROUPS),)
    return found


@gluon.jit
def recorded(CHANGES: gl.constexpr, changes, record, number, head, q_len, k_len):
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].record is not None:
            record = CHANGES.kinds[i].record(CHANGES, i, changes[i], record, number, head, q_len, k_len)
    return record


@gluon.jit
def load_with_keys(CHANGES: gl.constexpr, changes, buffers, stage, bar, batch, head, first_k):
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].load_with_keys is not None:
            CHANGES.kinds[i].load_with_keys(CHANGES, i, changes[i], buffers[i], stage, bar, batch, head, first_k)


@gluon.jit
def load_last(
    CHANGES: gl.constexpr, changes, buffers, step, is_item, batch, head, first_q, first_k, GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Starts loads after the loads of keys and values. They have one buffer for each warpgroup, which is freed last."""
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].load_last is not None:
            CHANGES.kinds[i].load_last(
                CHANGES, i, changes[i], buffers[i], step, is_item, batch, head, first_q, first_k, GROUPS, BLOCK_N
            )


# ---------------------------------------------------------------------- the warpgroups


@gluon.jit
def no_items(CHANGES: gl.constexpr):
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].no_item is None:
            found += ((),)
        else:
            found += (CHANGES.kinds[i].no_item(CHANGES, i),)
    return found


@gluon.jit
def begun_items(CHANGES: gl.constexpr, changes, of_items, item, C: gl.constexpr, BLOCK_N: gl.constexpr):
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].begin_item is None:
            found += (of_items[i],)
        else:
            found += (CHANGES.kinds[i].begin_item(CHANGES, i, changes[i], item, C, BLOCK_N),)
    return found


@gluon.jit
def begun_tiles(
    CHANGES: gl.constexpr, changes, of_items, is_mixed, block, item, C: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].begin_tile is None:
            found += ((),)
        else:
            tile, is_own = CHANGES.kinds[i].begin_tile(CHANGES, i, changes[i], of_items[i], block, item, C, BLOCK_N)
            found += (tile,)
            is_mixed = is_mixed | is_own
    return found, is_mixed


@gluon.jit
def multiplied(CHANGES: gl.constexpr, changes, buffers, s, stage, Q: gl.constexpr):
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].multiply is not None:
            s = CHANGES.kinds[i].multiply(CHANGES, i, changes[i], buffers[i], s, stage, Q)
    return s


@gluon.jit
def changed_scores(CHANGES: gl.constexpr, changes, buffers, s, of_tiles, step, C: gl.constexpr):
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].apply is None:
            found += (of_tiles[i],)
        else:
            s, tile = CHANGES.kinds[i].apply(CHANGES, i, changes[i], buffers[i], s, of_tiles[i], step, C)
            found += (tile,)
    return s, found


@gluon.jit
def changed_in_masked_tiles(
    CHANGES: gl.constexpr, changes, s, of_tiles, block, item, C: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].apply_masked is not None:
            s = CHANGES.kinds[i].apply_masked(CHANGES, i, changes[i], s, of_tiles[i], block, item, C, BLOCK_N)
    return s


@gluon.jit
def left_to_rows(CHANGES: gl.constexpr, changes, s, of_tiles, item, BLOCK_N: gl.constexpr):
    """`(scores, number)` after `of_rows` of each score modification. The softmax adds the number: one for the tile, or
    one for each thread of a row.
    """
    added = 0.0
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].of_rows is not None:
            s, added = CHANGES.kinds[i].of_rows(CHANGES, i, changes[i], s, of_tiles[i], item, BLOCK_N)
    return s, added


@gluon.jit
def finished_rows(CHANGES: gl.constexpr, changes, maximum, total, head):
    """`(maximum, total, factor of the accumulator)` at the end of an item. At most one has `finish_rows`."""
    factor = 1.0
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].finish_rows is not None:
            maximum, total, factor = CHANGES.kinds[i].finish_rows(CHANGES, i, changes[i], maximum, total, head)
    return maximum, total, factor
