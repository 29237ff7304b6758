"""Loops over the score modifications of a call, for the portable kernels; `kind.py` describes their functions."""

import triton
import triton.language as tl

from sparseflash.backends.triton.changes.kind import Arguments


@triton.jit
def begun(CHANGES: tl.constexpr, tensors, numbers, whole, learned):
    """A tuple for each score modification, for `arguments_of`, with the result of its `begin`.

    whole: the arguments WHOLE_NUMBERS. learned: None without gradients.
    """
    found = ()
    if CHANGES is not None:
        for i in tl.static_range(len(CHANGES.kinds)):
            own = whole[CHANGES.STARTS[i] : CHANGES.STARTS[i] + CHANGES.kinds[i].WHOLE]
            of_gradient = ()
            if learned is not None:
                of_gradient = learned[i]
            args = tensors[i], numbers[i], own, of_gradient, ()
            if CHANGES.kinds[i].begin is not None:
                args = (
                    tensors[i], numbers[i], own, of_gradient, CHANGES.kinds[i].begin(CHANGES, i, arguments_of(args))
                )  # fmt: skip
            found += (args,)
    return found


@triton.jit
def arguments_of(args):
    """A tuple of `begun` as `Arguments`. Triton 3.6 loses the field names of tuples when it concatenates tuples."""
    return Arguments(args[0], args[1], args[2], args[3], args[4])


@triton.jit
def loaded(
    CHANGES: tl.constexpr, changes, at,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The results of `load` of each score modification, before the matrix products of a tile.

    Biases are loaded before the product because of register layouts.

    The load of a bias has another layout than the scores. Where the two meet outside of a product, as in a row maximum,
    Triton converts to the layout of the later operation. If that is the load, all scores are converted to its layout
    and back, and a row is reduced across a warp. Where rows of a 16-bit bias do not begin at multiples of 16 elements,
    that takes 40 to 110 times the shuffles and spills 550 to 1,550 bytes (forward, D = 32 to 128, Triton 3.6 and 3.9).
    A key bias is loaded in `apply` instead: here it would take longer (experiments/results/tried/scores.csv).
    """
    found = ()
    for i in tl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[i].load is None:
            found += ((),)
        else:
            read = CHANGES.kinds[i].load(
                CHANGES, i, arguments_of(changes[i]), at, BLOCK_Q, BLOCK_K, TILE_M, TILE_N, MASKED, TRANSPOSED
            )
            found += (read,)
    return found


@triton.jit
def changed_scores(
    CHANGES: tl.constexpr, changes, read, scores, scale, at, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """`(modified scores, values that score modifications keep for their gradients)`. scores: q k^T, unscaled.

    Modified scores include the scale, so the softmax multiplies them by `log2(e)` instead of `scale * log2(e)`.
    """
    scores = scores * scale
    kept = ()
    for i in tl.static_range(len(CHANGES.kinds)):
        scores, own = CHANGES.kinds[i].apply(
            CHANGES, i, arguments_of(changes[i]), read[i], scores, at, TILE_M, TILE_N, TRANSPOSED
        )
        kept += (own,)
    return scores, kept


@triton.jit
def no_sums(CHANGES: tl.constexpr, TILE: tl.constexpr):
    found = ()
    if CHANGES is not None:
        for i in tl.static_range(len(CHANGES.kinds)):
            if CHANGES.kinds[i].start is None:
                found += ((),)
            else:
                found += (CHANGES.kinds[i].start(CHANGES, i, TILE),)
    return found


@triton.jit
def gradients_before(
    CHANGES: tl.constexpr, changes, sums, ds, kept, at, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    found = ()
    for n in tl.static_range(len(CHANGES.kinds)):
        if CHANGES.kinds[CHANGES.BACKWARDS[n]].gradient is None:
            found = (sums[CHANGES.BACKWARDS[n]],) + found
        else:
            ds, own = CHANGES.kinds[CHANGES.BACKWARDS[n]].gradient(
                CHANGES, CHANGES.BACKWARDS[n], arguments_of(changes[CHANGES.BACKWARDS[n]]),
                sums[CHANGES.BACKWARDS[n]], ds, kept[CHANGES.BACKWARDS[n]], at, BLOCK_Q, BLOCK_K, MASKED,
            )  # fmt: skip
            found = (own,) + found
    return ds, found


@triton.jit
def finish(
    CHANGES: tl.constexpr, changes, sums, place, first, length, TILE: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    if CHANGES is not None:
        for i in tl.static_range(len(CHANGES.kinds)):
            if CHANGES.kinds[i].finish is not None:
                CHANGES.kinds[i].finish(CHANGES, i, arguments_of(changes[i]), sums[i], place, first, length, TILE, CUT)
