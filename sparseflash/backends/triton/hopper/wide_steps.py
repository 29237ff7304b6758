"""Loads, products, weights and masks of a step of the backward kernels for wide heads and for blocks of 64."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from sparseflash.backends.triton.hopper.gluon_api import accumulator, async_load
from sparseflash.backends.triton.hopper.record import send
from sparseflash.backends.triton.hopper.tiles import ROWS, bytes_of, load_tile, opaque
from sparseflash.backends.triton.persistent.backward_plan import ENTRY, ENTRY_ROW, ENTRY_TILE

OF_GROUP = gl.constexpr(128)  # threads of a warpgroup; each arrives by itself when it has read a stage


@gluon.jit
def load_queries(loads, batch, entry, piece, step, GROUPS: gl.constexpr):
    """Loads ROWS queries of an entry, with their -lse and -delta, and sends the number of the entry's tile. Returns
    `(head, first query)`.
    """
    descriptors, tiles_s, rests_s, bars, lists, sizes = loads
    q_desc, _, _, _, rows_desc, q_rest_desc, _, _, _ = descriptors
    q_s, _, _, _, rows_s, number_s = tiles_s
    q_rest_s, _, _, _ = rests_s
    q_full, q_empty, _, _, _, _ = bars
    _, _, entry_ptr = lists
    heads, _, row_tiles = sizes
    at = entry_ptr + entry * ENTRY
    row, tile = gl.load(at + ENTRY_ROW), gl.load(at + ENTRY_TILE)
    head = row // row_tiles % heads
    first_q = (row % row_tiles * GROUPS + piece) * ROWS
    STAGES: gl.constexpr = q_s.shape[0]
    stage = step % STAGES
    bar = q_full.index(stage)
    mbarrier.wait(q_empty.index(stage), ((step // STAGES) & 1) ^ 1)
    send(number_s, stage, 0, tile, OF=1)
    mbarrier.expect(bar, bytes_of(q_desc, q_rest_desc) + rows_desc.block_type.nbytes)
    load_tile(q_desc, q_rest_desc, q_s, q_rest_s, stage, bar, batch, head, first_q)
    async_load(rows_desc, [(row * GROUPS + piece) * 2, 0], bar, rows_s.index(stage))
    return head, first_q


@gluon.jit
def load_dout(loads, batch, head, first_q, step):
    """Loads dout of the queries that `load_queries` loads."""
    descriptors, tiles_s, rests_s, bars, _, _ = loads
    _, dout_desc, _, _, _, _, dout_rest_desc, _, _ = descriptors
    _, dout_s, _, _, _, _ = tiles_s
    _, dout_rest_s, _, _ = rests_s
    _, _, dout_full, dout_empty, _, _ = bars
    STAGES: gl.constexpr = dout_s.shape[0]
    stage = step % STAGES
    bar = dout_full.index(stage)
    mbarrier.wait(dout_empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(bar, bytes_of(dout_desc, dout_rest_desc))
    load_tile(dout_desc, dout_rest_desc, dout_s, dout_rest_s, stage, bar, batch, head, first_q)


@gluon.jit
def store_part(part_ptr, x, rest, first_row, WIDTH: gl.constexpr):
    """Writes a warpgroup's keys, in one or two pieces of channels, to a part `[keys of an item, WIDTH]`."""
    _store_part(part_ptr, x, first_row, 0, WIDTH)
    if rest is not None:
        _store_part(part_ptr, rest, first_row, x.shape[1], WIDTH)


@gluon.jit
def _store_part(part_ptr, x, first_row, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    key = first_row + opaque(gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout)))
    column = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    gl.store(part_ptr + (key[:, None] * WIDTH + column[None, :]), x)


@gluon.jit
def store_rows(x, rest, scale, x_ptr, first_row, stride, rows, DIM: gl.constexpr):
    """Writes a warpgroup's rows times `scale`, in one or two pieces of channels: those before `rows` and DIM."""
    _store_rows(x * scale, x_ptr, first_row, stride, rows, 0, DIM)
    if rest is not None:
        _store_rows(rest * scale, x_ptr, first_row, stride, rows, x.shape[1], DIM)


@gluon.jit
def _store_rows(x, x_ptr, first_row, stride, rows, FIRST: gl.constexpr, DIM: gl.constexpr):
    # `opaque` keeps the compiler from computing the addresses before the loop, where they would spill.
    row = first_row + opaque(gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout)))
    column = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    at = gl.cast(row, gl.int64)[:, None] * stride + column[None, :]
    gl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < DIM)[None, :])


@gluon.jit
def unknown(number):
    """`number`, hidden from the compiler, which then assumes that it changes at every step.

    It is used as an index of tiles that stay the same. With a constant index, Triton 3.6 would compute the descriptors
    of these tiles for matrix instructions before the loop, and spill them.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def zeros_of(x_s):
    """fp32 zeros for a sum of products with tiles of x, [ROWS, their channels]."""
    CHANNELS: gl.constexpr = x_s.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, CHANNELS, 16]
    )
    return gl.zeros([ROWS, CHANNELS], gl.float32, layout=LAYOUT)


@gluon.jit
def product(x_s, x_rest_s, x_at, y_s, y_rest_s, y_at, S: gl.constexpr):
    """x y^T [ROWS, ROWS] of two tiles, in one or two pieces of channels, in flight. Unlike in `backward.py`, the sums
    do not start as -lse or -delta: ptxas would wait for all earlier products before it sets them (C7515).
    """
    zero = gl.zeros([ROWS, ROWS], gl.float32, layout=S)
    y = y_s.index(y_at).permute((1, 0))
    found = accumulator(warpgroup_mma(x_s.index(x_at), y, zero, use_acc=False, is_async=True))
    if x_rest_s is not None:
        y = y_rest_s.index(y_at).permute((1, 0))
        found = accumulator(warpgroup_mma(x_rest_s.index(x_at), y, found, is_async=True))
    return found


@gluon.jit
def plus_weighted(x, weights, y_s):
    """x + weights y, in flight, with weights in registers."""
    weights = gl.convert_layout(weights, gl.DotOperandLayout(operand_index=0, parent=x.type.layout, k_width=2))
    return accumulator(warpgroup_mma(weights, y_s, x, is_async=True))


@gluon.jit
def unpacked(x):
    """x in fp32. The numbers stay in pairs, in half the registers, until here: ptxas would take them apart at once."""
    OF_BF16: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    OF_FP16: gl.constexpr = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
    code: gl.constexpr = OF_BF16 if x.dtype == gl.bfloat16 else OF_FP16
    return gl.inline_asm_elementwise(code, "=f,=f,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def of_queries(rows_s, stage, WHICH: gl.constexpr, S: gl.constexpr):
    """-lse (0) or -delta (1) of the queries of a stage, for every key."""
    return rows_s.index(stage).slice(WHICH, 1, dim=0).load(S).broadcast_to(ROWS, ROWS)
