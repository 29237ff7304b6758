"""Products, weights and masks of a step of the Hopper backward, and the layouts of its tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from sparseflash.backends.triton.changes.hopper_backward_steps import (
    changed_in_masked_tiles,
    changed_scores,
    exponentials,
)
from sparseflash.backends.triton.hopper.backward_items import KEYS
from sparseflash.backends.triton.hopper.gluon_api import accumulator
from sparseflash.backends.triton.hopper.rows import WIDTH
from sparseflash.backends.triton.hopper.tiles import masked_keys

# A dead score, where the derivatives of score modifications are computed from the scores: its square is finite. Its
# weight is 0 where lse is above -1e7, for every cap (`softcap.CAPS`); `attention` promises no gradients from a million
# on.
DEAD = gl.constexpr(-1e19)


@gluon.jit
def in_registers(x):
    """Copies a broadcast value into registers before the products that accumulate onto it are issued. Otherwise ptxas
    would wait for these products before it makes the copies (warning C7517).
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def plus_products(x_s, y_s, acc, use_acc, USED: gl.constexpr, REST: gl.constexpr):
    """Starts the product acc + x y over the first USED + REST channels; the other channels hold zeros. acc counts as 0
    unless `use_acc`. x of USED channels alone may be in registers.

    A piece begins at a multiple of 64 channels, where a swizzled tile has a new row of shared memory.
    """
    if x_s.shape[1] == USED:
        acc = warpgroup_mma(x_s, y_s, acc, use_acc=use_acc, is_async=True)
    else:
        acc = warpgroup_mma(
            x_s.slice(0, USED, dim=1), y_s.slice(0, USED, dim=0), acc, use_acc=use_acc, is_async=True
        )  # fmt: skip
        if REST > 0:
            x_s, y_s = x_s.slice(USED, REST, dim=1), y_s.slice(USED, REST, dim=0)
            acc = warpgroup_mma(x_s, y_s, accumulator(acc), is_async=True)
    return acc


@gluon.jit
def in_thread_order(dq, ROWS: gl.constexpr, D: gl.constexpr):
    """dq [ROWS, D], or of two steps [2 * ROWS, D], in its order in shared memory and in chains: of each step, each
    thread's numbers in groups of four, the groups of a warp's threads one after another. `rows.in_rows` undoes it.

    A matrix instruction leaves a thread a pair of numbers in every eighth column. Stored by rows, pairs of several rows
    would share banks of shared memory. Dimensions of the first shape: of rows, step, warp, half, lane; of columns,
    warpgroup (if 64 rows are all), eight, lane, number in the pair. Eights come in the order of columns, so that the
    last ones can be left out.
    """
    COUNT: gl.constexpr = dq.shape[0]
    if COUNT == 64:
        dq = dq.reshape([4, 2, 8, 2, D // 16, 4, 2]).permute((3, 4, 0, 2, 5, 1, 6))
    else:
        dq = dq.reshape([COUNT // ROWS, ROWS // 16, 2, 8, D // 8, 4, 2]).permute((0, 4, 1, 3, 5, 2, 6))
    return dq.reshape([COUNT * D // WIDTH, WIDTH])


@gluon.jit
def place_of_sums(item, number, first_k, tiles, HAS_PARTS: gl.constexpr):
    """Where the gradient sums of an item are stored: in the order of keys, with `tiles` items a head; or in the order
    of the list if some items are parts.
    """
    return item if HAS_PARTS else number * tiles + first_k // KEYS


@gluon.jit
def weights_of(
    CHANGES: gl.constexpr, changes, changes_s, s, rows, of_tiles, step, is_partial, mask, qk_scale,
    ROWS: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """`(weights in fp32, modified scores, of_tiles)` from products of keys and queries.

    mask: the arguments of `masked_keys` for the tile's bits.
    """
    LAYOUT: gl.constexpr = s.type.layout
    s = changed_scores(CHANGES, changes, changes_s, s, of_tiles, step)
    if CHANGES.MAY_BE_NAN and HAS_LENGTHS:  # past the lengths
        is_dead = rows.slice(0, 1, dim=0).load(LAYOUT).broadcast_to(KEYS, ROWS) == float("-inf")
        s = gl.where(is_dead, float("-inf"), s)
    dead = float("-inf")
    if CHANGES.HAVE_DERIVATIVES:
        dead = DEAD
    if is_partial:
        s, of_tiles = changed_in_masked_tiles(CHANGES, changes, s, of_tiles)
        words_ptr, tile, first_row, k_left = mask
        s = masked_keys(s, words_ptr, tile, 0, first_row, k_left, dead, KEYS, HAS_LENGTHS, False)
    changed = s
    if CHANGES.HAVE_DERIVATIVES:
        changed += rows.slice(0, 1, dim=0).load(LAYOUT).broadcast_to(KEYS, ROWS)
    p, of_tiles = exponentials(CHANGES, changes, changed, of_tiles, qk_scale)
    return p, s, of_tiles


@gluon.jit
def store_part(parts_ptr, part, x, IS_DV: gl.constexpr, FIRST: gl.constexpr, D: gl.constexpr):
    """Writes channels from FIRST on of dk or dv of a part of an item, in fp32 rows of D.

    It writes from registers, because at D=128 dk does not fit into one buffer of dq, and the senders use both buffers.
    """
    LAYOUT: gl.constexpr = x.type.layout
    key = gl.cast(gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT)), gl.int64)
    column = gl.cast(FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT)), gl.int64)
    before = gl.cast(part - 1, gl.int64) * (2 * KEYS)  # dk, then dv, as in `combine_gradients_kernel`
    if IS_DV:
        before += KEYS
    gl.store(parts_ptr + ((key + before)[:, None] * D + column[None, :]), x)


@gluon.jit
def plus_weighted(x, weights, y_s, FIRST: gl.constexpr):
    """x + weights y over the channels of y from FIRST on that x has, in flight. weights: in registers."""
    weights = gl.convert_layout(weights, gl.DotOperandLayout(operand_index=0, parent=x.type.layout, k_width=2))
    if x.shape[1] < y_s.shape[1]:
        y_s = y_s.slice(FIRST, x.shape[1], dim=1)
    return warpgroup_mma(weights, y_s, x, is_async=True)


@gluon.constexpr_function
def layout_of_products(columns, parts):
    """The layout of products with this many columns by eight warps. parts: warpgroups that share the columns."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8 // parts, parts], instr_shape=[16, columns // parts, 16]
    )
