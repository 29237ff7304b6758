"""How the portable kernels go through the changes of scores of a call; `kind.py` says what each function does."""

import triton
import triton.language as tl

from sparseflash.backends.triton.changes.kind import Arguments


@triton.jit
def begun(CHANGES: tl.constexpr, tensors, numbers, whole, learned):
    """What `arguments_of` takes of each change. whole: all `WHOLE_NUMBERS`. learned: None without gradients."""
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
    """One of the `begun`, with names: Triton 3.6 drops those of tuples in a tuple that is added to another."""
    return Arguments(args[0], args[1], args[2], args[3], args[4])


@triton.jit
def loaded(
    CHANGES: tl.constexpr, changes, at,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """What each change reads of a tile before its products.

    A bias is loaded in a layout of its own, and of two layouts that meet where no product decides, as in the maximum of
    a row, Triton takes that of the later one. If that is the load, all scores change into it and back, and a row is
    reduced across a warp: where the rows of a 16-bit bias do not begin at multiples of 16 numbers, with 40 to 110 times
    the shuffles and 550 to 1,550 bytes of spills (forward, D = 32 to 128, Triton 3.6 and 3.9). A bias of keys is not
    loaded here: it takes 6 % longer (forward, D = 128, H200).
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
    """`(changed scores, what each change keeps for its gradient)` of products.

    Changed scores are in natural units, with the scale inside, so what follows takes `log2(e)` in place of `scale *
    log2(e)`.
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
    """The sums of each change before the first tile; () for one that keeps none."""
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
    """`(gradients of the products, without the scale, new sums)`: backwards through the changes."""
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
    """Writes the sums of each change after the last tile."""
    if CHANGES is not None:
        for i in tl.static_range(len(CHANGES.kinds)):
            if CHANGES.kinds[i].finish is not None:
                CHANGES.kinds[i].finish(CHANGES, i, arguments_of(changes[i]), sums[i], place, first, length, TILE, CUT)
