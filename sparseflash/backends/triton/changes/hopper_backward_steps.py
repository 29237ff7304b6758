"""Loops over the score modifications of a call, for the Hopper backward; `hopper.py` describes their functions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseflash.backends.triton.hopper.record import send
from sparseflash.backends.triton.hopper.scores import plus_of_threads


@gluon.jit
def arguments_of_changes(CHANGES: gl.constexpr, tensors, numbers, whole, desc, learned, learned_desc):
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        own = whole[CHANGES.STARTS[i] : CHANGES.STARTS[i] + CHANGES.kinds[i].WHOLE]
        own_desc, own_learned, own_learned_desc = (), (), ()
        if CHANGES.HAVE_DESCRIPTORS[i]:
            own_desc = desc
        if CHANGES.ARE_LEARNED[i]:
            own_learned = learned[i]
        if CHANGES.kinds[i].store is not None:
            own_learned_desc = learned_desc
        found += ((tensors[i], numbers[i], own, own_desc, own_learned, own_learned_desc),)
    return found


@gluon.jit
def buffers_of_changes(CHANGES: gl.constexpr, changes, ROWS: gl.constexpr, KEYS: gl.constexpr):
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].buffers is None:
            found += ((),)
        else:
            found += (CHANGES.kinds[i].buffers(CHANGES, i, changes[i], ROWS, KEYS),)
    return found


# ---------------------------------------------------------------------- the loading warp


@gluon.jit
def begun(CHANGES: gl.constexpr, changes, of_tokens):
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].begin is None:
            found += ((),)
        else:
            found += (CHANGES.kinds[i].begin(CHANGES, i, changes[i], of_tokens),)
    return found


@gluon.jit
def send_changes(CHANGES: gl.constexpr, changes, of_program, place, of_tokens, number_s, stage, ROWS: gl.constexpr):
    """Passes the numbers of a step to the warpgroups. Returns what each score modification keeps for `load_last`."""
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].send is None:
            found += ((),)
        else:
            numbers, kept = CHANGES.kinds[i].send(CHANGES, i, changes[i], of_program[i], place, of_tokens, ROWS)
            gl.static_assert(len(numbers) == CHANGES.kinds[i].SENT, "`sent` numbers")
            for n in gl.static_range(len(numbers)):
                send(number_s, stage, CHANGES.FIRST_SENT[i] + n, numbers[n], CHANGES.SENT)
            found += (kept,)
    return found


@gluon.jit
def load_last(CHANGES: gl.constexpr, changes, buffers, step, kept):
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].load_last is not None:
            CHANGES.kinds[i].load_last(CHANGES, i, changes[i], buffers[i], step, kept[i])


# ---------------------------------------------------------------------- the warpgroups


@gluon.jit
def begun_tiles(CHANGES: gl.constexpr, changes, step, no_scores):
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].begin_tile is None:
            found += ((),)
        else:
            found += (CHANGES.kinds[i].begin_tile(CHANGES, i, changes[i], step, no_scores),)
    return found


@gluon.jit
def changed_scores(CHANGES: gl.constexpr, changes, buffers, s, of_tiles, step):
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].apply is not None:
            s = CHANGES.kinds[i].apply(CHANGES, i, changes[i], buffers[i], s, of_tiles[i], step)
    return s


@gluon.jit
def changed_in_masked_tiles(CHANGES: gl.constexpr, changes, s, of_tiles):
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].apply_masked is None:
            found += (of_tiles[i],)
        else:
            s, of_tile = CHANGES.kinds[i].apply_masked(CHANGES, i, changes[i], s, of_tiles[i])
            found += (of_tile,)
    return s, found


@gluon.jit
def exponentials(CHANGES: gl.constexpr, changes, s, of_tiles, qk_scale):
    # Added to exponents: a number for the tile or for each thread of a row, and a number for each row.
    added, added_to_rows = None, None
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].of_rows is None:
            found += (of_tiles[i],)
        else:
            s, own, of_tile = CHANGES.kinds[i].of_rows(CHANGES, i, changes[i], s, of_tiles[i], qk_scale)
            found += (of_tile,)
            if CHANGES.kinds[i].ADDS == "rows":
                added_to_rows = own
            else:
                added = own
    if CHANGES.BY_THREAD:
        if added_to_rows is not None:
            OF_THREADS: gl.constexpr = gl.SliceLayout(1, added.type.layout)
            added += gl.convert_layout(added_to_rows, OF_THREADS, assert_trivial=True)[:, None]
        p = gl.exp2(plus_of_threads(s * qk_scale, added))
    elif added_to_rows is not None:
        p = gl.exp2(s * qk_scale + added_to_rows[:, None])
    elif added is not None:
        p = gl.exp2(s * qk_scale + added)
    else:
        p = gl.exp2(s * qk_scale)
    return p, found


@gluon.jit
def times_derivatives(CHANGES: gl.constexpr, changes, p, s, of_tiles):
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].derivative is not None:
            p = CHANGES.kinds[i].derivative(CHANGES, i, changes[i], p, s, of_tiles[i])
    return p


@gluon.jit
def store_gradients(CHANGES: gl.constexpr, changes, ds_s, step, batch, first_k):
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].store is not None:
            CHANGES.kinds[i].store(CHANGES, i, changes[i], ds_s, step, batch, first_k)


# ---------------------------------------------------------------------- sums of gradients


@gluon.jit
def started(CHANGES: gl.constexpr, no_scores):
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].start is None:
            found += ((),)
        else:
            found += (CHANGES.kinds[i].start(CHANGES, i, no_scores),)
    return found


@gluon.jit
def plus_gradients(CHANGES: gl.constexpr, changes, sums, ds, of_tiles):
    """Adds a tile's fp32 gradients to the sums."""
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].gradient is None:
            found += (sums[i],)
        else:
            found += (CHANGES.kinds[i].gradient(CHANGES, i, changes[i], sums[i], ds, of_tiles[i]),)
    return found


@gluon.jit
def plus_later_gradients(CHANGES: gl.constexpr, changes, sums, half_ds, of_tiles, step, place, no_sums):
    """Adds a tile's 16-bit gradients to the sums, after dq has left its registers."""
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].gradient_later is None:
            found += (sums[i],)
        else:
            found += (
                CHANGES.kinds[i].gradient_later(
                    CHANGES, i, changes[i], sums[i], half_ds, of_tiles[i], step, place, no_sums[i]
                ),
            )
    return found


@gluon.jit
def finished_heads(CHANGES: gl.constexpr, changes, sums, no_sums, place):
    found = ()
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].finish_head is None:
            found += (sums[i],)
        else:
            CHANGES.kinds[i].finish_head(CHANGES, i, changes[i], sums[i], place)
            found += (no_sums[i],)
    return found


@gluon.jit
def finish(CHANGES: gl.constexpr, changes, sums):
    for i in gl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].finish is not None:
            CHANGES.kinds[i].finish(CHANGES, i, changes[i], sums[i])
